"""Sampling parameters that are rejected, and their error messages."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.engine.sampling_params import (
    UNSUPPORTED,
    RequestOutputKind,
    SamplingType,
    UnsupportedParams,
)

ROOT = Path(__file__).resolve().parents[2]


def pickle_copy(params: SamplingParams) -> SamplingParams:
    again: SamplingParams = pickle.loads(pickle.dumps(params))
    return again


HUGE = 10**400  # too large for a float, and too long for a message


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": HUGE}, "temperature"),
        ({"temperature": -HUGE}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": HUGE}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": HUGE}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": b""}, "stop"),
        ({"stop": bytearray()}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
        ({"stop_token_ids": bytearray(b"a")}, "stop_token_ids"),
        ({"stop_token_ids": memoryview(b"a")}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1 << 20}, "n"),
        ({"n": 2, "temperature": 0.0}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 3, "temperature": 0.0}, "best_of"),
        ({"best_of": "x"}, "best_of"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-11}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": HUGE}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {1: 100.1}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: 1, "1": 2}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range((1 << 18) + 1), 1)}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["a", " "]}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": ["a"] * 1001}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": True}, "min_tokens"),
        ({"logits_processors": [5]}, "logits_processors"),
        ({"logits_processors": print}, "logits_processors"),
        ({"stop": "a", "detokenize": False}, "stop"),
        ({"detokenize": 0}, "detokenize"),
        ({"skip_special_tokens": None}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": False}, "logprobs"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs"),
        ({"output_kind": 3}, "output_kind"),
        ({"output_kind": "DELTA"}, "output_kind"),
        ({"flat_logprobs": 1}, "flat_logprobs"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        ({"logprob_token_ids": [3], "logprobs": 2}, "logprobs"),
        ({"stop": ["a"] * 1025}, "stop"),
        ({"skip_reading_prefix_cache": False, "prompt_logprobs": 1}, "skip_reading_prefix_cache"),
    ],
)
def test_sampling_params_name_field_and_value(kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**kwargs)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} = ")
    assert len(str(caught.value)) < 200


def test_an_unknown_sampling_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="presence_penality"):
        SamplingParams(presence_penality=1.0)  # type: ignore[call-arg]


def test_sampling_params_are_normalised() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3])
    assert params.stop_strings == ("x",)
    several = SamplingParams(stop=["x", "y"])
    assert several == SamplingParams(stop=("x", "y"))
    assert hash(several) == hash(replace(several))
    assert params.stop_token_ids == [3]


def test_an_assignment_is_validated_like_the_constructor() -> None:
    params = SamplingParams()
    params.max_tokens = 20
    params.stop = ["x", "y"]
    assert params == SamplingParams(max_tokens=20, stop=("x", "y"))
    assert params.stop_strings == ("x", "y")
    for name, value in (("temperature", -1.0), ("min_tokens", -1), ("guided_decoding", "a")):
        with pytest.raises(InvalidInputError, match=f"^{name} = "):
            setattr(params, name, value)
    with pytest.raises(AttributeError, match="did you mean max_tokens"):
        params.max_token = 5  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        params.stop_strings = ()
    assert params == SamplingParams(max_tokens=20, stop=("x", "y"))


def test_fields_that_limit_each_other_may_be_assigned_in_any_order() -> None:
    params = SamplingParams()
    params.min_tokens = 30
    with pytest.raises(InvalidInputError, match="min_tokens must be less than or equal to max_"):
        params.frozen()
    params.max_tokens = 40
    assert params.frozen() == SamplingParams(min_tokens=30, max_tokens=40)
    params = SamplingParams(n=2)
    params.temperature = 0.0
    with pytest.raises(InvalidInputError, match="n must be 1 when using greedy sampling"):
        params.frozen()
    params.n = 1
    assert params.frozen().sampling_type is SamplingType.GREEDY


def test_positional_arguments_have_the_order_of_vllm() -> None:
    named = {
        "n": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.3,
        "seed": 7,
        "stop": ["a"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 4,
        "logprobs": 1,
        "prompt_logprobs": 2,
        "logprob_token_ids": [8],
    }
    given: Any = tuple(named.values())
    assert SamplingParams(*given) == SamplingParams(**named)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SamplingParams(*given, None)


@pytest.mark.parametrize("copied", [SamplingParams.clone, copy.copy, copy.deepcopy, pickle_copy])
def test_copies_are_equal_and_independent(
    copied: Callable[[SamplingParams], SamplingParams],
) -> None:
    params = SamplingParams(logit_bias={3: 1.0}, stop=["a"], output_kind=RequestOutputKind.DELTA)
    again = copied(params)
    assert again == params
    assert repr(again) == repr(params)
    again.max_tokens = 99
    assert params.max_tokens == 16
    again = params.frozen().clone()
    again.logit_bias[3] = 2.0  # type: ignore[index]
    assert params.logit_bias == {3: 1.0}


def test_a_bias_that_is_changed_in_place_is_checked_and_does_not_change_a_request() -> None:
    params = SamplingParams(logit_bias={3: 1.0})
    frozen = params.frozen()
    bias: Any = params.logit_bias
    bias[4] = 1000.0
    assert frozen.logit_bias == {3: 1.0}
    with pytest.raises(InvalidInputError, match=r"^logit_bias = 1000"):
        params.frozen()


def test_numbers_of_numpy_are_kept_as_those_of_python() -> None:
    np = pytest.importorskip("numpy")
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        top_k=np.int64(3),
        max_tokens=np.int32(7),
        stop_token_ids=[np.int64(5)],
        logit_bias={np.int64(4): np.float32(0.5)},
        truncate_prompt_tokens=np.uint8(9),
    )
    assert repr(params) == repr(
        SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=3,
            max_tokens=7,
            stop_token_ids=[5],
            logit_bias={4: 0.5},
            truncate_prompt_tokens=9,
        )
    )
    for name, value in (("top_k", np.float32(3)), ("max_tokens", np.bool_(True))):
        with pytest.raises(InvalidInputError, match=f"^{name} = "):
            SamplingParams(**{name: value})


def test_values_of_vllm_stand_for_ours() -> None:
    given = SamplingParams(seed=-1, logprobs=True, prompt_logprobs=True, output_kind=2)  # type: ignore[arg-type]
    assert given.seed is None
    assert (given.logprobs, given.num_logprobs, given.prompt_logprobs) == (1, 1, 1)
    assert given.output_kind is RequestOutputKind.FINAL_ONLY
    assert SamplingParams(logprobs=-1, max_tokens=1).logprobs == -1
    assert SamplingParams(extra_args={}, thinking_token_budget=-1) == SamplingParams()
    assert SamplingParams(stop_token_ids=[4, 5, 4]).all_stop_token_ids == {4, 5}
    assert SamplingParams(seed=1).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams().sampling_type is SamplingType.RANDOM


def test_from_optional_takes_none_for_defaults_and_clips_biases() -> None:
    given = SamplingParams.from_optional(
        n=None, temperature=None, max_tokens=None, top_p=0.5, logit_bias={"3": 1000, 4: -200.0}
    )
    assert given == SamplingParams(max_tokens=None, top_p=0.5, logit_bias={3: 100.0, 4: -100.0})
    with pytest.raises(InvalidInputError, match=r"^logit_bias"):
        SamplingParams.from_optional(logit_bias={"a": 1})
    with pytest.raises(InvalidInputError, match=r"^logit_bias = 'x'"):
        SamplingParams.from_optional(logit_bias={3: "x"})


def test_an_assignment_does_not_change_a_request() -> None:
    params = SamplingParams(max_tokens=5)
    frozen = params.frozen()
    assert frozen == params
    assert frozen.frozen() is frozen
    params.max_tokens = 7
    assert frozen.max_tokens == 5
    assert hash(params) == hash(SamplingParams(max_tokens=7))
    with pytest.raises(FrozenInstanceError, match=r"dataclasses\.replace"):
        frozen.max_tokens = 9
    assert not replace(frozen).is_frozen


def test_lists_and_dicts_may_be_changed_in_place() -> None:
    params = SamplingParams(stop="x", allowed_token_ids=[4], logit_bias={3: 1.0})
    frozen, copied = params.frozen(), params.clone()
    params.stop.append("y")
    params.stop_token_ids.extend([7])
    params.bad_words.append("a")
    params.allowed_token_ids.append(5)
    params.logit_bias[9] = 2.0
    params.logits_processors.append(print)
    changed = SamplingParams(
        stop=["x", "y"],
        stop_token_ids=[7],
        bad_words=["a"],
        allowed_token_ids=[4, 5],
        logit_bias={3: 1.0, 9: 2.0},
        logits_processors=[print],
    )
    assert params == params.frozen() == changed
    assert frozen == copied == SamplingParams(stop="x", allowed_token_ids=[4], logit_bias={3: 1.0})
    for name, value in (("stop", ""), ("stop_token_ids", -1), ("bad_words", 3)):
        wrong = params.clone()
        getattr(wrong, name).append(value)
        with pytest.raises(InvalidInputError, match=f"^{name} = "):
            wrong.frozen()


def test_values_are_normalised() -> None:
    bias = {"3": 1, 5: -2.5}
    params = SamplingParams(logit_bias=bias, bad_words=["a", "b", "a"], allowed_token_ids=[4, 2])
    bias.clear()
    assert params.logit_bias == {3: 1.0, 5: -2.5}
    assert params.bad_words == ["a", "b"]
    assert params.allowed_token_ids == [4, 2]
    assert params == replace(params)
    assert hash(params) == hash(replace(params))
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_refused_by_name_and_accepted_at_its_default(name: str) -> None:
    [default] = [f.default for f in fields(UnsupportedParams) if f.name == name]
    assert SamplingParams(**{name: default}) == SamplingParams()
    for value in (2, "x", {"a": 1}, [1], object()):
        with pytest.raises(InvalidInputError, match=f"^{name} = .* is not supported") as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name


def test_the_tables_of_the_documentation_are_the_fields() -> None:
    text = (ROOT / "docs/sampling_parameters.md").read_text()
    supported, refused = text[text.index("## Supported") :].split("## Refused")
    known = {f.name for f in fields(SamplingParams) if f.init}
    rows = [re.findall(r"^\| `(\w+)` \|(.*)\|$", part, re.M) for part in (supported, refused)]
    assert {name for name, _ in rows[0]} == known - UNSUPPORTED
    assert {name for name, _ in rows[1]} == UNSUPPORTED
    assert len(rows[0]) + len(rows[1]) == len(known)
    for _, rest in rows[0]:
        [path] = re.findall(r"`(tests/[\w/.]+)`", rest)
        assert (ROOT / path).is_file()
    defaults = {f.name: f.default for f in fields(UnsupportedParams)}
    for name, rest in rows[1]:
        assert rest.split("|")[0].strip() == repr(defaults[name])
