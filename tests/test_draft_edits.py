"""`LLM(speculative_config=...)`, requests that edit logits: the same outputs as without it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pagespec import LLM, RequestError, SamplingParams
from pagespec.engine.drafting.costs import StepCosts
from pagespec.runner.cpu import platform as cpu_platform
from tests.support.captures import capture_once
from tests.support.models import tiny_model

PROMPTS = [[3, 4, 5, 6] * 4, list(range(20, 50)), [9], [*range(60, 70), *range(60, 70)]]


def shifted(output: list[int], row: torch.Tensor) -> torch.Tensor:
    return row.roll(len(output) % 3)


# Few allowed tokens, so that outputs repeat and draft tokens are often right.
FEW = list(range(100, 104))
ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.05, "allowed_token_ids": FEW},
    {"presence_penalty": 0.1, "frequency_penalty": 0.01, "allowed_token_ids": FEW},
    {"logit_bias": dict.fromkeys(FEW, 20.0), "temperature": 0.8},
    {"allowed_token_ids": FEW, "temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "n": 3},
    {"allowed_token_ids": FEW, "temperature": 1.2, "n": 2, "best_of": 4},
    {"min_tokens": 12, "stop_token_ids": FEW[:1], "allowed_token_ids": FEW},
    {"logits_processors": [shifted], "allowed_token_ids": FEW},
    {"prompt_logprobs": 2, "allowed_token_ids": FEW, "top_k": 2, "temperature": 0.5},
]


@pytest.fixture(autouse=True)
def _free_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens cost nothing, so their number does not depend on the load of the machine."""
    capture_once(monkeypatch)
    monkeypatch.setattr(cpu_platform, "measure_costs", lambda *_: StepCosts([(1, 1.0), (99, 1.0)]))


@cache
def llm(method: str, arch: str = "llama", **settings: Any) -> LLM:
    config = {"method": method, "num_speculative_tokens": 4} if method else None
    layers = {"num_hidden_layers": 1} if arch == "llama" else {}
    return LLM(
        tiny_model(arch, **layers),
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        speculative_config=config,
        check_invariants=True,
        **settings,
    )


def seen(llm: LLM) -> list[Any]:
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "seed": 5, "logprobs": 2} | asked)
        for asked in ASKED
        for _ in PROMPTS
    ]
    outputs = llm.generate(PROMPTS * len(ASKED), params, use_tqdm=False)
    return [
        (
            [
                (a.token_ids, a.finish_reason, a.cumulative_logprob, list(a.logprobs or ()))
                for a in output.outputs
            ],
            output.prompt_logprobs and list(output.prompt_logprobs),
        )
        for output in outputs
    ]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize(
    ("arch", "method"), [("llama", "ngram"), ("llama", "suffix"), ("granitemoehybrid", "ngram")]
)
def test_outputs_do_not_depend_on_draft_tokens(arch: str, method: str, mode: str) -> None:
    drafted = llm(method, arch, logprobs_mode=mode)
    counts = drafted.engine.scheduler.draft_counts
    before = counts.num_accepted_tokens
    assert seen(drafted) == seen(llm("", arch, logprobs_mode=mode))
    assert counts.num_accepted_tokens > before + 100
    assert counts.num_draft_tokens > counts.num_accepted_tokens


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_scores_do_not_depend_on_draft_tokens(method: str) -> None:
    assert llm(method).score(PROMPTS) == llm("").score(PROMPTS)


def test_a_function_that_fails_behind_draft_tokens_is_reported() -> None:
    def failing(output: list[int], row: torch.Tensor) -> torch.Tensor:
        if len(output) == 9:
            raise KeyError("ninth")
        return row.index_fill(0, torch.tensor([7]), 1e4)

    params = SamplingParams(max_tokens=20, ignore_eos=True, logits_processors=[failing])
    drafted = llm("ngram")
    with pytest.raises(RequestError, match="logits_processors: KeyError: 'ninth'"):
        drafted.generate([7] * 8, params, use_tqdm=False)
    assert drafted.generate(PROMPTS[0], SamplingParams(max_tokens=2), use_tqdm=False)
