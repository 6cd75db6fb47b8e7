"""Reasoning before constrained content: where it ends, and how such an answer is read.

A constraint is for the content. What an answer to a prompt may begin with is told by the prompt's
end and the model's delimiters; the engine and the reader of the answer follow both in the same way
(:mod:`..engine.reasoning`), so that content is what the constraint was applied to, and all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..engine.reasoning import Reasoning
from .answer_text import Kind, Piece
from .deltas import Delta, ReasoningDelta
from .formats import AnswerFormat
from .regions import Stripper
from .response import Answer
from .response_template import TemplateFormat


def reasoning_of(
    form: AnswerFormat | TemplateFormat | None,
    prompt: str,
    *,
    is_disabled: bool = False,
    stops_inside: bool = False,
) -> Reasoning | None:
    """The reasoning that an answer may begin with; None where its first token is content.

    Args:
        form: of the model's answers; None if it is not known.
        prompt: its whole text.
        is_disabled: the conversation asks for no reasoning: then the answer cannot open it.
        stops_inside: as of :class:`Reasoning`.
    """
    if form is None or form.reasoning_tags is None:
        return None
    opening, closing = form.reasoning_tags
    is_open = _is_open(form, prompt, opening, closing)
    # Where the content has a header like the one of the reasoning, it has to be skipped as well.
    has_header = _shared(opening, closing) > 1
    if is_open is None or (not is_open and is_disabled and not has_header):
        return None
    return Reasoning(opening.encode(), closing.encode(), is_open, stops_inside)


def _is_open(
    form: AnswerFormat | TemplateFormat, prompt: str, opening: str, closing: str
) -> bool | None:
    """Whether the prompt ends inside the reasoning; None if it ends in the content."""
    opening, closing = opening.strip(), closing.strip()
    begun = form.prefix_of(prompt)
    if not begun:
        # The beginning of an answer is not found: what the prompt ends with is seen all the same.
        end = prompt.rstrip()
        return None if end.endswith(closing) else end.endswith(opening) or form.begins_open
    opened, closed = begun.rfind(opening), begun.rfind(closing)
    if closed >= 0 and closed >= opened:
        return None
    if opened >= 0:
        return True
    return None if begun.strip() else form.begins_open


def _shared(one: str, other: str) -> int:
    """Characters that two texts begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class ReasonedAnswer:
    """Reads an answer whose content is constrained: reasoning up to ``Kind.CONTENT``, if the answer
    begins with some; what follows is read by another reader, which is given each character of it.

    Args:
        reasoning: that the answer may begin with.
        content: reads what is behind.
        strips: whether white space at the ends is no part of the reasoning.
    """

    def __init__(self, reasoning: Reasoning, content: Answer, *, strips: bool) -> None:
        self._opening = reasoning.opening.decode()
        self._closing = reasoning.closing.decode()
        self._content = content
        self._reasoning = Stripper(strips)
        self._has_begun = reasoning.is_open  # the reasoning
        self._is_behind = False
        self._held = ""  # may be the beginning of a delimiter, or is one
        self._hidden: list[tuple[int, int]] = []  # stretches of special tokens in it

    def push(self, piece: Piece) -> list[Delta]:
        if self._is_behind:
            return self._content.push(piece)
        if piece.kind is Kind.CONTENT:
            self._is_behind = True
            return list(self._rest())
        if piece.kind is not Kind.TEXT:
            self._hidden.append((len(self._held), len(self._held) + len(piece.text)))
        self._held += piece.text
        if not self._has_begun:
            self._open()
        if not self._has_begun:
            return []
        return list(self._shown(self._end_of_certain()))

    def finish(self) -> list[Delta]:
        if self._is_behind or not self._has_begun:
            return self._content.finish()
        return list(self._shown(len(self._held)))

    def _open(self) -> None:
        """Drop the opening delimiter, once it is complete, and white space before it."""
        place = self._held.find(self._opening)
        if place >= 0:
            self._has_begun = True
            self._drop(place + len(self._opening))

    def _end_of_certain(self) -> int:
        """Up to where the held text is no part of the closing delimiter."""
        place = self._held.find(self._closing)
        if place >= 0:
            return place
        longest = min(len(self._closing) - 1, len(self._held))
        parts = (n for n in range(longest, 0, -1) if self._held.endswith(self._closing[:n]))
        return len(self._held) - next(parts, 0)

    def _rest(self) -> Iterator[Delta]:
        """The reasoning's end, without its delimiter. White space behind that is in the same token,
        and bytes of a character that the delimiter cut are not."""
        if self._has_begun:
            place = self._held.find(self._closing)
            if place >= 0:
                yield from self._shown(place)
                self._drop(len(self._closing))
                self._held = self._held.strip()
            yield from self._shown(len(self._held))

    def _shown(self, end: int) -> Iterator[Delta]:
        """The held text up to ``end``, as reasoning."""
        text = self._reasoning.push(self._text(end))
        self._drop(end)
        if text:
            yield ReasoningDelta(text)

    def _text(self, end: int) -> str:
        """The held text up to ``end`` without special tokens."""
        shown, place = [], 0
        for begin, stop in self._hidden:
            shown.append(self._held[place : max(place, min(begin, end))])
            place = min(stop, end)
        shown.append(self._held[place:end])
        return "".join(shown)

    def _drop(self, end: int) -> None:
        self._held = self._held[end:]
        self._hidden = [(max(0, a - end), b - end) for a, b in self._hidden if b > end]
