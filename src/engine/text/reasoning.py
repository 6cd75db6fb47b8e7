"""Tracks the end of an answer's reasoning: constraints and stop strings apply to the content.

The delimiters are found in the text of all tokens, special tokens by their names, as readers of
answers find them: a delimiter that is spelled in plain tokens delimits as well.
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
        stops_inside: stop strings end the answer inside the reasoning, too.
        header_end: as of :class:`.delimiter.Delimiter`, of both delimiters.
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
        begun: matches what more text may complete to one, at the end of a text.
        max_length: the most bytes of a delimiter.
    """

    whole: re.Pattern[bytes]
    begun: re.Pattern[bytes]
    max_length: int


@lru_cache(64)
def delimiter_patterns(text: bytes, header_end: bytes) -> DelimiterPatterns:
    """Patterns that find a delimiter in the bytes of tokens."""
    given = Delimiter(text.decode("latin-1"), header_end.decode("latin-1"))
    whole, begun = (p.encode("latin-1") for p in (given.pattern, rf"(?:{given.begun})\Z"))
    return DelimiterPatterns(re.compile(whole), re.compile(begun), given.max_length)


class Phase(Enum):
    """Where an answer is. UNDECIDED: all text so far may be the beginning of a delimiter."""

    UNDECIDED = "undecided"
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningTracker:
    """Follows one answer from its first token to the beginning of its content.

    White space before the opening delimiter is skipped. An answer that begins with anything else is
    content from its first token; one that begins with the closing delimiter is content behind it.
    The content begins at a token: text behind the closing delimiter in the same token is no part of
    it.

    Args:
        bytes_of: the bytes of a token, as :class:`.token_bytes.TokenBytes`.

    Attributes:
        phase: after the tokens so far.
        num_skipped: tokens before the content; None until ``phase`` is CONTENT.
        head: while undecided, the text so far without white space before it.
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
        self._tail = b""  # in which the closing delimiter may have begun
        self.head = b""
        self.num_skipped: int | None = None
        self.phase = Phase.REASONING if reasoning.is_open else Phase.UNDECIDED

    def push(self, token_id: int) -> Phase:
        """Take in the next token; not to be called once the content has begun."""
        self._num_tokens += 1
        text = self._bytes_of(token_id)
        if self.phase is Phase.UNDECIDED:
            self._decide(text)
        else:
            self._search(text)
        return self.phase

    @property
    def num_matched(self) -> int:
        """Bytes of the closing delimiter, not all of them, that the reasoning ends with; a content
        type in it does not count."""
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
