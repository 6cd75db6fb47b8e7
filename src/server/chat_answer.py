"""One growing answer of a chat: content, reasoning, tool calls, finish reason."""

from __future__ import annotations

from typing import Any

from ..aio.generation import AnswerDelta
from ..chat.deltas import Delta, ReasoningDelta, ToolCallDelta, message_of
from ..chat.response import ResponseReader


class ChatAnswer:
    """
    Args:
        with_reasoning: False drops it.
        max_num_calls: tool calls after so many are dropped.

    Attributes:
        num_reasoning_tokens: up to the last that added to the reasoning before the content.
    """

    def __init__(
        self, reader: ResponseReader, *, with_reasoning: bool, max_num_calls: int | None
    ) -> None:
        self._reader = reader
        self._with_reasoning, self._max_num_calls = with_reasoning, max_num_calls
        self._num_tokens = 0
        self._is_begun = False  # the content, or a call
        self._has_calls = False
        self.num_reasoning_tokens = 0

    def read(self, delta: AnswerDelta) -> list[Delta]:
        """The deltas of these tokens; at the end also the held-back text."""
        found: list[Delta] = []
        token_ids = delta.token_ids
        place = 0
        # Token by token: the count must not depend on the cuts of the stream.
        while not self._is_begun and place < len(token_ids):
            found += self._noted(self._reader.feed(token_ids[place : place + 1]), 1)
            place += 1
        if place < len(token_ids):
            found += self._noted(self._reader.feed(token_ids[place:]), len(token_ids) - place)
        if delta.finish_reason is not None:
            found += self._noted(self._reader.finish(), 0)
        return [part for part in found if self._is_kept(part)]

    def message(self, delta: AnswerDelta) -> dict[str, Any]:
        """The message of a whole answer, in OpenAI's form, with vLLM's two names of reasoning."""
        message = message_of(self.read(delta))
        message["refusal"] = None
        message["reasoning"] = message["reasoning_content"]
        if not message["tool_calls"]:
            del message["tool_calls"]
        return message

    def finish_reason(self, delta: AnswerDelta) -> str | None:
        """The engine's, but for an answer that ended with tool calls."""
        if self._has_calls and delta.finish_reason == "stop":
            return "tool_calls"
        return delta.finish_reason

    def _noted(self, found: list[Delta], num_tokens: int) -> list[Delta]:
        self._num_tokens += num_tokens
        for part in found:
            if isinstance(part, ReasoningDelta):
                if not self._is_begun:
                    self.num_reasoning_tokens = self._num_tokens
            else:
                self._is_begun = True
        return found

    def _is_kept(self, part: Delta) -> bool:
        if isinstance(part, ReasoningDelta):
            return self._with_reasoning
        if isinstance(part, ToolCallDelta):
            self._has_calls = True
            return self._max_num_calls is None or part.index < self._max_num_calls
        return True
