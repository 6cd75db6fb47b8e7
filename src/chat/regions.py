"""The reader of answers for all formats of :mod:`.formats`.

The text is split at the format's delimiters; text that may still become a delimiter is held back. A
call's syntax reads its text as it arrives. Text that cannot be a call becomes content, including
its opening delimiter, and reading continues after that delimiter. If a call is not closed, all text
to the end becomes content: its arguments are never read as another call.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from ..engine.text.delimiter import Delimiter
from .answer_text import Kind, Piece
from .call_syntax import Call, Found, NoCall, Waiting
from .deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta, call_id, is_short_id
from .formats import AnswerFormat, Marker
from .response import AnswerContext


class Stripper:
    """Removes white space at both ends of a text that arrives in pieces."""

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


# Regions of an answer: between delimiters, in reasoning, in content with its own delimiters.
_BETWEEN, _REASONING, _CONTENT = "between", "reasoning", "content"
_DROPPED = "dropped"  # the action for a delimiter that is only removed


class _Delimiters:
    """Finds the first of several delimiters.

    Args:
        actions: the action for each delimiter.
    """

    def __init__(self, actions: Mapping[Delimiter, Any]) -> None:
        ordered = sorted(actions, key=lambda delimiter: len(delimiter.text), reverse=True)
        self._actions = [actions[delimiter] for delimiter in ordered]
        groups = (f"({delimiter.pattern})" for delimiter in ordered)
        self._pattern = re.compile("|".join(groups) or r"(?!)", re.ASCII)
        begun = "|".join(delimiter.begun for delimiter in ordered)
        self._begun = re.compile(rf"(?:{begun or '(?!)'})\Z", re.ASCII)
        self._max_length = max((delimiter.max_length for delimiter in ordered), default=0)

    def find(self, text: str, is_whole: bool) -> tuple[int, int, Any]:
        """The offset, length and action of the first delimiter; or the offset of a possible
        delimiter that is incomplete, and length 0."""
        match = self._pattern.search(text)
        place = len(text) if match is None else match.start()
        if not is_whole:
            begun = self._begun.search(text, max(0, len(text) - self._max_length))
            if begun is not None and begun.start() <= place:
                return begun.start(), 0, None
        if match is None or match.lastindex is None:
            return place, 0, None
        return place, match.end() - place, self._actions[match.lastindex - 1]


class FormatAnswer:
    """Splits the text of one answer into content, reasoning and tool calls."""

    def __init__(self, form: AnswerFormat, context: AnswerContext) -> None:
        self.tools = context.tools
        self.text = ""  # undecided text; while a call is read, from its opening delimiter on
        self.is_whole = False
        self._form = form
        self._calls = form.calls if context.reads_tools else None
        self._delimiters: dict[tuple[str, bool], _Delimiters] = {}
        self._texts = frozenset(form.delimiters())
        self._id_length = None if form.calls is None else form.calls.id_length
        self._key = (context.request_id, context.answer)
        self._num_calls = 0
        self._content, self._reasoning = Stripper(True), Stripper(True)
        self._base = 0  # offset of `text` in the whole text
        self._hidden: deque[tuple[int, int]] = deque()
        is_open = form.reasoning is not None and form.reasoning.is_open
        self._region = _REASONING if is_open else _BETWEEN
        self._begun: set[str] = set()  # regions that have had text
        self._marker: Marker | None = None  # marker of the call that is being read
        self._num_opening = 0  # length of its opening delimiter
        self._reading: Waiting[Found] | None = None
        self._untried: list[Any] = []
        prefix = form.prefix_of(context.prompt)
        self._hidden.append((0, len(prefix)))
        self.text = prefix
        for _ in self._read():
            pass
        self._num_calls = 0  # in this answer, without those of a message that it continues

    def push(self, piece: Piece) -> list[Delta]:
        if piece.kind is Kind.STOP and piece.text not in self._texts:
            return []
        is_shown = self._calls_with(piece.text) and piece.kind is Kind.SPECIAL
        if piece.kind is not Kind.TEXT and not is_shown:
            begin = self._base + len(self.text)
            self._hidden.append((begin, begin + len(piece.text)))
        self.text += piece.text
        return list(self._read())

    def finish(self) -> list[Delta]:
        self.is_whole = True
        return list(self._read())

    def _calls_with(self, token: str) -> bool:
        """Whether tool calls contain this token, which is shown if the call is not read."""
        form = self._form.calls
        return form is not None and token in form.texts

    def _read(self) -> Iterator[Delta]:
        while self.text or self._marker is not None:
            if self._marker is not None:
                if not (yield from self._read_call()):
                    return
                continue
            delimiters = self._active()
            place, length, action = delimiters.find(self.text, self.is_whole)
            if place:
                yield from self._shown(place)
                if self._active() is not delimiters:
                    continue
            if not length:
                return
            if isinstance(action, Marker):
                self._marker, self._untried = action, list(action.syntaxes)
                self._num_opening = length
                continue
            self._drop(length)
            if action is not _DROPPED:
                self._region = action

    def _active(self) -> _Delimiters:
        key = (self._region, self._region in self._begun)
        if key not in self._delimiters:
            self._delimiters[key] = _Delimiters(self._actions(*key))
        return self._delimiters[key]

    def _actions(self, region: str, has_begun: bool) -> dict[Delimiter, Any]:
        """The delimiters of a region, each with its marker or its next region."""
        reasoning, calls = self._form.reasoning, self._calls
        made: dict[Delimiter, Any] = {}
        if calls is not None and region in (_BETWEEN, calls.in_reasoning and _REASONING):
            made |= {Delimiter(text): _DROPPED for text in calls.skipped}
            for marker in calls.markers:
                if not marker.at_start or (self.tools and not has_begun and region == _BETWEEN):
                    made[Delimiter(marker.open, marker.header_end)] = marker
        if reasoning is None:
            return made
        found: dict[str, Any] = {}
        if region == _BETWEEN:
            found |= dict.fromkeys(reasoning.skipped, _DROPPED)
            found |= {opened: _CONTENT for opened, _ in reasoning.contents}
            if reasoning.anywhere or not has_begun:
                # Without an opening delimiter, the closing one ends empty reasoning.
                found[reasoning.close] = _DROPPED
                found[reasoning.open] = _REASONING
        elif region == _REASONING:
            if not has_begun:  # the prompt has opened it already
                found[reasoning.open] = _DROPPED
            found[reasoning.close] = _BETWEEN
        else:
            found |= {closed: _BETWEEN for _, closed in reasoning.contents}
        end = reasoning.header_end
        return made | {Delimiter(text, end): action for text, action in found.items()}

    def _read_call(self) -> Generator[Delta, None, bool]:
        """Continue to read the opened call; returns whether that is done."""
        marker = self._marker
        assert marker is not None
        while True:
            if self._reading is None:
                self._reading = self._untried.pop(0).read(self, self._num_opening, marker.close)
            found: Found | None = None
            try:
                next(self._reading)
            except StopIteration as ended:
                found = ended.value
            except NoCall:
                pass
            else:
                if not self.is_whole:
                    return False
                self._untried = []
            self._reading = None
            if found is not None or not self._untried:
                break
        self._marker = None
        if found is None and not self.is_whole:
            yield from self._shown(self._num_opening)
            return True
        self._region = _BETWEEN
        if found is None:  # not closed: all following text may belong to the call
            yield from self._shown(len(self.text))
        elif not found.calls:
            yield from self._shown(found.end)
        else:
            self._begun.add(_BETWEEN)
            self._drop(found.end)
            yield from map(self._delta, found.calls)
        return True

    def _delta(self, call: Call) -> ToolCallDelta:
        index, length = self._num_calls, self._id_length
        self._num_calls += 1
        written = call.id if length is None or is_short_id(call.id, length) else None
        made = written or call_id(*self._key, index, length)
        return ToolCallDelta(index, made, call.name, call.arguments)

    def _shown(self, length: int) -> Iterator[Delta]:
        """The beginning of the text, as reasoning or content according to its region."""
        if not self.text[:length].isspace():
            self._begun.add(self._region)
            if self._region == _CONTENT:
                self._begun.add(_BETWEEN)
        text = visible(self._hidden, self.text, self._base, self._base + length, self._base)
        self._drop(length)
        if self._region == _REASONING:
            yield ReasoningDelta(self._reasoning.push(text))
        else:
            yield ContentDelta(self._content.push(text))

    def _drop(self, length: int) -> None:
        self.text = self.text[length:]
        self._base += length


def visible(hidden: deque[tuple[int, int]], text: str, begin: int, end: int, base: int = 0) -> str:
    """A range of the text without hidden parts. Ranges must be passed in order.

    Args:
        hidden: hidden ranges; those that end before ``begin`` are removed.
        base: offset of the text's first character.
    """
    while hidden and hidden[0][1] <= begin:
        hidden.popleft()
    shown, place = [], begin
    for hidden_begin, hidden_end in hidden:
        if hidden_begin >= end:
            break
        shown.append(text[place - base : max(place, hidden_begin) - base])
        place = min(hidden_end, end)
    shown.append(text[place - base : end - base])
    return "".join(shown)
