"""Parameters about the answer's text, the prompt's length, and the finish reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagespec import InvalidInputError, SamplingParams
from pagespec.engine.inputs import PromptInput, PromptReader
from tests.engine.test_generation import (
    EOS,
    KINDS,
    LEVEL,
    PROMPT,
    SCRIPT,
    answers,
    serving_of,
    tokens,
)


def outcome(tokenizer: Any, script: list[int], **params: Any) -> tuple[str, Any, str | None]:
    """(text, stop reason, finish reason)"""
    sampling = SamplingParams(**{"max_tokens": len(script), "temperature": 0.0} | params)
    prompt = PromptInput(None, list(PROMPT))
    [whole] = serving_of(tokenizer, script).run([prompt], [sampling], use_tqdm=False)
    [completion] = whole.outputs
    return completion.text, completion.stop_reason, completion.finish_reason


@KINDS
@given(
    script=SCRIPT,
    stop=st.sampled_from([None, "a", "ab", "\ufffd", ["b", "ab"]]),
    stops_at=st.none() | st.integers(0, 8),
    min_tokens=st.integers(0, 4),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_all_ways_to_an_answer_give_one_text(
    tokenizer: Any,
    script: list[int],
    stop: Any,
    stops_at: int | None,
    min_tokens: int,
    flags: tuple[bool, bool],
) -> None:
    include, skip = flags
    stop_ids = None if stops_at is None else [script[stops_at % len(script)]]
    if stop_ids == [0]:  # the engine would know that none but a banned token was left
        min_tokens = 0
    found = answers(
        tokenizer,
        script,
        stop=stop,
        stop_token_ids=stop_ids,
        min_tokens=min(min_tokens, len(script)),
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
    )
    assert len({text for text, _, _ in found}) == 1


@KINDS
def test_a_stop_string_is_kept_if_asked_for_and_named(tokenizer: Any) -> None:
    script = tokens(tokenizer, "aébab")
    cut = {"stop": ["never", "ba"]}
    assert outcome(tokenizer, script, **cut) == ("aé", "ba", "stop")
    kept = outcome(tokenizer, script, **cut, include_stop_str_in_output=True)
    assert kept == ("aéba", "ba", "stop")


@KINDS
def test_a_stop_string_counts_from_min_tokens_on(tokenizer: Any) -> None:
    script = tokens(tokenizer, "a b b b")
    for min_tokens in range(1, len(script)):
        text, reason, _ = outcome(tokenizer, script, stop=" b", min_tokens=min_tokens)
        free = text_up_to(tokenizer, script, min_tokens)
        assert text.startswith(free[: len(text)])
        assert (text.count(" b") == free.count(" b")) or reason is None
    # Complete only behind min_tokens, it counts although it began before.
    pair = tokens(tokenizer, "éb")
    middle = len(pair) - 1
    assert outcome(tokenizer, pair, stop="éb", min_tokens=middle)[1] == "éb"
    assert outcome(tokenizer, pair, stop="éb", min_tokens=middle + 1)[1] is None


def text_up_to(tokenizer: Any, script: list[int], count: int) -> str:
    return outcome(tokenizer, script[:count])[0]


@KINDS
def test_what_ended_a_request(tokenizer: Any) -> None:
    stop = tokens(tokenizer, "b")[0]
    script = [*tokens(tokenizer, "a"), stop]
    assert outcome(tokenizer, script, stop_token_ids=[stop]) == ("a", stop, "stop")
    assert outcome(tokenizer, script)[1:] == (None, "length")
    ended = [*tokens(tokenizer, "a"), EOS]
    assert outcome(tokenizer, ended) == ("a", None, "stop")
    assert outcome(tokenizer, ended, stop_token_ids=[EOS])[1] is None
    assert outcome(tokenizer, ended, ignore_eos=True, stop_token_ids=[EOS])[1] == EOS


@KINDS
def test_special_tokens_and_stop_tokens_have_text_if_asked_for(tokenizer: Any) -> None:
    script = [*tokens(tokenizer, "a"), EOS]
    shown = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert outcome(tokenizer, script, ignore_eos=True)[0] == "a"
    assert outcome(tokenizer, script, ignore_eos=True, **shown)[0] == "a</s>"
    assert outcome(tokenizer, script, **shown)[0] == "a", "it ended the request"
    assert outcome(tokenizer, script, **shown, include_stop_str_in_output=True)[0] == "a</s>"
    for stop in (None, "never"):
        plain = outcome(
            tokenizer,
            [*tokens(tokenizer, "ab")],
            stop=stop,
            stop_token_ids=tokens(tokenizer, "ab")[-1:],
            include_stop_str_in_output=True,
        )
        assert plain[0] == "ab"


def test_spaces_between_special_tokens_are_refused_where_there_are_any() -> None:
    class Spaced:
        all_special_tokens = ("</s>",)

        def convert_tokens_to_ids(self, token: str) -> int:
            return EOS

        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join("</s>" for _ in ids)

        def __len__(self) -> int:
            return 9

    params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    with pytest.raises(InvalidInputError, match=r"^spaces_between_special_tokens = False"):
        serving_of(Spaced(), [1])._factory.make(PromptInput(None, [1]), params)


@KINDS
def test_an_answer_without_text(tokenizer: Any) -> None:
    script = tokens(tokenizer, "ab")
    assert outcome(tokenizer, script, detokenize=False) == ("", None, "length")
    params = SamplingParams(detokenize=False)
    with pytest.raises(InvalidInputError, match=r"^detokenize = False"):
        serving_of(tokenizer, script).stream(PromptInput(None, [1]), params, tokenizer)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_a_stream_of_text_refuses_log_probabilities(name: str) -> None:
    params = SamplingParams(**{name: 0})
    with pytest.raises(InvalidInputError, match=f"^{name} = 0"):
        serving_of(LEVEL, [1]).stream(PromptInput(None, [1]), params, LEVEL)


def test_a_prompt_is_cut_to_its_end() -> None:
    reader = PromptReader(LEVEL, len(LEVEL), max_model_len=8)
    ids = list(range(3, 23))
    with pytest.raises(InvalidInputError, match="at most 7 tokens"):
        reader.read(ids)
    assert reader.read(ids, truncate=3).token_ids == [20, 21, 22]
    assert reader.read(ids, truncate=-1).token_ids == ids[-7:]
    assert reader.read(ids[:2], truncate=3).token_ids == ids[:2]
    with pytest.raises(InvalidInputError, match="at most 7 tokens"):
        reader.read(ids, truncate=8)
    text = reader.read("abababab", truncate=2)
    assert (text.text, text.token_ids) == ("abababab", tokens(LEVEL, "abababab")[-2:])
    again = reader.read_or_keep(reader.read([1, 2, 3]), truncate=2)
    assert again.token_ids == [2, 3]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": [999_999]}, "stop_token_ids"),
        ({"allowed_token_ids": [999_999]}, "allowed_token_ids"),
        ({"logit_bias": {999_999: 1}}, "logit_bias"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": tokens(LEVEL, "b"), "bad_words": ["b"]}, "allowed_token_ids"),
    ],
)
def test_what_does_not_suit_the_model_is_refused(params: dict[str, Any], field: str) -> None:
    factory = serving_of(LEVEL, [1])._factory
    factory._encode = lambda text: tokens(LEVEL, text)
    with pytest.raises(InvalidInputError, match=f"^{field} = "):
        factory.make(PromptInput(None, [1]), SamplingParams(**params))


def test_bad_words_are_tokens_with_and_without_a_space() -> None:
    factory = serving_of(LEVEL, [1])._factory
    prompt = PromptInput(None, [1])
    with pytest.raises(InvalidInputError, match=r"^bad_words = .*no tokenizer"):
        factory.make(prompt, SamplingParams(bad_words=["a"]))
    factory._encode = lambda text: tokens(LEVEL, text)
    [request] = factory.make(prompt, SamplingParams(bad_words=[" a", "bb"]))
    edits = request.info.edits
    assert edits is not None
    # " a" is one token, as "a" is; " bb" has one more than "bb", and is left to "bb".
    assert edits.bad_words == tuple(tuple(tokens(LEVEL, word)) for word in ("a", " a", "bb"))
    assert edits.needs_history
    assert factory.make(prompt, SamplingParams())[0].info.edits is None
