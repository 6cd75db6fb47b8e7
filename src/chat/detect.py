"""Detects the format of a model's answers from its chat template.

A conversation with a tool call is rendered, and each format reads the text of the call. The first
that reads the call correctly is the model's. A template that writes no calls, but instructs the
model, has the format's opening delimiter in its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator

from .answer_text import Kind, Piece
from .deltas import ToolCallDelta
from .formats import (
    AUTO,
    CALL_FORMATS,
    NONE,
    REASONING_FORMATS,
    AnswerFormat,
    CallFormat,
    ReasoningFormat,
)
from .regions import FormatAnswer
from .response import AnswerContext
from .template import (
    PROBE_ARGUMENTS,
    PROBE_ID,
    PROBE_TOOL,
    ChatTemplate,
    probe_call,
    probe_result,
    probe_tools,
)

_WORD = "Zq4word"
# Ids of calls that templates accept, and that formats with the name in the id can be read from.
_IDS = (PROBE_ID, f"functions.{PROBE_TOOL}:0")


def detect(
    template: ChatTemplate,
    tool_call_format: str = AUTO,
    reasoning_format: str = AUTO,
    tokens: Container[str] = (),
) -> AnswerFormat | None:
    """The format of the answers to a template's prompts; None if unknown.

    Args:
        tool_call_format, reasoning_format: names of :mod:`.formats` in place of detection.
        tokens: the tokenizer's added tokens.
    """
    if reasoning_format == AUTO:
        reasoning = _reasoning(template, tokens)
    else:
        reasoning = REASONING_FORMATS.get(reasoning_format)
    if tool_call_format == AUTO:
        calls = _calls(template, tokens)
    else:
        calls = None if tool_call_format == NONE else CALL_FORMATS[tool_call_format]
    if reasoning is None and calls is None:
        return None
    return AnswerFormat(reasoning, calls, tuple(_anchors(template, reasoning)))


def _reasoning(template: ChatTemplate, tokens: Container[str]) -> ReasoningFormat | None:
    texts = [
        template.source,
        template.rendered([template.message("user", _WORD)], None, True) or "",
    ]
    for form in REASONING_FORMATS.values():
        if any(form.open in text for text in texts) and any(form.close in text for text in texts):
            return form
    # The first templates of DeepSeek-R1 only cut reasoning off: those models begin with it.
    first = REASONING_FORMATS["deepseek_r1"]
    if first.close in template.source and "<｜Assistant｜>" in template.source:
        return first
    # A model may reason though its template does not mention it.
    return next(
        (f for f in REASONING_FORMATS.values() if f.open in tokens and f.close in tokens), None
    )


def _calls(template: ChatTemplate, tokens: Container[str]) -> CallFormat | None:
    written = list(_written_calls(template))
    for form in CALL_FORMATS.values():
        if any(_reads(form, text) for text in written):
            return form
    if written:
        return None
    for form in CALL_FORMATS.values():
        marker = form.markers[0]
        if all(
            text in template.source or text in tokens
            for text in (marker.open, marker.close)
            if text
        ):
            return form
    return None


def _reads(form: CallFormat, text: str) -> bool:
    """Whether a text is read as the call of the probe."""
    answer = FormatAnswer(AnswerFormat(calls=form), AnswerContext(tools=probe_tools()))
    deltas = [*answer.push(Piece(text, Kind.TEXT)), *answer.finish()]
    calls = [(d.name, json.loads(d.arguments)) for d in deltas if isinstance(d, ToolCallDelta)]
    return calls == [(PROBE_TOOL, PROBE_ARGUMENTS)]


def _written_calls(template: ChatTemplate) -> Iterator[str]:
    """The template's text for an assistant's message with one call."""
    user, tools = template.message("user", _WORD), probe_tools()
    opened = template.rendered([user], tools, True)
    closed = template.rendered([user], tools)
    if opened is None or closed is None:
        opened = closed = ""
    answered = [user, template.message("assistant", _WORD)]
    end = (template.rendered(answered, tools) or "").rpartition(_WORD)[2]
    for call_id in _IDS:
        for content in ("", None, template.fitting("assistant", "Hm.")):
            text = template.rendered([user, probe_call(content, call_id)], tools)
            if text is None or PROBE_TOOL not in text.replace(opened, "", 1):
                continue
            text = text.removesuffix(end)
            if text.startswith(opened):
                yield text[len(opened) :]
            elif text.startswith(closed):
                begin, prompt = text[len(closed) :], opened[len(closed) :]
                yield begin
                yield begin[_num_common(begin, prompt) :]
            else:
                yield text


def _num_common(a: str, b: str) -> int:
    """The length of the common prefix of two texts."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _anchors(template: ChatTemplate, reasoning: ReasoningFormat | None) -> Iterator[str]:
    """The text between a message and the answer to it, without reasoning."""
    result = probe_result(template.fitting("tool", _WORD))
    called = [template.message("user"), probe_call(), result]
    cuts: list[str] = []
    if reasoning is not None:  # `close` ends other messages as well where content has delimiters
        cuts = [reasoning.open] if reasoning.contents else [reasoning.open, reasoning.close]
    cut = "|".join(map(re.escape, cuts)) or "(?!)"
    for conversation in ([template.message("user", _WORD)], called):
        text = template.rendered(conversation, None, True)
        if text is None:
            text = template.rendered(conversation, probe_tools(), True) or ""
        if _WORD in text:
            anchor = re.split(cut, text.rpartition(_WORD)[2])[0]
            if anchor.strip():
                yield anchor
