"""Incremental detokenization, with tokenizers whose tokens may end inside a character."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagespec.engine.text.detokenizer import Detokenizer, StopStringWatcher, decode_output
from tests.support.tokenizers import SPECIAL, byte_fallback, byte_level, text_of

FALLBACK, LEVEL = byte_fallback(), byte_level()
TEXT = st.text(st.sampled_from("ab é語😀\u0301\ufffd\U0001f468\u200d"), max_size=12)


def bytes_of(text: str) -> list[int]:
    """Ids of ``FALLBACK``, a byte each."""
    return [len(SPECIAL) + byte for byte in text.encode()]


def streamed(tokenizer: Any, prompt: list[int], output: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join([*map(detokenizer.push, output), detokenizer.flush()])


def num_shared(left: str, right: str) -> int:
    """Length of their longest common prefix."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))


def answer(tokenizer: Any, prompt: list[int], output: list[int]) -> str:
    """The definition: what follows in the text of both what it shares with the prompt's."""
    whole = text_of(tokenizer, prompt + output)
    return whole[num_shared(text_of(tokenizer, prompt), whole) :]


@st.composite
def token_lists(draw: st.DrawFn, tokenizer: Any) -> list[int]:
    """Valid texts, whole and as bytes, cut anywhere; wrong bytes; special tokens."""
    num_tokens = len(tokenizer)
    parts = st.one_of(
        TEXT.map(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]),
        st.tuples(TEXT.map(bytes_of), st.integers(0, 40), st.integers(0, 40)).map(
            lambda t: t[0][t[1] : -t[2] or None]
        ),
        st.lists(st.integers(0, num_tokens - 1), max_size=6),
        st.lists(st.sampled_from(bytes_of("😀é\ufffd")), max_size=6),
        st.integers(0, 9).map(lambda n: [1] * n),
    )
    return [i for part in draw(st.lists(parts, max_size=4)) for i in part]


@pytest.mark.parametrize("tokenizer", [FALLBACK, LEVEL], ids=["byte fallback", "byte level"])
@given(data=st.data())
def test_all_ways_to_the_text_agree_with_its_definition(
    tokenizer: Any, data: st.DataObject
) -> None:
    prompt, output = data.draw(token_lists(tokenizer)), data.draw(token_lists(tokenizer))
    expected = answer(tokenizer, prompt, output)
    assert streamed(tokenizer, prompt, output) == expected
    assert decode_output(tokenizer, prompt, output) == expected


@pytest.mark.parametrize("tokenizer", [FALLBACK, LEVEL], ids=["byte fallback", "byte level"])
@given(text=TEXT, cut=st.integers(0, 60))
@example(text="a" + "😀" * 9, cut=11)
@example(text="ab語é😀", cut=5)
def test_a_valid_text_is_never_spoiled(tokenizer: Any, text: str, cut: int) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt, output = ids[:cut], ids[cut:]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    begin = num_shared(text_of(tokenizer, prompt), whole)
    assert streamed(tokenizer, prompt, output) == whole[begin:]
    assert decode_output(tokenizer, prompt, output) == whole[begin:]


def test_a_character_that_is_cut_leaves_the_others_alone() -> None:
    """The tokenizer's own decode shows nothing but U+FFFD here."""
    output = bytes_of("日本")[:-1]
    assert set(FALLBACK.decode(output)) == {"\ufffd"}
    assert streamed(FALLBACK, [1], output) == "日\ufffd\ufffd"
    assert decode_output(FALLBACK, [1], output) == "日\ufffd\ufffd"


def test_two_answers_of_which_one_continues_the_other_add_up() -> None:
    ids = bytes_of("日本")
    assert decode_output(FALLBACK, ids[:4], ids[4:]) == "本", "it was begun by the prompt"
    assert decode_output(FALLBACK, ids[:4], bytes_of("é")) == "é", "it is the prompt's"


def test_each_token_costs_the_same_however_many_there_are() -> None:
    """Also where none of them is ever complete."""
    costs = [0]

    class Counting:
        __call__ = FALLBACK.__call__

        def decode(self, token_ids: list[int], **settings: Any) -> str:
            costs[-1] += 1 + len(token_ids)  # tokens, and the call
            return FALLBACK.decode(token_ids, **settings)

    for output in ([0xF3] * 2000, [1] * 2000, bytes_of("😀" * 500), [len(FALLBACK) - 3] * 2000):
        per_token: list[int] = []
        detokenizer = Detokenizer(Counting(), [1])
        for token_id in output:
            costs.append(0)
            detokenizer.push(token_id)
            per_token.append(costs[-1])
        assert max(per_token) < 200


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1))
def test_the_text_is_cut_before_the_first_stop_string(output: str, stops: list[str]) -> None:
    watcher = StopStringWatcher(Detokenizer(FALLBACK, []), stops)
    seen = ""
    for token, character in zip(bytes_of(output), output, strict=True):
        seen += character
        stopped = watcher(token)
        assert stopped == any(stop in seen for stop in stops)
        assert output.startswith("".join(watcher.settled_pieces))
        if stopped:
            break
    places = [seen.find(stop) for stop in stops if stop in seen]
    expected = seen[: min(places)] if places else seen
    settled = "".join(watcher.settled_pieces)
    assert watcher.finish() == expected
    assert expected.startswith(settled), "nothing that was streamed is taken back"


def test_a_stop_string_may_span_split_characters() -> None:
    watcher = StopStringWatcher(Detokenizer(FALLBACK, []), ["é!"])
    assert [watcher(token) for token in bytes_of("aé!")] == [False, False, False, True]
    assert watcher.finish() == "a"


def test_a_stop_string_is_found_in_what_was_kept_back() -> None:
    watcher = StopStringWatcher(Detokenizer(FALLBACK, []), ["\ufffd"])
    assert not any(watcher(token) for token in bytes_of("a\u00e9")[:-1])
    assert watcher.finish() == "a"
    assert watcher.is_stopped
