"""The deltas of an answer, and the message they form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

_ID_DIGITS = 24


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """One whole tool call.

    Attributes:
        index: index among the tool calls of the answer, from 0.
        id: as written by the model, or made by :func:`call_id`.
        arguments: a JSON object, as text.
    """

    index: int
    id: str
    name: str
    arguments: str


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


def call_id(request_id: str, answer: int, index: int, length: int | None = None) -> str:
    """The id of a tool call. It depends only on the request, so it is the same if streamed.
    It is "call_" plus 24 hexadecimal digits, or ``length`` hexadecimal digits."""
    key = f"{request_id}/{answer}/{index}".encode("utf-8", "surrogatepass")
    digits = xxhash.xxh3_128_hexdigest(key)
    return f"call_{digits[:_ID_DIGITS]}" if length is None else digits[:length]


def is_short_id(given: str | None, length: int) -> bool:
    """Whether an id consists of exactly ``length`` ASCII letters and digits."""
    return given is not None and len(given) == length and given.isascii() and given.isalnum()


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Merge adjacent texts of one type, and drop empty ones."""
    made: list[Delta] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            made.append(delta)
        elif delta.text:
            last = made[-1] if made else None
            if isinstance(last, ContentDelta) and isinstance(delta, ContentDelta):
                made[-1] = ContentDelta(last.text + delta.text)
            elif isinstance(last, ReasoningDelta) and isinstance(delta, ReasoningDelta):
                made[-1] = ReasoningDelta(last.text + delta.text)
            else:
                made.append(delta)
    return made


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """An assistant message in OpenAI's form, which can be an item of ``messages`` again.

    It always has ``role``, ``content`` (None if there are only tool calls or reasoning),
    ``reasoning_content`` (None if there is none) and ``tool_calls`` (a list, usually empty).
    """
    deltas = list(deltas)
    content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    calls = [
        {"id": d.id, "type": "function", "function": {"name": d.name, "arguments": d.arguments}}
        for d in deltas
        if isinstance(d, ToolCallDelta)
    ]
    return {
        "role": "assistant",
        "content": None if not content and (calls or reasoning) else content,
        "reasoning_content": reasoning or None,
        "tool_calls": calls,
    }
