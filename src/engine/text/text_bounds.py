"""A lower bound on the number of tokens of a text, computed from its bytes without tokenising.

It divides by the maximum number of bytes per token. The bound must hold for every text, so it
exists only for tokenizers whose components are all known: a component that may drop text of any
length, or replace it by one unknown token, has no bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .token_bytes import byte_alphabet, parts_of

# Maximum bytes of text per byte of its normal form. A canonical composition has at most 3 bytes per
# byte; a 4-byte compatibility character may become one letter, and letters are then composed.
_SHRINKS = {"NFC": 4.0, "NFD": 4.0, "NFKC": 8.0, "NFKD": 8.0, "Lowercase": 3.0, "ByteLevel": 1.0}
_SHRINKS |= {"Sequence": 1.0, "Prepend": 1.0}
# Components that keep every byte, and components that drop nothing but white space.
_KEEPS = frozenset(("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "Sequence"))
_DROPS_SPACES = frozenset(("Whitespace", "WhitespaceSplit", "BertPreTokenizer"))
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_NUM_CHARS_AT_ONCE = 1 << 18
# Module of transformers' own classes, which pass a text on unchanged.
_PLAIN_MODULE = "transformers.tokenization_utils"


@dataclass(frozen=True, slots=True)
class TextBound:
    """Maximum number of bytes of text per token.

    Attributes:
        max_bytes_per_token: in UTF-8, before the text is normalised.
        has_spaces: whether white space counts; if not, a token may absorb any amount of it.
    """

    max_bytes_per_token: float
    has_spaces: bool

    def min_num_tokens(self, text: str) -> int:
        """A lower bound on the text's number of tokens."""
        num_bytes = 0
        # In parts, so that other threads run in between.
        for begin in range(0, len(text), _NUM_CHARS_AT_ONCE):
            part = text[begin : begin + _NUM_CHARS_AT_ONCE]
            part = part if self.has_spaces else "".join(part.split())
            num_bytes += len(part.encode("utf-8", "replace"))
        return math.ceil(num_bytes / self.max_bytes_per_token)


def is_plain(tokenizer: Any) -> bool:
    """Whether a tokenizer is transformers' unmodified wrapper of a Rust tokenizer: it passes texts
    on unchanged, and the Rust tokenizer's settings are its only state."""
    methods = (getattr(type(tokenizer), name, None) for name in ("__call__", "_encode_plus"))
    return hasattr(tokenizer, "backend_tokenizer") and all(
        getattr(method, "__module__", "").startswith(_PLAIN_MODULE) for method in methods
    )


def text_bound(tokenizer: Any) -> TextBound | None:
    """The bound of a transformers tokenizer; None if it is unknown."""
    if not is_plain(tokenizer):
        return None
    backend = tokenizer.backend_tokenizer
    shrink = math.prod(map(_shrink, parts_of(backend.normalizer)))
    drops_spaces = list(map(_drops_spaces, parts_of(backend.pre_tokenizer)))
    if shrink == math.inf or None in drops_spaces:
        return None
    vocab: Mapping[str, int] = backend.get_vocab(with_added_tokens=False)
    is_byte_level = _is_byte_level(backend, vocab)
    if not is_byte_level and not _falls_back_to_bytes(backend.model, vocab):
        return None
    added = list(backend.get_added_tokens_decoder().values())
    # A letter of a byte-level token stands for one byte, though its UTF-8 form has up to two.
    sizes = [len(token) if is_byte_level else len(token.encode()) for token in vocab]
    sizes += [len(token.content.encode()) for token in added]
    swallows = any(token.lstrip or token.rstrip for token in added)
    return TextBound(shrink * max(sizes, default=1), not (swallows or any(drops_spaces)))


def _shrink(part: dict[str, Any]) -> float:
    """Maximum bytes that a normaliser component maps to one byte; infinite if unbounded."""
    kind = part.get("type", "")
    if kind == "Replace":
        pattern, content = part["pattern"].get("String"), part["content"]
        if not pattern or not content:
            return math.inf
        return max(1.0, len(pattern.encode()) / len(content.encode()))
    return _SHRINKS.get(kind, math.inf)


def _drops_spaces(part: dict[str, Any]) -> bool | None:
    """Whether a pre-tokenizer component drops white space; None if it may drop other text."""
    kind = part.get("type")
    if kind in _DROPS_SPACES:
        return True
    return False if kind in _KEEPS and part.get("behavior") != "Removed" else None


def _is_byte_level(backend: Any, vocab: Mapping[str, int]) -> bool:
    """Whether the bytes of a text are mapped to letters, each of which is a token."""
    parts = [*parts_of(backend.normalizer), *parts_of(backend.pre_tokenizer)]
    is_mapped = any(part.get("type") == "ByteLevel" for part in parts)
    return (
        is_mapped
        and type(backend.model).__name__ == "BPE"
        and byte_alphabet().keys() <= vocab.keys()
    )


def _falls_back_to_bytes(model: Any, vocab: Mapping[str, int]) -> bool:
    is_bpe = type(model).__name__ == "BPE"
    return is_bpe and bool(model.byte_fallback) and vocab.keys() >= _BYTE_TOKENS
