"""Reads an answer by its model's format, with transformers' own parser.

The parser says in events which field the text is in. It says nothing of where delimiters stand,
drops what it cannot read, and raises in the middle of a stream. So it is given the format's plain
twin, in which every field is text: the events then account for every character, and the delimiters
between are found again by the patterns that found them. A tool call, once it is closed, is read by
itself with the whole format. If that fails, its text becomes content, from the first character of
its opening delimiter to the last of its closing one; so does the text of a call that is not closed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .answer_text import Kind, Piece
from .deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta, call_id
from .formats import AnswerFormat


class Stripper:
    """Leaves out white space at both ends of a text that comes in pieces."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._has_begun = False
        self._held = ""

    def push(self, text: str) -> str:
        if not self._is_on:
            return text
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown


class TemplateAnswer:
    """Turns the text of one answer into content, reasoning and tool calls.

    Args:
        prompt: its text, whose end may belong to the answer.
        tools: their schemas say which type an argument has where the format does not.
        reads_tools: whether there can be tool calls; if not, they are content.
        request_id, answer: for the ids of tool calls.
    """

    def __init__(
        self,
        form: AnswerFormat,
        prompt: str,
        *,
        tools: Sequence[dict[str, Any]] | None,
        reads_tools: bool,
        request_id: str,
        answer: int,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._form, self._reads_tools = form, reads_tools
        self._tools: list[Any] = list(tools or ())
        self._key = (request_id, answer)
        self._num_calls = 0
        self._content = Stripper(form.strips_content)
        self._reasoning = Stripper(form.strips_reasoning)
        self._parser = ResponseParser(form.plain, prefix="")
        self._text = form.prefix_of(prompt)
        self._place = 0  # of the next event, in the text
        self._region = 0  # where the open field began, with its delimiter
        # Stretches that are not for the caller: the prompt's, the stop token, special tokens. Those
        # that calls are written with show where a call is not read.
        self._hidden = deque([(0, len(self._text))])
        self._hidden_in_calls = deque(self._hidden)
        for _ in self._read(self._parser.feed(self._text)):
            pass
        self._num_calls = 0  # those of the answer; there were some if it continues a message

    def push(self, piece: Piece) -> list[Delta]:
        begin = len(self._text)
        self._text += piece.text
        if piece.kind is not Kind.TEXT:
            stretch = (begin, len(self._text))
            self._hidden.append(stretch)
            if piece.kind is Kind.STOP or not self._form.writes_calls_with(piece.text):
                self._hidden_in_calls.append(stretch)
        return list(self._read(self._parser.feed(piece.text)))

    def finish(self) -> list[Delta]:
        return list(self._read(self._parser.finalize()[1]))

    def _read(self, events: Iterable[dict[str, Any]]) -> Iterator[Delta]:
        for event in events:
            field = event["field"]
            if event["type"] == "region_chunk":
                begin = self._place
                self._place += len(event["text"])
                yield from self._shown(self._form.role(field), begin, self._place)
            elif field == self._form.implicit:
                continue
            elif event["type"] == "region_open":
                self._region = self._place
                self._pass(self._form.plain.fields[field].open_re)
            else:
                is_closed = self._pass(self._form.plain.fields[field].close_re)
                if self._form.role(field) == "tools":
                    yield from self._call(is_closed)

    def _pass(self, delimiter: Any) -> bool:
        """Go behind a delimiter, if it stands here; a field without one ends with the text."""
        if delimiter is None:
            return True
        match = delimiter.match(self._text, self._place)
        if match is not None:
            self._place = match.end()
        return match is not None

    def _shown(self, role: str | None, begin: int, end: int) -> Iterator[Delta]:
        if role == "content":
            yield ContentDelta(self._content.push(self._shown_text(self._hidden, begin, end)))
        elif role == "reasoning":
            yield ReasoningDelta(self._reasoning.push(self._shown_text(self._hidden, begin, end)))

    def _shown_text(self, hidden: deque[tuple[int, int]], begin: int, end: int) -> str:
        """A stretch of the text without what is hidden in it. Called for stretches in order."""
        while hidden and hidden[0][1] <= begin:
            hidden.popleft()
        shown, place = [], begin
        for hidden_begin, hidden_end in hidden:
            if hidden_begin >= end:
                break
            shown.append(self._text[place : max(place, hidden_begin)])
            place = min(hidden_end, end)
        shown.append(self._text[place:end])
        return "".join(shown)

    def _call(self, is_closed: bool) -> Iterator[Delta]:
        """The region that ended here: its calls, or its text."""
        raw = self._text[self._region : self._place]
        calls = self._parsed(raw) if is_closed and self._reads_tools else []
        if not calls:
            shown = self._shown_text(self._hidden_in_calls, self._region, self._place)
            yield ContentDelta(self._content.push(shown))
        for name, arguments in calls:
            yield ToolCallDelta(
                self._num_calls, call_id(*self._key, self._num_calls), name, arguments
            )
            self._num_calls += 1

    def _parsed(self, raw: str) -> list[tuple[str, str]]:
        """Names and arguments of the calls in one region; none if anything is wrong with one."""
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(raw, self._form.whole, prefix="", tools=self._tools)
            return [_named_arguments(call) for call in _flat(message["tool_calls"])]
        except Exception:  # whatever a model writes: a parser of transformers raises many kinds
            return []


def _flat(calls: Any) -> Iterator[Any]:
    if isinstance(calls, list):
        for call in calls:
            yield from _flat(call)
    else:
        yield calls


def _named_arguments(call: Any) -> tuple[str, str]:
    """
    Raises:
        ValueError, TypeError, LookupError: it is no tool call.
    """
    function = call["function"]
    name, arguments = function["name"], function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and an object of arguments")
    name.encode()
    return name, json_text(arguments)


def json_text(value: Any) -> str:
    """
    Raises:
        ValueError: JSON has no such value (NaN, an infinite number).
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can spell
        return json.dumps(value)
    return text
