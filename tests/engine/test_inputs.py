"""What is refused at the door, and with which words."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, InvalidInputError, SamplingParams
from pagespec.engine.config import EngineConfig, check_objects
from pagespec.engine.inputs import PromptReader, pair_params, split_prompts
from pagespec.engine.policy import ARRIVALS_PER_PRIORITY, MAX_PRIORITY, Policy
from pagespec.engine.request import Request
from pagespec.engine.request_factory import RequestFactory
from tests.support.cli_fakes import FakeTokenizer

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
        ({"seed": 1 << 64}, "seed"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_sampling_params_name_field_and_value(kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**kwargs)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} = ")
    assert len(str(caught.value)) < 200


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
        ({"num_blocks": 1 << 70}, "num_blocks"),
        ({"max_num_seqs": HUGE, "max_num_batched_tokens": 4}, "max_num_seqs"),
        ({"memory_utilization": 1.5}, "memory_utilization"),
        ({"memory_utilization": True}, "memory_utilization"),
        ({"memory_utilization": math.nan}, "memory_utilization"),
        ({"memory_utilization": 0.5, "num_blocks": 4}, "memory_utilization"),
        ({"dtype": "int8"}, "dtype"),
        ({"compile": "maybe"}, "compile"),
        ({"device": "cpu:3"}, "device"),
        ({"device": "cuda:"}, "device"),
        ({"device": "cuda:-1"}, "device"),
        ({"device": "cuda:" + "9" * 5000}, "device"),
        ({"policy": "random"}, "policy"),
        ({"policy": []}, "policy"),
        ({"graph_batch_sizes": 5}, "graph_batch_sizes"),
        ({"graph_batch_sizes": b"a"}, "graph_batch_sizes"),
        ({"graph_batch_sizes": [1, 65]}, "graph_batch_sizes"),
        ({"load_format": "magic"}, "load_format"),
        ({"seed": 1 << 63}, "seed"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
    ],
)
def test_engine_settings_name_field_and_value(kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        EngineConfig(**kwargs)
    assert caught.value.field == field
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model", [None, 5, b"x", object(), math]),
        ("trace", [True, 1.5, [], "", b"t", "/no/x", "/", "t\0", "t" * 300, __file__ + "/t"]),
        ("check_invariants", ["no", 0, None]),
        ("on_logits", [5, "print"]),
    ],
)
def test_other_arguments_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, field: str, values: list[Any]
) -> None:
    def import_engine(device: str) -> None:
        pytest.fail("the engine is imported")

    monkeypatch.setattr("pagespec.llm.import_engine", import_engine)
    for value in values:
        with pytest.raises(InvalidInputError) as caught:
            LLM(**({"model": "m"} | {field: value}))
        assert (caught.value.field, caught.value.value) == (field, value)


def test_a_trace_path_is_not_touched_by_its_check(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    for path in (old, str(old), new, os.devnull):
        check_objects(model="m", trace=path, check_invariants=False, on_logits=print)
    assert old.read_text() == "kept"
    assert not new.exists()


def test_batch_sizes_are_kept_as_a_tuple() -> None:
    assert EngineConfig(graph_batch_sizes=[1, 2]).graph_batch_sizes == (1, 2)
    assert EngineConfig(graph_batch_sizes=range(1, 3)).for_gpu().graph_batch_sizes == (1, 2)


READER = PromptReader(None, vocab_size=10, max_model_len=5)
TEXT_READER = PromptReader(FakeTokenizer(), vocab_size=1 << 21, max_model_len=100)
SURROGATE = "a\ud800"  # JSON can spell it, UTF-8 cannot


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
        ({"prompt": [1]}, r"^prompt.prompt = \[1\]: must be text"),
        ({"prompt": None}, "^prompt.prompt = None: must be text"),
        ({"prompt": b"a"}, "^prompt.prompt = b'a': must be text"),
        ({"prompt_token_ids": "abc"}, "^prompt.prompt_token_ids = 'abc': must be a list of token"),
        ({"prompt_token_ids": b"abc"}, "^prompt.prompt_token_ids = b'abc': must be a list of"),
        ({"prompt_token_ids": None}, "^prompt.prompt_token_ids = None: must be a list of"),
        ({"prompt_token_ids": [1], "cache_salt": 3}, "must be text"),
        ({"prompt_token_ids": [1], "cache_salt": SURROGATE}, "cache_salt.*not Unicode"),
        (memoryview(b"a"), "must be text or a list"),
        *(
            ({"prompt_token_ids": [1], "priority": priority}, "prompt.priority.*from 0.* to 256")
            for priority in (-1, 257, HUGE, True, 1.0, "1", None)
        ),
    ],
)
def test_prompts_are_checked(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        READER.read(prompt)


@pytest.mark.parametrize("prompt", [{"prompt": [97]}, {"prompt_token_ids": "a"}])
def test_a_field_of_a_prompt_takes_one_kind_only(prompt: dict[str, Any]) -> None:
    """Also where the model has a tokenizer, and could read both."""
    with pytest.raises(InvalidInputError, match=f"^p.{next(iter(prompt))} = "):
        TEXT_READER.read(prompt, "p")


@pytest.mark.parametrize("prompt", [SURROGATE, {"prompt": SURROGATE}])
def test_lone_surrogates_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^p = .*is not Unicode text"):
        TEXT_READER.read(prompt, "p")
    with pytest.raises(InvalidInputError, match=r"^m = .*is not Unicode text"):
        TEXT_READER.read_messages([{"role": "user", "content": SURROGATE}], "m")
    assert TEXT_READER.read("a\U0001f600").token_ids == [97, 0x1F600]


def test_a_priority_reaches_the_request() -> None:
    factory = RequestFactory(
        None, vocab_size=10, eos_token_ids=frozenset(), max_model_len=5, seed=0
    )

    def request(prompt: dict[str, Any], seniority: int) -> Request:
        made = factory.make(READER.read({"prompt_token_ids": [1]} | prompt), SamplingParams())
        made.seniority = seniority
        return made

    policy = Policy("priority")
    least = request({"priority": MAX_PRIORITY}, 0)
    overtaken = MAX_PRIORITY * ARRIVALS_PER_PRIORITY
    assert least.priority == MAX_PRIORITY
    assert policy.max_overtakes == overtaken, "no smaller number would do the same"
    assert policy.rank(request({}, overtaken - 1)) < policy.rank(least)
    assert policy.rank(least) < policy.rank(request({"priority": 0}, overtaken))


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
        pair_params(["a", "b", "c"], params, params[0])
    assert pair_params(["a", "b"], None, params[0]) == params


@pytest.mark.parametrize("params", [5, 0, "", b"", {}])
def test_parameters_of_no_prompt_are_looked_at(params: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be a SamplingParams"):
        pair_params([], params, SamplingParams())
