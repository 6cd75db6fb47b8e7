"""The bytes of single tokens, as they appear inside a text.

A token in isolation decodes differently: SentencePiece strips the space of the first word, and a
token of a byte-level vocabulary may end inside a character. So a token is decoded after a letter,
and bytes that form no character are derived from the token's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")
_LETTER = "a"


def byte_alphabet() -> dict[str, int]:
    """The byte for each letter of a byte-level vocabulary: the letter itself if printable,
    else a letter from U+0100 on (GPT-2's table)."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte) if byte in printed else chr(next(others)): byte for byte in range(0x100)}


class TokenBytes:
    """Maps token ids to bytes, cached. Threads may share it.

    Special tokens have the bytes of their names; ids without a token have no bytes.

    Args:
        tokenizer: a transformers tokenizer, or an object with ``decode`` and ``__call__``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """The bytes of a token inside a text."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes_of(token_id)
        return found

    def text(self, token_id: int) -> str:
        """The text of a token inside a text; bytes that form no character are U+FFFD."""
        return self(token_id).decode("utf-8", "replace")

    def at_beginning(self, token_id: int) -> bytes:
        """The bytes of a token at the beginning of a text, where some decoders strip spaces."""
        inside = self(token_id)
        if not inside.startswith(b" "):
            return inside
        alone = self._decode([token_id]).encode("utf-8", "replace")
        num_stripped = len(inside) - len(alone)
        return alone if inside == b" " * num_stripped + alone else inside

    def num_chars(self, text: bytes) -> int:
        """Number of characters that the tokenizer shows for these bytes. U+FFFD stands for each
        invalid byte with byte fallback, otherwise for each invalid start of a character."""
        return len(text.decode("utf-8", "surrogateescape" if self._alphabet is None else "replace"))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that decoding omits when it skips special tokens."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def _bytes_of(self, token_id: int) -> bytes:
        name = self._name_of(token_id)
        if name is not None and self._alphabet is not None:
            letters = self._alphabet
            if all(letter in letters for letter in name):
                return bytes(letters[letter] for letter in name)
            return name.encode()  # an added token that is not byte-encoded
        if name is not None and self._has_byte_fallback:
            byte = _BYTE_NAME.fullmatch(name)
            if byte is not None:
                return bytes([int(byte[1], 16)])
        return self._text_of(token_id).encode("utf-8", "replace")

    def _name_of(self, token_id: int) -> str | None:
        convert: Callable[[int], Any] | None
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        name = None if convert is None else convert(token_id)
        return name if isinstance(name, str) else None

    def _text_of(self, token_id: int) -> str:
        first, before = self._letter
        text = self._decode([*first, token_id])
        if not text.startswith(before) or _INCOMPLETE in text:
            return self._decode([token_id])
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    @cached_property
    def _letter(self) -> tuple[list[int], str]:
        """The tokens of a letter, and their text."""
        try:
            token_ids = list(self._tokenizer(_LETTER, add_special_tokens=False)["input_ids"])
        except Exception:  # a caller's own tokenizer may not accept the argument
            token_ids = []
        return token_ids, self._decode(token_ids) if token_ids else ""

    @cached_property
    def _alphabet(self) -> dict[str, int] | None:
        """The letters of a byte-level vocabulary; None for any other vocabulary."""
        return byte_alphabet() if "ByteLevel" in self._decoders else None

    @cached_property
    def _has_byte_fallback(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is None or "ByteFallback" in self._decoders

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The types of a fast tokenizer's decoders."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        parts = parts_of(getattr(backend, "decoder", None))
        return frozenset(str(part.get("type")) for part in parts)


def parts_of(part: Any) -> list[dict[str, Any]]:
    """The description of a tokenizer component (of the ``tokenizers`` library), followed by those
    of all its nested components; empty for None."""
    found: list[dict[str, Any]] = [] if part is None else [json.loads(part.__getstate__())]
    for one in found:
        for name in ("normalizers", "pretokenizers", "decoders"):
            found += one.get(name, ())
    return found
