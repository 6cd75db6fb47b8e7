"""The masks of constrained rows before their content begins.

Inside the reasoning every token is allowed, except tokens that would close it and continue with
content text, which the constraint could not check. Before the reasoning, the first token may be
one that the constraint allows, or one that opens the reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.text.delimiter import CONSTRAIN
from ..engine.text.reasoning import Reasoning, delimiter_patterns
from ..engine.text.token_bytes import TokenBytes

Ids = NDArray[np.int64]


class ReasoningTokens:
    """The tokens of one model that open or close the reasoning. Threads may share it.

    Args:
        backend: the tokenizer's backend, of the ``tokenizers`` library.
        vocab: names and ids of its tokens.
    """

    def __init__(
        self, reasoning: Reasoning, backend: Any, vocab: dict[str, int], bytes_of: TokenBytes
    ) -> None:
        self._backend, self._vocab, self._bytes_of = backend, vocab, bytes_of
        opening, closing = reasoning.opening, reasoning.closing
        self._banned = self._tokens_beyond(reasoning)
        self._next: dict[bytes, set[int]] = {}
        if reasoning.is_open:
            return
        opened, closed = self._encoded(opening), self._encoded(closing)
        if not opened:
            return
        self._add_path(opening, opened, goes_on=True)
        # The answer may also begin with a header of its content (harmony).
        if closed[:1] == opened[:1] and len(bytes_of(opened[0])) > 1:
            for delimiter in (closing, _with_type(closing, reasoning.header_end)):
                self._add_path(delimiter, self._encoded(delimiter), goes_on=False)

    def banned(self, num_matched: int) -> Ids:
        """Ids of tokens that are banned when the reasoning ends with ``num_matched`` bytes of its
        closing delimiter; usually empty."""
        return self._banned[num_matched]

    def opening(self, head: bytes) -> Ids:
        """Tokens that continue the opening of reasoning for an answer whose text is ``head``."""
        return np.array(sorted(self._next.get(head, ())), np.int64)

    def _add_path(self, delimiter: bytes, ids: list[int], *, goes_on: bool) -> None:
        """Allow the tokens of a delimiter, in sequence.

        Args:
            ids: empty if no tokens spell the delimiter.
            goes_on: the last token may contain more text, such as a line break.
        """
        if not ids:
            return
        head = b""
        for token_id in ids[:-1]:
            self._next.setdefault(head, set()).add(token_id)
            head += self._bytes_of(token_id)
        last = self._next.setdefault(head, set())
        last.add(ids[-1])
        if goes_on:
            rest = delimiter[len(head) :]
            last.update(i for i, text in self._texts_with(rest) if text.startswith(rest))

    def _encoded(self, delimiter: bytes) -> list[int]:
        """The tokens of a delimiter inside a text; empty if no tokens spell it exactly."""
        text = delimiter.decode()
        for before in ("", "\n"):
            ids = self._backend.encode(before + text, add_special_tokens=False).ids
            for begin in range(min(3, len(ids))):
                if b"".join(map(self._bytes_of, ids[begin:])) == delimiter:
                    return list(ids[begin:])
        return []

    def _tokens_beyond(self, reasoning: Reasoning) -> list[Ids]:
        """For each number of matched bytes, the tokens that complete the delimiter and continue
        with more than white space."""
        closing = reasoning.closing
        pattern = delimiter_patterns(closing, reasoning.header_end).whole
        beyond: list[set[int]] = [set() for _ in closing]
        for token_id, text in self._texts_with(closing[-1:]):
            for num_matched, ids in enumerate(beyond):
                whole = closing[:num_matched] + text
                found = pattern.search(whole)
                if found is not None and whole[found.end() :].strip():
                    ids.add(token_id)
        return [np.array(sorted(ids), np.int64) for ids in beyond]

    def _texts_with(self, part: bytes) -> Iterator[tuple[int, bytes]]:
        """Tokens whose bytes contain ``part``. Names show printable ASCII unchanged, so the
        bytes of most tokens need not be read."""
        named = part.decode("ascii", "replace")
        is_plain = named.isascii() and named.isprintable() and " " not in named
        for name, token_id in self._vocab.items():
            if not is_plain or named in name:
                text = self._bytes_of(token_id)
                if part in text:
                    yield token_id, text


def _with_type(delimiter: bytes, header_end: bytes) -> bytes:
    """A header with the content type that models write for constrained content."""
    if not header_end or not delimiter.endswith(header_end):
        return delimiter
    return delimiter.removesuffix(header_end) + f" {CONSTRAIN}json".encode() + header_end
