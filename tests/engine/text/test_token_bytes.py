"""The bytes of single tokens, against the text of whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagespec.engine.text.token_bytes import TokenBytes, byte_alphabet
from tests.support.tokenizers import SPECIAL, byte_fallback, byte_level, unigram, word_pieces


def joined(tokenizer: Any, token_ids: list[int]) -> bytes:
    of = TokenBytes(tokenizer)
    return b"".join(map(of, token_ids))


@pytest.mark.parametrize("make", [byte_level, byte_fallback, unigram])
def test_the_bytes_of_tokens_make_the_text(make: Any) -> None:
    tokenizer = make()
    for text in ("a é語 ab", "\U0001f600 a\U0001f600\U0001f600", "e\u0301 a", "  ab ", "\ufffd"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert joined(tokenizer, ids).decode().removeprefix(" ") == text.removeprefix(" ")


@pytest.mark.parametrize("make", [byte_level, byte_fallback, unigram])
def test_bytes_that_form_no_character_are_their_own(make: Any) -> None:
    tokenizer = make()
    of = TokenBytes(tokenizer)
    ids = {of(i): i for i in range(len(SPECIAL), len(tokenizer))}
    for byte in range(0x80, 0x100):
        assert bytes([byte]) in ids
    emoji = "\U0001f9d1\u200d\U0001f680".encode()
    assert b"".join(of(ids[bytes([byte])]) for byte in emoji) == emoji


def test_special_tokens_have_their_names_and_no_token_has_nothing() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        of = TokenBytes(tokenizer)
        assert of(tokenizer.convert_tokens_to_ids("</s>")) == b"</s>"
        assert of(len(tokenizer) + 5) == b""
        assert of.special_ids >= {0, 1, 2}


def test_word_pieces_have_the_space_that_the_decoder_puts_before_them() -> None:
    tokenizer = word_pieces()
    of = TokenBytes(tokenizer)
    ids = tokenizer("play ##ing", add_special_tokens=False)["input_ids"]
    assert ids
    name = tokenizer.convert_tokens_to_ids
    assert (of(name("play")), of(name("##ing"))) == (b" play", b"ing")


def test_a_byte_level_decoder_inside_a_sequence_is_found() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()]
    )
    of = TokenBytes(tokenizer)
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    assert of(tokenizer.convert_tokens_to_ids(letters[0x9F])) == b"\x9f"


def test_a_name_that_looks_like_a_byte_is_text_without_byte_fallback() -> None:
    vocab = {"a": 0, "<0x41>": 1, "<unk>": 2}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert TokenBytes(tokenizer)(1).strip() == b"<0x41>"
