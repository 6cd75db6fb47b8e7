"""Finds the end of an answer's reasoning: constraints and stop strings apply to the content only.

Delimiters are searched in the text of all tokens, with special tokens as their names. A delimiter
spelled in plain tokens therefore counts too, as it does for the readers of answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from .delimiter import Delimiter


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning that an answer to a prompt may begin with.

    Attributes:
        opening, closing: the delimiters, not empty.
        is_open: the prompt ends inside the reasoning. Otherwise the answer may open it.
        stops_inside: stop strings also end the answer inside the reasoning.
        header_end: see :class:`.delimiter.Delimiter`; for both delimiters.
    """

    opening: bytes
    closing: bytes
    is_open: bool
    stops_inside: bool = False
    header_end: bytes = b""


class DelimiterPatterns(NamedTuple):
    """
    Attributes:
        whole: matches a delimiter.
        begun: matches, at the end of a text, a prefix of a delimiter.
        max_length: maximum length of a delimiter, in bytes.
    """

    whole: re.Pattern[bytes]
    begun: re.Pattern[bytes]
    max_length: int


@lru_cache(64)
def delimiter_patterns(text: bytes, header_end: bytes) -> DelimiterPatterns:
    """Regexes that find a delimiter in the bytes of tokens."""
    given = Delimiter(text.decode("latin-1"), header_end.decode("latin-1"))
    whole, begun = (p.encode("latin-1") for p in (given.pattern, rf"(?:{given.begun})\Z"))
    return DelimiterPatterns(re.compile(whole), re.compile(begun), given.max_length)


class Phase(Enum):
    """The part an answer is in. UNDECIDED: all text so far is a possible prefix of a delimiter."""

    UNDECIDED = "undecided"
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningTracker:
    """Follows one answer from its first token to the beginning of its content.

    White space before the opening delimiter is skipped. An answer that begins with any other text
    is content from its first token. If it begins with the closing delimiter, the content follows.
    The content begins at a token boundary: text after the closing delimiter in the same token does
    not belong to it.

    Args:
        bytes_of: returns the bytes of a token, like :class:`.token_bytes.TokenBytes`.

    Attributes:
        phase: the phase after the tokens so far.
        num_skipped: number of tokens before the content; None until ``phase`` is CONTENT.
        head: while undecided, the text so far without leading white space.
    """

    __slots__ = (
        "_bytes_of",
        "_closing",
        "_num_tokens",
        "_opening",
        "_reasoning",
        "_tail",
        "head",
        "num_skipped",
        "phase",
    )

    def __init__(self, reasoning: Reasoning, bytes_of: Callable[[int], bytes]) -> None:
        self._reasoning, self._bytes_of = reasoning, bytes_of
        self._opening = delimiter_patterns(reasoning.opening, reasoning.header_end)
        self._closing = delimiter_patterns(reasoning.closing, reasoning.header_end)
        self._num_tokens = 0
        self._tail = b""  # may contain a prefix of the closing delimiter
        self.head = b""
        self.num_skipped: int | None = None
        self.phase = Phase.REASONING if reasoning.is_open else Phase.UNDECIDED

    def push(self, token_id: int) -> Phase:
        """Process the next token; must not be called once the content has begun."""
        self._num_tokens += 1
        text = self._bytes_of(token_id)
        if self.phase is Phase.UNDECIDED:
            self._decide(text)
        else:
            self._search(text)
        return self.phase

    @property
    def num_matched(self) -> int:
        """Length in bytes of the incomplete closing delimiter at the end of the reasoning, without
        a content type in it."""
        found = self._closing.begun.search(self._tail)
        if found is None:
            return 0
        begun, closing = found.group(), self._reasoning.closing
        if closing.startswith(begun):
            return len(begun)
        end = self._reasoning.header_end
        longest = min(len(end) - 1, len(begun))
        num_of_end = next((n for n in range(longest, 0, -1) if begun.endswith(end[:n])), 0)
        return len(closing) - len(end) + num_of_end

    def _decide(self, text: bytes) -> None:
        self.head = head = (self.head + text).lstrip()
        opened = self._opening.whole.match(head)
        if opened is not None:
            self.phase = Phase.REASONING
            self._search(head[opened.end() :])
        elif self._closing.whole.match(head) is not None:
            self._begin_content(self._num_tokens)
        elif head and not (self._opening.begun.match(head) or self._closing.begun.match(head)):
            self._begin_content(0)

    def _search(self, text: bytes) -> None:
        tail = self._tail + text
        if self._closing.whole.search(tail) is not None:
            self._begin_content(self._num_tokens)
        self._tail = tail[max(0, len(tail) - self._closing.max_length + 1) :]

    def _begin_content(self, num_skipped: int) -> None:
        self.phase, self.num_skipped = Phase.CONTENT, num_skipped
