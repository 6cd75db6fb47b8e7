"""Where the reasoning of an answer ends: constraints and stop strings apply to the content behind.

The delimiters are found in the text of all tokens, special tokens by their names, as readers of
answers find them: a delimiter that is spelled in plain tokens delimits as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning that an answer to a prompt may begin with.

    Attributes:
        opening, closing: the delimiters, not empty.
        is_open: the prompt ends inside the reasoning. Otherwise the answer may open it.
        stops_inside: stop strings end the answer inside the reasoning, too.
    """

    opening: bytes
    closing: bytes
    is_open: bool
    stops_inside: bool = False


class Phase(Enum):
    """Where an answer is. UNDECIDED: all text so far may be the beginning of a delimiter."""

    UNDECIDED = "undecided"
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningTracker:
    """Follows one answer from its first token to the beginning of its content.

    White space before the opening delimiter is skipped. An answer that begins with anything else is
    content from its first token; one that begins with the closing delimiter is content behind it.
    The content begins at a token: what a token has behind the closing delimiter is not part of it.

    Args:
        bytes_of: the bytes of a token, as :class:`.token_bytes.TokenBytes`.

    Attributes:
        phase: after the tokens so far.
        num_skipped: tokens before the content; None until ``phase`` is CONTENT.
        head: while undecided, the text so far without white space before it.
    """

    __slots__ = ("_bytes_of", "_num_tokens", "_reasoning", "_tail", "head", "num_skipped", "phase")

    def __init__(self, reasoning: Reasoning, bytes_of: Callable[[int], bytes]) -> None:
        self._reasoning, self._bytes_of = reasoning, bytes_of
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
        """Bytes of the closing delimiter, not all of them, that the reasoning ends with."""
        closing, tail = self._reasoning.closing, self._tail
        longest = min(len(closing) - 1, len(tail))
        return next((n for n in range(longest, 0, -1) if tail.endswith(closing[:n])), 0)

    def _decide(self, text: bytes) -> None:
        opening, closing = self._reasoning.opening, self._reasoning.closing
        self.head = head = (self.head + text).lstrip()
        if head.startswith(opening):
            self.phase = Phase.REASONING
            self._search(head[len(opening) :])
        elif head.startswith(closing):
            self._begin_content(self._num_tokens)
        elif not (opening.startswith(head) or closing.startswith(head)):
            self._begin_content(0)

    def _search(self, text: bytes) -> None:
        closing = self._reasoning.closing
        tail = self._tail + text
        if closing in tail:
            self._begin_content(self._num_tokens)
        self._tail = tail[max(0, len(tail) - len(closing) + 1) :]

    def _begin_content(self, num_skipped: int) -> None:
        self.phase, self.num_skipped = Phase.CONTENT, num_skipped
