"""The growing text of one answer, with special tokens as separate pieces.

A parser of answers needs special tokens as delimiters, but the caller must not see them. So the
text equals that of ``generate``, with the same detokenizer and stop-string search, and the names of
special tokens are separate pieces in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from ..engine.sampling_params import SamplingParams
from ..engine.text.detokenizer import Detokenizer, StopStringWatcher
from ..engine.text.reasoning import Phase, Reasoning, ReasoningTracker


class Kind(Enum):
    """The type of a piece: text of the answer; a special token; the stop token at its end; or,
    without text, the beginning of the content after reasoning."""

    TEXT = "text"
    SPECIAL = "special"
    STOP = "stop"
    CONTENT = "content"


class Piece(NamedTuple):
    text: str
    kind: Kind


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens that decoding omits when it skips special tokens, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token_id: token.content for token_id, token in added.items() if token.special}


class AnswerText:
    """Reads the tokens of one answer; tokens after its end are ignored.

    Args:
        stop_token_ids: tokens that end the answer.
        specials: the tokenizer's special tokens, see :func:`special_tokens`.
        reasoning: reasoning that the answer may begin with. A piece ``Kind.CONTENT`` then marks the
            beginning of the content; before it, stop strings count only with ``stops_inside``.
        bytes_of: returns the bytes of a token, like :class:`.token_bytes.TokenBytes`; used with
            ``reasoning``.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        specials: Mapping[int, str],
        reasoning: Reasoning | None = None,
        bytes_of: Callable[[int], bytes] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._specials = specials if params.skip_special_tokens else {}
        self._all_specials = specials
        self._stop_token_ids = stop_token_ids
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._watcher: StopStringWatcher | None = None
        if params.stop_strings:
            self._watcher = StopStringWatcher(
                self._detokenizer,
                params.stop_strings,
                include=self._include_stop,
                min_tokens=params.min_tokens,
            )
        self._num_watched = 0  # settled pieces of the watcher that were returned
        self._num_given = 0  # characters of text that were returned
        self._waiting: deque[tuple[int, str]] = deque()  # special tokens, by their offset in text
        self._stop_token_id: int | None = None
        self._has_ended = False
        self._tracker: ReasoningTracker | None = None  # until the content begins
        self._stops_inside = reasoning is None or reasoning.stops_inside
        if reasoning is not None and bytes_of is not None:
            self._tracker = ReasoningTracker(reasoning, bytes_of)
        self._undecided: list[int] = []  # tokens that may be reasoning or content

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        """The pieces that become final with these tokens."""
        pieces: list[Piece] = []
        place = 0
        while self._tracker is not None and not self._has_ended and place < len(token_ids):
            pieces += self._feed_before_content(self._tracker, token_ids[place])
            place += 1
        return pieces + self._feed(token_ids[place:])

    def _feed_before_content(self, tracker: ReasoningTracker, token_id: int) -> list[Piece]:
        self._undecided.append(token_id)
        is_end = token_id in self._stop_token_ids
        phase = tracker.phase if is_end else tracker.push(token_id)
        if phase is Phase.UNDECIDED and not is_end:
            return []
        begins_here = phase is Phase.CONTENT and not tracker.num_skipped
        if begins_here or phase is Phase.UNDECIDED:
            return self._begin_content()
        token_ids, self._undecided = self._undecided, []
        pieces = self._feed(token_ids)
        if phase is Phase.CONTENT and not self._has_ended:
            # A character that is incomplete here stays incomplete: it does not belong to content.
            if self._watcher is None:
                pieces += self._give(self._detokenizer.flush())
            else:
                self._watcher.begin_content()
                pieces += self._give(self._new_watched())
            pieces += self._begin_content()
        return pieces

    def _begin_content(self) -> list[Piece]:
        """Begin the content, with the undecided tokens."""
        token_ids, self._undecided, self._tracker = self._undecided, [], None
        return [Piece("", Kind.CONTENT), *self._feed(token_ids)]

    def _feed(self, token_ids: Sequence[int]) -> list[Piece]:
        pieces: list[Piece] = []
        run: list[int] = []
        for token_id in token_ids:
            is_stop, is_special = token_id in self._stop_token_ids, token_id in self._specials
            if is_stop or is_special:
                pieces += self._give(self._push(run))
                run = []
            if self._has_ended:
                break
            if is_stop:
                self._stop_token_id, self._has_ended = token_id, True
                break
            if is_special:
                pieces += self._give(self._push([token_id]) if self._watcher else "")
                self._waiting.append((self._detokenizer.num_chars, self._specials[token_id]))
            else:
                run.append(token_id)
        pieces += self._give(self._push(run))
        return pieces

    def finish(self) -> list[Piece]:
        """The remaining pieces, at the end of the answer."""
        is_undecided = self._tracker is not None and self._tracker.phase is Phase.UNDECIDED
        undecided = self._begin_content() if is_undecided else []
        stop = self._stop_token_id
        shown = stop if self._include_stop else None
        if self._watcher is not None:
            tail = self._watcher.finish(shown)[self._num_given :]
            if self._watcher.is_stopped:
                stop = None
        else:
            tail = "" if shown is None else self._detokenizer.push(shown)
            tail += self._detokenizer.flush()
        pieces = [*undecided, *self._give(tail)]
        if stop is not None and (shown is None or stop in self._specials):
            text = self._all_specials.get(stop)
            if text is None:
                text = self._tokenizer.decode([stop], skip_special_tokens=False)
            pieces.append(Piece(text, Kind.STOP))
        return pieces

    def _push(self, token_ids: Sequence[int]) -> str:
        """The text that became final."""
        if not token_ids or self._has_ended:
            return ""
        watcher = self._watcher
        if watcher is None:
            return self._detokenizer.push_all(token_ids)
        if self._tracker is not None and not self._stops_inside:
            for token_id in token_ids:
                watcher.pass_over(token_id)
        else:
            self._has_ended = any(map(watcher, token_ids))
        return self._new_watched()

    def _new_watched(self) -> str:
        """The text that the watcher has made final since the last call."""
        if self._watcher is None:
            return ""
        new = self._watcher.settled_pieces[self._num_watched :]
        self._num_watched += len(new)
        return "".join(new)

    def _give(self, text: str) -> Iterator[Piece]:
        """Pieces of final text, with the special tokens inside it and at its end."""
        while self._waiting and self._waiting[0][0] <= self._num_given + len(text):
            place, name = self._waiting.popleft()
            before, text = text[: place - self._num_given], text[place - self._num_given :]
            self._num_given = place
            if before:
                yield Piece(before, Kind.TEXT)
            yield Piece(name, Kind.SPECIAL)
        self._num_given += len(text)
        if text:
            yield Piece(text, Kind.TEXT)
