"""A tokenizer as llguidance reads it."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from pagespec import InvalidInputError
from pagespec.structured.tokens import make_ll_tokenizer
from tests.support.tokenizers import byte_fallback, byte_level


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_tokens_have_the_bytes_of_their_text(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    made = make_ll_tokenizer(tokenizer, 320, {2})
    assert made.vocab_size == 320
    assert made.eos_tokens == [2]
    for text in ("a", " a", "é", " ab"):
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert made.decode_bytes(ids).decode().strip() == text.strip()


def test_a_byte_level_vocabulary_is_recognised_after_a_byte_fallback() -> None:
    # As transformers makes it of a GGUF file.
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()]
    )
    made = make_ll_tokenizer(tokenizer, 266, {2})
    (space_a,) = tokenizer.backend_tokenizer.encode(" a", add_special_tokens=False).ids
    assert made.decode_bytes([space_a]) == b" a"


def test_a_vocabulary_may_have_gaps() -> None:
    described = json.loads(byte_level().backend_tokenizer.to_str())
    vocab = described["model"]["vocab"]
    vocab.update({token: i + 5 for token, i in vocab.items() if i >= 200})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), eos_token="</s>"
    )
    made = make_ll_tokenizer(tokenizer, 100, {2})
    assert made.vocab_size == 271
    assert made.decode_bytes([3 + ord("a"), 264]) == b"a a"


def test_what_is_set_up_for_batches_stays_as_it_is() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(3)
    make_ll_tokenizer(tokenizer, 266, {2})
    backend = tokenizer.backend_tokenizer
    assert backend.truncation["max_length"] == 3
    backend.decoder = decoders.Replace("a", "b")
    with pytest.raises(InvalidInputError):
        make_ll_tokenizer(tokenizer, 266, {2})
    assert "Replace" in str(backend.decoder)


def test_tokenizers_that_are_not_read_rightly_are_refused() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Replace("a", "b")
    with pytest.raises(InvalidInputError, match="does not read this model's tokenizer"):
        make_ll_tokenizer(tokenizer, 266, {2})
    with pytest.raises(InvalidInputError, match="has no tokenizer"):
        make_ll_tokenizer(None, 266, {2})
    with pytest.raises(InvalidInputError, match="no fast tokenizer"):
        make_ll_tokenizer(object(), 266, {2})
    with pytest.raises(InvalidInputError, match="no end-of-sequence token"):
        make_ll_tokenizer(byte_level(), 266, ())


def test_what_ends_a_text_is_special_whatever_the_tokenizer_says() -> None:
    tokenizer = byte_level()
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in described["added_tokens"]:
        token["special"] = False
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)))
    made = make_ll_tokenizer(plain, 266, {2})
    assert made.is_special_token(2)
    assert 2 not in made.tokenize_str("x</s>")
    assert made.tokenize_str("<s>") == [1]
    named = make_ll_tokenizer(tokenizer, 266, {2}, has_names=True)
    assert 2 in named.tokenize_str("x</s>")
