"""Character offsets of tokens in the text of an answer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .token_bytes import TokenBytes

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_TOKENS = 4


class TextOffsets:
    """Counts the characters of a text, token by token. A token that begins inside a character has
    the offset of that character.

    Args:
        prompt_token_ids: tokens before the text, see :class:`.detokenizer.Detokenizer`; empty for
            the text of a prompt itself.
        skips_special: special tokens have no text.
        num_before: number of characters before the text.
    """

    def __init__(
        self,
        bytes_of: TokenBytes,
        prompt_token_ids: Sequence[int] = (),
        *,
        skips_special: bool = True,
        num_before: int = 0,
    ) -> None:
        self._bytes_of = bytes_of
        self._textless = bytes_of.special_ids if skips_special else frozenset()
        self._num_chars = num_before
        self._is_beginning = all(i in self._textless for i in prompt_token_ids)
        # A character that the prompt begins belongs to the text if the text completes it.
        last = [i for i in prompt_token_ids[-16:] if i not in self._textless]
        self._pending = _tail(b"".join(map(bytes_of, last[-_MAX_CHARACTER_TOKENS:])))
        self._is_of_prompt = True

    @property
    def num_chars(self) -> int:
        """Number of characters so far, without an incomplete one."""
        return self._num_chars

    def push(self, token_id: int) -> int:
        """The offset of the next token's first character."""
        if token_id in self._textless:
            return self._num_chars
        own = self._bytes_of
        text = own.at_beginning(token_id) if self._is_beginning else own(token_id)
        self._is_beginning = False
        if self._pending and text and not _continues(self._pending, text):
            if not self._is_of_prompt:
                self._num_chars += own.num_chars(self._pending)
            self._pending = b""
        place = self._num_chars
        if text:
            text = self._pending + text
            self._pending, self._is_of_prompt = _tail(text), False
            self._num_chars += own.num_chars(text[: len(text) - len(self._pending)])
        return place


def _tail(text: bytes) -> bytes:
    """The bytes at the end that begin an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return decoder.getstate()[0]


def _continues(pending: bytes, text: bytes) -> bool:
    """Whether ``text`` continues the character that ``pending`` begins."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return _INCOMPLETE not in decoder.decode(pending + text[:1])
