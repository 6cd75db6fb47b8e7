"""What is refused at the door, and with which words."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.engine.config import EngineConfig
from pagespec.engine.inputs import PromptReader, pair_params, split_prompts


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_sampling_params_name_field_and_value(kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**kwargs)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} = ")


def test_an_unknown_sampling_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="presence_penalty"):
        SamplingParams(presence_penalty=1.0)  # type: ignore[call-arg]


def test_sampling_params_are_frozen_and_normalised() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3])
    assert params.stop_strings == ("x",)
    assert params.stop_token_ids == (3,)
    with pytest.raises(AttributeError):
        params.temperature = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"memory_utilization": 1.5}, "memory_utilization"),
        ({"memory_utilization": 0.5, "num_blocks": 4}, "memory_utilization"),
        ({"dtype": "int8"}, "dtype"),
        ({"compile": "maybe"}, "compile"),
        ({"policy": "random"}, "policy"),
        ({"load_format": "magic"}, "load_format"),
        ({"seed": 1 << 63}, "seed"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
    ],
)
def test_engine_settings_name_field_and_value(kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        EngineConfig(**kwargs)
    assert caught.value.field == field


READER = PromptReader(None, vocab_size=10, max_model_len=5)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "must not be empty"),
        ([1, 2, 3, 4, 5], "5 tokens.*at most 4"),
        ([10], "from 0 to 9"),
        ([-1], "from 0 to 9"),
        ([1.0], "from 0 to 9"),
        ("text", "no tokenizer"),
        (b"bytes", "must be text or a list"),
        ({}, "either 'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": [1], "multi_modal_data": 1}, "at most 'cache_salt'"),
        ({"prompt_token_ids": [1], "cache_salt": 3}, "must be text"),
    ],
)
def test_prompts_are_checked(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        READER.read(prompt)


def test_prompts_of_all_shapes() -> None:
    assert READER.read([1, 2]).token_ids == [1, 2]
    assert READER.read({"prompt_token_ids": [1], "cache_salt": "a"}).cache_salt == b"a"
    assert split_prompts("a") == ["a"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([[1], "b"]) == [[1], "b"]
    assert split_prompts([]) == []
    with pytest.raises(InvalidInputError):
        split_prompts(5)


def test_unequal_lists_are_refused() -> None:
    params = [SamplingParams()] * 2
    with pytest.raises(InvalidInputError, match="2 given for 3 prompts"):
        pair_params(["a", "b", "c"], params, None)
    assert pair_params(["a", "b"], None, params[0]) == params
