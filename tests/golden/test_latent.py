"""Models with latent attention (MLA) match Hugging Face `generate` under all golden conditions.

Their latent vectors are cached. :mod:`.test_golden` tests deepseek_v3 and :mod:`.test_recurrent`
tests kimi_linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagespec import LLM, SamplingParams
from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.lowering.invariant_calls import InvariantCalls
from pagespec.verify import run_gate
from tests.golden.harness import Condition, check, mixed_prompts
from tests.golden.subjects import GATE_SIZE, tiny, tiny_runs
from tests.support.captures import capture_once
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.tiny_configs import LATENT

_Captured = list[CapturedModel]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> _Captured:
    """All captured models, one per model and setting."""
    return capture_once(monkeypatch)


@pytest.mark.parametrize(("arch", "condition"), tiny_runs(LATENT, by_day="deepseek_v2"))
def test_latent_models_equal_generate(arch: str, condition: Condition, captured: _Captured) -> None:
    subject, reference = tiny(arch)
    check(subject.run(condition, reference), condition)
    assert all(spec.is_latent for model in captured for spec in model.specs)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("deepseek_v3", torch.float32),
        pytest.param("deepseek_v3", torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param("minicpm3", torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_answers_do_not_depend_on_the_schedule(
    arch: str, dtype: torch.dtype, captured: _Captured
) -> None:
    report = run_gate(_maker(tiny_model(arch).to(dtype)), **_GATE)
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert report.is_transparent, report.idle
    assert report.num_hit_blocks > 100
    assert report.num_preemptions >= GATE_SIZE.num_tokens
    # The gate sees differences where there are some. bfloat16 rounds most of them away.
    assert report.has_power or dtype == torch.bfloat16
    graphs = [model for model in captured if model.graph is not None]  # but for the eager control
    assert all(spec.is_latent for model in graphs for spec in model.specs)


def test_the_gate_sees_matmuls_of_heads_that_follow_the_batch(
    captured: _Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InvariantCalls, "head_recipe", lambda *_: None)
    model = tiny_model("deepseek_v3", kv_lora_rank=200, qk_nope_head_dim=200)
    size = replace(GATE_SIZE, neighbour_lengths=(1,), cuts=(3,), both_overlaps=False)
    report = run_gate(_maker(model), **{**_GATE, "size": size}, with_control=False)
    assert captured
    assert report.num_different > 0


_GATE: dict[str, Any] = {"vocabulary": VOCAB_SIZE, "block_size": 8, "size": GATE_SIZE}


def _maker(model: Any) -> Callable[..., LLM]:
    return lambda **settings: LLM(model, device="cpu", check_invariants=True, **settings)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_continuations_of_one_prompt_share_its_blocks(
    kv_cache_dtype: str, captured: _Captured
) -> None:
    """A partly filled block of the prompt is copied for each continuation. Answers equal those of
    separate requests."""
    llm = LLM(
        tiny_model("deepseek_v3"),
        device="cpu",
        block_size=8,
        num_blocks=64,
        max_model_len=128,
        kv_cache_dtype=kv_cache_dtype,
        check_invariants=True,
    )
    prompt = list(range(3, 24))
    params = SamplingParams(n=4, temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)
    (together,) = llm.generate([prompt], params, use_tqdm=False)
    answers = [answer.token_ids for answer in together.outputs]
    assert len({tuple(answer) for answer in answers}) == 4
    (again,) = llm.generate([prompt], params, use_tqdm=False)  # from the cache
    assert again.metrics.num_cached_tokens == 16
    assert [answer.token_ids for answer in again.outputs] == answers
    assert all(spec.is_latent for model in captured for spec in model.specs)


def _errors(model: PreTrainedModel, truth: Tensor | None, latent: bool) -> Tensor:
    """Errors of the last tokens' logits of three prompts, run one after another; without ``truth``
    the logits themselves."""
    seen: list[Tensor] = []
    llm = LLM(
        model,
        device="cpu",
        num_blocks=32,
        max_model_len=256,
        mla_latent_cache=latent,
        on_logits=lambda _, logits: seen.append(logits.float()),
    )
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    for prompt in mixed_prompts([200, 50, 120], VOCAB_SIZE):
        llm.generate([prompt], params, use_tqdm=False)
    logits = torch.cat(seen)
    return logits if truth is None else logits - truth


def test_bfloat16_errs_no_more_than_with_heads_cached() -> None:
    """Against the float32 model: the other order of summation is not less accurate."""
    sizes = {
        "hidden_size": 256,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    }
    model = tiny_model("minicpm3", num_hidden_layers=4, **sizes)
    truth = _errors(model, None, latent=False)
    model.to(torch.bfloat16)
    latent, heads = (_errors(model, truth, is_latent).pow(2).mean() for is_latent in (True, False))
    assert latent.sqrt() <= 1.25 * heads.sqrt()  # seen: 0.96 times
