"""The offset of each token in the returned text, which is the detokenizer's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagespec.engine.text.detokenizer import decode_output
from pagespec.engine.text.text_offsets import TextOffsets
from pagespec.engine.text.token_bytes import TokenBytes
from tests.support.tokenizers import SPECIAL, byte_fallback, byte_level, unigram, word_pieces

TOKENIZERS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "unigram": unigram(),
    "word pieces": word_pieces(),
}
BYTES = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}
PARTS = ["a", "b", "ab", " ", "é", "語", "\U0001f600", "\U0001f9d1\u200d\U0001f680", "e\u0301",
         "\n", "answer", " answer", "play", "plays"]  # fmt: skip


def offsets(name: str, prompt: list[int], ids: list[int]) -> list[int]:
    found = TextOffsets(BYTES[name], prompt)
    return [found.push(token_id) for token_id in ids]


def num_shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def encoded(name: str, text: str) -> list[int]:
    ids: list[int] = TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_places_are_those_in_the_text(name: str, data: st.DataObject) -> None:
    texts = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
    ids, prompt = encoded(name, data.draw(texts)), encoded(name, data.draw(texts))
    prompt = data.draw(st.sampled_from([[], [1], prompt, [1, *prompt]]))
    cut = data.draw(st.integers(0, len(ids)))
    if data.draw(st.booleans()):
        prompt, ids = [*prompt, *ids[:cut]], ids[cut:]  # in the middle of a character
    text = decode_output(TOKENIZERS[name], prompt, ids)
    for number, place in enumerate(offsets(name, prompt, ids)):
        before = decode_output(TOKENIZERS[name], prompt, ids[:number])
        assert place == num_shared(before, text)


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "unigram"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_wrong_bytes_do_not_move_what_follows(name: str, data: st.DataObject) -> None:
    tokenizer, of = TOKENIZERS[name], BYTES[name]
    some = st.integers(0, len(tokenizer) - 1)
    ids = data.draw(st.lists(some, max_size=12))
    text = decode_output(tokenizer, [], ids)
    places = offsets(name, [], ids)
    assert places == sorted(places)
    for token_id, place in zip(ids, places, strict=True):
        own = of.text(token_id)
        if token_id in of.special_ids or "\ufffd" in own:
            assert place <= len(text)
        elif place:
            assert text[place : place + len(own)] == own


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "unigram"])
def test_parts_of_a_character_have_its_place(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    of = {BYTES[name](i): i for i in reversed(range(len(SPECIAL), len(tokenizer)))}
    ids = [of[bytes([byte])] for byte in "a\U0001f600b".encode()]
    assert offsets(name, [], ids) == [0, 1, 1, 1, 1, 2]
    assert offsets(name, [*ids[:3]], ids[3:]) == [0, 0, 1]
    assert offsets(name, [*ids[:3]], ids[5:]) == [0], "what stays incomplete is the prompt's"


def test_a_stripped_space_is_not_counted() -> None:
    for name in ("byte fallback", "unigram"):
        ids = TOKENIZERS[name].convert_tokens_to_ids(["▁a", "▁a"])
        assert decode_output(TOKENIZERS[name], [], ids) == "a a"
        assert offsets(name, [], [1, *ids])[1:] == [0, 1]
        assert offsets(name, ids, ids) == [0, 2]


def test_stripped_spaces_are_not_counted() -> None:
    """Where one token is several spaces, a decoder strips all of them."""
    ids = TOKENIZERS["unigram"].convert_tokens_to_ids(["▁▁", "<0x41>", "▁a"])
    assert decode_output(TOKENIZERS["unigram"], [], ids) == "A a"
    assert offsets("unigram", [], ids) == [0, 0, 1]


def test_special_tokens_count_where_they_show() -> None:
    ids: list[Any] = encoded("byte level", "ab")
    found = TextOffsets(BYTES["byte level"], [], skips_special=False, num_before=7)
    assert [found.push(i) for i in (1, ids[0], 2, ids[0])] == [7, 10, 12, 16]
