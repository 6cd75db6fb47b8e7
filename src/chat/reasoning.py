"""Reasoning before constrained content: finds its end, and reads such an answer.

A constraint applies to the content. Whether an answer may begin with reasoning depends on the end
of the prompt and the model's delimiters. The engine and the reader apply the same rules
(:mod:`..engine.text.reasoning`), so the content is exactly the constrained text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..engine.text.delimiter import Delimiter
from ..engine.text.reasoning import Reasoning
from .answer_text import Kind, Piece
from .deltas import ContentDelta, Delta, ReasoningDelta
from .formats import AnswerFormat
from .response import Answer
from .response_template import TemplateFormat


def reasoning_of(
    form: AnswerFormat | TemplateFormat | None,
    prompt: str,
    *,
    is_disabled: bool = False,
    stops_inside: bool = False,
) -> Reasoning | None:
    """The reasoning that an answer may begin with; None if its first token is content.

    Args:
        form: the format of the model's answers; None if unknown.
        prompt: the prompt's whole text.
        is_disabled: reasoning is off in the conversation, so the answer cannot open it.
        stops_inside: see :class:`Reasoning`.
    """
    if form is None or form.reasoning_tags is None:
        return None
    opening, closing = form.reasoning_tags
    is_open = _is_open(form, prompt, opening, closing)
    # A header of the content that resembles that of the reasoning must be skipped too.
    has_header = opening[:2] == closing[:2]
    if is_open is None or (not is_open and is_disabled and not has_header):
        return None
    end = form.header_end.encode()
    return Reasoning(opening.encode(), closing.encode(), is_open, stops_inside, end)


def _is_open(
    form: AnswerFormat | TemplateFormat, prompt: str, opening: str, closing: str
) -> bool | None:
    """Whether the prompt ends inside the reasoning; None if it ends in the content."""
    opening, closing = opening.strip(), closing.strip()
    begun = form.prefix_of(prompt)
    if not begun:
        # The beginning of the answer is unknown, but the end of the prompt is known.
        end = prompt.rstrip()
        return None if end.endswith(closing) else end.endswith(opening) or form.begins_open
    opened, closed = (_last_place(begun, text, form.header_end) for text in (opening, closing))
    if closed >= 0 and closed >= opened:
        return None
    if opened >= 0:
        return True
    return None if begun.strip() else form.begins_open


def _last_place(text: str, delimiter: str, header_end: str) -> int:
    """The offset of the last delimiter in a text; -1 if there is none."""
    pattern = Delimiter(delimiter, header_end).pattern
    return max((match.start() for match in re.finditer(pattern, text, re.ASCII)), default=-1)


class ReasonedAnswer:
    """Reads an answer whose content is constrained. All text before ``Kind.CONTENT`` is reasoning;
    another reader gets the rest.

    Args:
        reasoning: reasoning that the answer may begin with.
        before: reads the reasoning in the model's format, without a prompt and tool calls.
        content: reads the content.
    """

    def __init__(self, reasoning: Reasoning, before: Answer, content: Answer) -> None:
        self._before, self._content = before, content
        self._is_behind = False
        if reasoning.is_open:
            before.push(Piece(reasoning.opening.decode(), Kind.SPECIAL))

    def push(self, piece: Piece) -> list[Delta]:
        if self._is_behind:
            return self._content.push(piece)
        if piece.kind is Kind.CONTENT:
            self._is_behind = True
            return _as_reasoning(self._before.finish())
        return _as_reasoning(self._before.push(piece))

    def finish(self) -> list[Delta]:
        if self._is_behind:
            return self._content.finish()
        return _as_reasoning(self._before.finish())


def _as_reasoning(deltas: Iterable[Delta]) -> list[Delta]:
    """Text between and after delimiters of reasoning is not content."""
    return [ReasoningDelta(d.text) if isinstance(d, ContentDelta) else d for d in deltas]
