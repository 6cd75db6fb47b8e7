"""The lower bound on a text's number of tokens never exceeds the real number."""

from __future__ import annotations

import random
import sys
import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagespec.engine.text.text_bounds import text_bound
from tests.support.tokenizers import byte_fallback, byte_level

PIECES = [" ", "  ", "\n", "a", "b", "ab", "é", "e\u0301", "語", "\U0001f600", "\u212b", "</s>",
          "<s>", "<0x41>", "\u1fef", "ｱ", "\U0001d400", "İ", "▁", "ΐ", "ι\u0308\u0301"]  # fmt: skip


def with_normalizer(tokenizer: PreTrainedTokenizerFast, part: Any) -> PreTrainedTokenizerFast:
    tokenizer.backend_tokenizer.normalizer = part
    return tokenizer


def with_token(tokenizer: PreTrainedTokenizerFast, **more: bool) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken("<mark>", special=True, **more)])
    return tokenizer


KNOWN = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "llama": lambda: with_normalizer(
        byte_fallback(),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "nfc": lambda: with_normalizer(byte_level(), normalizers.NFC()),
    "nfkc, lower": lambda: with_normalizer(
        byte_level(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "shorter": lambda: with_normalizer(byte_level(), normalizers.Replace("ab", "b")),
    "lstrip": lambda: with_token(byte_level(), lstrip=True),
    "rstrip": lambda: with_token(byte_level(), rstrip=True),
}


@pytest.mark.parametrize("name", KNOWN)
def test_no_text_has_fewer_tokens(name: str) -> None:
    tokenizer = KNOWN[name]()
    bound = text_bound(tokenizer)
    assert bound is not None
    rng = random.Random(name)
    for _ in range(400):
        pieces = [*rng.sample(PIECES, 4), *(["<mark>"] if "strip" in name else [])]
        text = "".join(rng.choice(pieces) * rng.randrange(1, 9) for _ in range(30))
        num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert bound.min_num_tokens(text) <= num_tokens, text
    for piece in PIECES:
        num_tokens = len(tokenizer(piece * 500, add_special_tokens=False)["input_ids"])
        assert bound.min_num_tokens(piece * 500) <= num_tokens
    # It is worth something: ordinary text has few bytes per token.
    assert bound.min_num_tokens("ab" * 5000) > 50


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_white_space_that_tokens_swallow_does_not_count(side: str) -> None:
    tokenizer = with_token(byte_level(), **{side: True})
    space = " \n" * 5000
    text = space + "<mark>" if side == "lstrip" else "<mark>" + space
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1, "it is swallowed"
    bound = text_bound(tokenizer)
    assert bound is not None
    assert bound.min_num_tokens(text) <= 1


def test_white_space_that_is_dropped_does_not_count() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    text = "a" + " \t\u2003\x85\u00a0" * 4000 + "b"
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 2
    bound = text_bound(tokenizer)
    assert bound is not None
    assert bound.min_num_tokens(text) <= 2


UNKNOWN: dict[str, Any] = {
    "strips accents": normalizers.StripAccents(),
    "strips": normalizers.Strip(),
    "cleans": normalizers.BertNormalizer(),
    "nmt": normalizers.Nmt(),
    "expression": normalizers.Replace(Regex(" {2,}"), " "),
    "removes": normalizers.Replace("a", ""),
    "inside": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_shrinks_text_by_any_length_has_no_bound(name: str) -> None:
    assert text_bound(with_normalizer(byte_level(), UNKNOWN[name])) is None


def wrapped(model: Any, pre_tokenizer: Any = None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_what_replaces_text_by_an_unknown_token_has_no_bound() -> None:
    vocab = {"<unk>": 0, "a": 1}
    removed = pre_tokenizers.Split("a", "removed")
    for tokenizer in (
        wrapped(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True)),
        wrapped(models.BPE(vocab, [])),  # drops it
        wrapped(models.BPE(vocab, []), pre_tokenizers.ByteLevel()),  # most letters are missing
        wrapped(models.BPE(vocab, [], byte_fallback=True)),  # most bytes are
        wrapped(models.WordLevel(vocab, "<unk>"), pre_tokenizers.Whitespace()),
        wrapped(models.WordPiece(vocab, unk_token="<unk>"), pre_tokenizers.Whitespace()),
        wrapped(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
        wrapped(byte_level().backend_tokenizer.model, removed),
    ):
        assert text_bound(tokenizer) is None


def test_a_tokenizer_of_another_kind_has_no_bound() -> None:
    class Shortening(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *rest: Any, **more: Any) -> Any:
            return super()._encode_plus(text[:1], *rest, **more)

    assert text_bound(None) is None
    assert text_bound(object()) is None
    assert text_bound(Shortening(tokenizer_object=byte_level().backend_tokenizer)) is None


def test_how_far_unicode_shrinks() -> None:
    """The numbers of normal forms hold for this version of Unicode."""

    def size(text: str) -> int:
        return len(text.encode())

    for code in range(sys.maxunicode + 1):
        char = chr(code)
        if 0xD800 <= code < 0xE000:
            continue
        decomposed = unicodedata.normalize("NFD", char)
        composed = unicodedata.normalize("NFC", char)
        assert size(char) <= 4 * size(composed)
        assert size(decomposed) <= 4 * size(composed), "what is composed"
        assert size(char) <= 3 * size(char.lower())
        # Each letter of it may come of a compatibility character of 4 bytes.
        assert 4 * len(decomposed) <= 8 * size(composed)
