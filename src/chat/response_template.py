"""Reads an answer with the response template of its tokenizer, using transformers' own parser.

The parser's events name the field of each text. They omit the positions of delimiters and invalid
text, and the parser may raise inside a stream. So the reader parses with a plain copy of the
template, in which every field is text: its events cover every character, and the template's regexes
find the delimiters in between. A closed tool call is then parsed separately with the whole
template. If that fails, or if a call is not closed, its text with its delimiters becomes content.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .answer_text import Kind, Piece
from .call_syntax import Call, flat, make_call
from .deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta, call_id
from .regions import Stripper, visible
from .response import AnswerContext

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_SINK = "pagespec: between the fields"
_END = "pagespec: end of the message"
_DELIMITERS = ("open", "open_pattern", "close", "close_pattern")


@dataclass(frozen=True)
class TemplateFormat:
    """A response template, prepared for :class:`TemplateAnswer`.

    Attributes:
        whole: the template without required fields; parses one tool call.
        plain: the same delimiters, with every field as plain text, and an event per delimiter. So
            parsing never fails, and offsets in the text are known.
        implicit: the field of ``plain`` for text outside all other fields.
        strips_content, strips_reasoning: whether white space at the ends is removed.
        call_field: all texts and regexes of the field for tool calls.
        reasoning_tags: the literal texts that open and close the reasoning, such as
            ``("<think>", "</think>")``; None without reasoning, or if a regex delimits it.
    """

    whole: Any
    plain: Any
    implicit: str
    strips_content: bool
    strips_reasoning: bool
    call_field: str
    reasoning_tags: tuple[str, str] | None

    begins_open = False  # reasoning has its opening delimiter
    header_end = ""  # delimiters contain no content type

    @property
    def reads_calls(self) -> bool:
        return bool(self.call_field)

    def writes_calls_with(self, token: str) -> bool:
        """Whether tool calls contain this token, as a delimiter or in their text."""
        return token in self.call_field or re.escape(token) in self.call_field

    @staticmethod
    def role(field: str) -> str | None:
        """The role of a field: "content", "reasoning" or "tools"; None for other fields."""
        if field in _REASONING_FIELDS:
            return "reasoning"
        return {"content": "content", "tool_calls": "tools"}.get(field)

    def prefix_of(self, prompt: str) -> str:
        """The part of a prompt that belongs to the answer, such as an opened ``<think>``; "" if the
        template's anchor is not in the prompt."""
        if self.whole.start_anchor_re.search(prompt) is None:
            return ""
        text: str = self.whole.truncate_past_last_anchor(prompt)
        return text


def make_format(template: dict[str, Any]) -> TemplateFormat:
    """
    Raises:
        ValueError: it is not a response template of transformers.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    load_response_template(template)
    fields = template["fields"]
    whole = {
        name: {key: value for key, value in field.items() if key != "optional"}
        for name, field in fields.items()
    }
    reasoning = next((name for name in _REASONING_FIELDS if name in fields), "")
    loaded = load_response_template({**template, "fields": _plain_fields(fields)})
    return TemplateFormat(
        load_response_template({**template, "fields": whole}),
        loaded,
        str(loaded.implicit),
        _strips(fields.get("content", {})),
        _strips(fields.get(reasoning, {})),
        "\n".join(_texts(fields.get("tool_calls", {}))),
        _tags(fields.get(reasoning, {})),
    )


def _texts(value: Any) -> Iterator[str]:
    """Every text in lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _tags(field: dict[str, Any]) -> tuple[str, str] | None:
    """The first literal that opens a field, and the first that closes it."""
    first = [next(_texts(field.get(key)), None) for key in ("open", "close")]
    opening, closing = first
    return None if opening is None or closing is None else (opening, closing)


def _strips(field: dict[str, Any]) -> bool:
    return bool(field.get("content_args", {}).get("strip", True))


def _plain_fields(fields: dict[str, Any]) -> dict[str, Any]:
    text = {
        "content": "text",
        "content_args": {"strip": False},
        "repeats": True,
        "transform": "{content}",  # needed for delimiters with named groups
    }
    made: dict[str, Any] = {}
    has_implicit = False
    for name, field in fields.items():
        delimiters = {key: field[key] for key in _DELIMITERS if key in field}
        if "open" not in field and "open_pattern" not in field:
            has_implicit = True
            made |= _end_field(delimiters, text)
            delimiters = {}
        made[name] = text | delimiters
    if not has_implicit:
        made[_SINK] = text
    return made


def _end_field(close: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The end of the implicit field, as a separate empty field: the parser has no event for the end
    of an empty field."""
    if "close" in close:
        return {_END: text | {"open": close["close"], "close_pattern": ""}}
    pattern = close.get("close_pattern")
    if pattern is None:
        return {}
    import regex  # the library that transformers uses for the templates' regexes

    if regex.search(pattern, "") is not None:
        return {}  # the end of the text, which ends the field in any case
    return {_END: text | {"open_pattern": pattern, "close_pattern": ""}}


class TemplateAnswer:
    """Splits the text of one answer into content, reasoning and tool calls."""

    def __init__(self, form: TemplateFormat, context: AnswerContext) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._form, self._reads_tools = form, context.reads_tools
        self._tools: list[Any] = list(context.tools)
        self._key = (context.request_id, context.answer)
        self._num_calls = 0
        self._content = Stripper(form.strips_content)
        self._reasoning = Stripper(form.strips_reasoning)
        self._parser = ResponseParser(form.plain, prefix="")
        self._text = form.prefix_of(context.prompt)
        self._place = 0  # offset of the next event in the text
        self._region = 0  # offset of the open field, with its delimiter
        # Hidden ranges: the prompt's, the stop token, special tokens. Special tokens of calls
        # are shown if the call is not read.
        self._hidden = deque([(0, len(self._text))])
        self._hidden_in_calls = deque(self._hidden)
        for _ in self._read(self._parser.feed(self._text)):
            pass
        self._num_calls = 0  # in this answer, without those of a message that it continues

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
        """Skip a delimiter at this offset, if any; a field without one ends with the text."""
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
        return visible(hidden, self._text, begin, end)

    def _call(self, is_closed: bool) -> Iterator[Delta]:
        """The region that ended here: its calls, or its text."""
        raw = self._text[self._region : self._place]
        calls = self._parsed(raw) if is_closed and self._reads_tools else []
        if not calls:
            shown = self._shown_text(self._hidden_in_calls, self._region, self._place)
            yield ContentDelta(self._content.push(shown))
        for call in calls:
            made = call_id(*self._key, self._num_calls)
            yield ToolCallDelta(self._num_calls, made, call.name, call.arguments)
            self._num_calls += 1

    def _parsed(self, raw: str) -> list[Call]:
        """Names and arguments of the calls in one region; empty if any of them is invalid."""
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(raw, self._form.whole, prefix="", tools=self._tools)
            functions = [call["function"] for call in flat(message["tool_calls"])]
            return [make_call(f["name"], f.get("arguments", {})) for f in functions]
        except Exception:  # the parser raises many types for what a model may write
            return []
