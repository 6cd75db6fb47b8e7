"""``speculative_config``: its forms, its refusals, and the numbers of draft tokens by cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagespec import InvalidInputError
from pagespec.engine.config import EngineConfig
from pagespec.engine.drafting.config import METHODS, MODEL_METHODS, SpeculativeConfig, speculative
from pagespec.engine.drafting.costs import (
    DEFAULT_COSTS,
    NUM_RATES,
    StepCosts,
    choose_numbers,
)
from pagespec.engine.runner import MAX_DRAFT_TOKENS


def checked(value: Any) -> SpeculativeConfig | None:
    return EngineConfig(speculative_config=value).speculation


@pytest.mark.parametrize("method", METHODS)
def test_a_dict_and_its_json_text_give_one_config(method: str) -> None:
    given = {"method": method, "num_speculative_tokens": 3}
    config = SpeculativeConfig(method=method, num_speculative_tokens=3)
    assert checked(given) == checked(json.dumps(given)) == checked(config) == config
    assert hash(EngineConfig(speculative_config=given)) is not None
    again = EngineConfig(**EngineConfig(speculative_config=given).arguments())
    assert again.speculation == config
    # Ranks get it as JSON: it determines the sizes of steps on a GPU.
    sent = json.loads(json.dumps(EngineConfig(speculative_config=given).build_arguments()))
    assert EngineConfig(**sent).speculation == config


@pytest.mark.parametrize(
    "given",
    [
        {"model": "ngram"},
        {"model": "[ngram]", "method": None},
        {"method": "[ngram]"},
        {"method": "ngram", "model": "ngram"},
        {"method": "[ngram]", "model": "[ngram]"},
    ],
)
def test_ngram_may_be_named_as_a_model(given: Any) -> None:
    assert checked(given | {"num_speculative_tokens": 3}) == SpeculativeConfig(
        method="ngram", num_speculative_tokens=3
    )


def test_keys_of_vllm_without_effect_are_accepted() -> None:
    given = {
        "method": "draft_model", "model": "m", "enforce_eager": False, "max_model_len": 512,
        "parallel_drafting": False, "use_heterogeneous_vocab": False,
        "disable_padded_drafter_batch": True, "rejection_sample_method": "standard",
    }  # fmt: skip
    assert checked(given) == checked({"method": "draft_model", "model": "m"})
    assert checked({"parallel_drafting": False}) is None


def test_every_key_is_sent_to_ranks() -> None:
    given = {
        "method": "draft_model", "model": "m", "quantization": "fp8", "num_speculative_tokens": 2
    }  # fmt: skip
    config = EngineConfig(speculative_config=given)
    sent = json.loads(json.dumps(config.build_arguments()))
    assert EngineConfig(**sent).speculation == config.speculation


@pytest.mark.parametrize("value", [None, {}, "{}"])
def test_an_empty_config_is_none(value: Any) -> None:
    assert EngineConfig(speculative_config=value) == EngineConfig()


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (2, 4)),
        ({"prompt_lookup_max": 6}, (2, 6)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 6}, (6, 6)),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": None}, (2, 4)),
    ],
)
def test_the_lengths_of_ngrams_have_defaults(given: Any, lengths: tuple[int, int]) -> None:
    config = checked({"method": "ngram", **given})
    assert config is not None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lengths


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "speculative_config = '{': is not JSON"),
        ("[1]", r"speculative_config = '\[1\]': must be a dict"),
        (3, "speculative_config = 3: must be a dict or JSON"),
        ({"num_speculative_tokens": 2}, "speculative_config.method = None: must be one of ngram"),
        ({"method": "medusa", "model": "m"}, "= 'medusa': must be .*; medusa is not supported yet"),
        ({"method": "eagle"}, "eagle is not supported yet"),
        ({"method": "draft_model"}, r"speculative_config.model = None: must be the folder or hub"),
        ({"method": "eagle3", "model": 3}, "model = 3: must be the folder or hub id"),
        ({"method": "mtp", "model": "m"}, "must be absent: with method mtp, the target model has"),
        (
            {"method": "mtp", "draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size = 2: must be 1 or absent",
        ),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "must be 1 or absent"),
        ({"method": ["ngram"]}, "method = .'ngram'.: must be one of"),
        ({"method": "n-gram"}, "must be one of ngram, suffix, prediction"),
        ({"metod": "ngram"}, "metod = 'ngram': there is no such key; did you mean method"),
        ({"method": "ngram", "model": "m"}, "model = 'm': must be absent: with method ngram, no "),
        (
            {"method": "suffix", "model": "ngram"},
            "model = 'ngram': must be absent: with method suf",
        ),
        ({"model": "m"}, "speculative_config.method = None: must be one of ngram"),
        (
            {"method": "ngram", "enforce_eager": True},
            "^speculative_config.enforce_eager = True: is not supported: use enforce_eager of",
        ),
        ({"method": "mtp", "parallel_drafting": True}, "one token after the other"),
        ({"rejection_sample_method": "block"}, "'block': is not supported: a draft token is acc"),
        ({"method": "ngram", "drafter": "m"}, "there is no such key: its keys are method"),
        ({"method": "ngram", "quantization": "fp8"}, "quantization = 'fp8': must be absent: with "),
        ({"method": "mtp", "quantization": "awq"}, "'awq': must be fp8, or absent for the check"),
        ({"method": "mtp", "quantization": 8}, "config.quantization = 8: must be fp8, or absent"),
        ({"method": "mtp", "quantization": ["fp8"]}, r"\['fp8'\]: must be fp8, or absent"),
        (
            {"method": "ngram", "prompt_lookup": 3},
            "did you mean prompt_lookup_min or prompt_lookup_max",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must be an integer of 1 or more"),
        ({"method": "ngram", "num_speculative_tokens": MAX_DRAFT_TOKENS + 1}, "at most 16"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be an integer"),
        ({"method": "ngram", "prompt_lookup_max": "4"}, "prompt_lookup_max = '4': must be an int"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "prompt_lookup_max = 2: must be at least prompt_lookup_min = 4",
        ),
        ({"method": "suffix", "prompt_lookup_max": 4}, "must be absent: method suffix"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        checked(value)


@pytest.mark.parametrize(
    ("max_num_seqs", "num_drafts", "num_samples"),
    [(1, 4, 5), (32, 4, 160), (64, 4, 256), (256, 4, 256), (300, 1, 300)],
)
def test_samples_per_step_with_draft_tokens(
    max_num_seqs: int, num_drafts: int, num_samples: int
) -> None:
    given = {"method": "ngram", "num_speculative_tokens": num_drafts}
    config = EngineConfig(max_num_seqs=max_num_seqs, speculative_config=given)
    assert config.num_samples_per_step == num_samples
    assert EngineConfig(max_num_seqs=max_num_seqs).num_samples_per_step == max_num_seqs


def test_methods_with_a_model_have_defaults() -> None:
    given = {"draft_model": {"model": "m"}, "mtp": {}, "eagle3": {"model": "m"}}
    configs = [speculative("x", {"method": name, **given[name]}) for name in MODEL_METHODS]
    numbers = [(c.num_speculative_tokens, c.model, c.has_model) for c in configs if c is not None]
    assert numbers == [(5, "m", True), (3, None, True), (5, "m", True)]
    chosen = {"method": "mtp", "num_speculative_tokens": 1, "draft_tensor_parallel_size": 1}
    assert speculative("x", chosen) == SpeculativeConfig(method="mtp", num_speculative_tokens=1)


@pytest.mark.parametrize("method", MODEL_METHODS)
def test_weights_of_a_drafter_have_a_quantization_of_their_own(method: str) -> None:
    given = {"method": method} | ({} if method == "mtp" else {"model": "m"})
    for name in ("fp8", None):
        config = checked(json.dumps({**given, "quantization": name}))
        assert config is not None
        assert config.quantization == name
    config = EngineConfig(speculative_config={**given, "quantization": "fp8"})
    assert config.quantization is None
    assert EngineConfig(**config.arguments()).speculation == config.speculation
    assert not SpeculativeConfig(method="ngram").has_model


# Costs --------------------------------------------------------------------------------------------


def best(costs: StepCosts, num_rows: int, rate: float, most: int) -> int:
    """The number of draft tokens of each row, where all have the same rate."""
    level = int(rate * NUM_RATES)
    shares = [0.0] * (NUM_RATES + 1)
    shares[level] = num_rows
    return choose_numbers(costs, shares, num_rows, 0, most)[level]


def test_draft_tokens_that_are_computed_twice_cost_more() -> None:
    measured = [(1, 1.0), (101, 101.0)]  # in proportion to the tokens
    flat = [(1, 1.0), (3, 1.0), (101, 99.0)]
    for given, once, twice in ((measured, 0, 0), (flat, 2, 1)):
        assert best(StepCosts(given), 1, 0.9, 4) == once
        assert best(StepCosts(given, computes_again=True), 1, 0.9, 4) == twice


def test_costs_are_interpolated_and_grow_beyond_the_last() -> None:
    costs = StepCosts([(1, 1.0), (3, 2.0), (5, 1.5), (9, 10.0)])
    assert [costs.of(n) for n in (1, 2, 3)] == [1.0, 1.5, 2.0]
    assert costs.of(5) == 2.0  # a longer step is never cheaper
    assert costs.of(7) == 6.0
    assert costs.of(10) == pytest.approx(12.0)  # 2 per token, as between 5 and 9
    flat = StepCosts([(1, 1.0), (4, 1.0)])
    assert flat.of(8) == pytest.approx(2.0)  # at least in proportion


def test_the_number_follows_acceptance_and_rows() -> None:
    flat = StepCosts([(1, 1.0), (1000, 1.0)])
    assert best(flat, 1, 1.0, 8) == 8
    assert best(flat, 1, 0.0, 8) == 0
    linear = StepCosts([(1, 1.0), (1000, 1000.0)])
    assert best(linear, 1, 0.99, 8) == 0  # a token that costs as much as a step is never worth it
    numbers = [best(DEFAULT_COSTS, rows, 0.8, 8) for rows in (1, 4, 16, 64)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] >= 6
    by_rate = [best(DEFAULT_COSTS, 4, rate / 10, 8) for rate in range(11)]
    assert by_rate == sorted(by_rate)
    assert by_rate[0] == 0


def test_a_number_is_never_a_loss_by_the_table() -> None:
    for rows in range(1, 40):
        for rate in (0.0, 0.2, 0.5, 0.8, 1.0):
            k = best(DEFAULT_COSTS, rows, rate, 16)
            expected = sum(rate**j for j in range(k + 1))
            plain = rows / DEFAULT_COSTS.of(rows)
            assert rows * expected / DEFAULT_COSTS.of(rows * (k + 1)) >= plain
