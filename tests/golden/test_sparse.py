"""Models with sparse attention (a top-k indexer) match Hugging Face `generate` under all
conditions.

Prompts are several times as long as the number of keys that the indexer selects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pagespec import LLM, SamplingParams
from pagespec.verify import run_gate
from tests.golden.harness import (
    Condition,
    Reference,
    Subject,
    check,
    mixed_prompts,
    reference_of,
)
from tests.golden.subjects import (
    BEYOND_CONDITIONS,
    GATE_SIZE,
    TINY_CONDITIONS,
    beyond,
    lengths_beyond,
    tiny,
    tiny_runs,
)
from tests.support.captures import capture_once
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.tiny_configs import SPARSE, TOPK

_GATE: dict[str, Any] = {"vocabulary": VOCAB_SIZE, "block_size": 8, "size": GATE_SIZE}
FEW_CASES = replace(
    GATE_SIZE, max_batch=3, neighbour_lengths=(1, 300), budgets=(2, 33), both_overlaps=False
)
# So few index heads that many scores are 0, and equal.
_TIES: dict[str, Any] = {"index_n_heads": 2}
_indexer = import_module("pagespec.kernels.sparse.indexer")


@pytest.mark.parametrize(("arch", "condition"), tiny_runs(SPARSE, by_day="deepseek_v32"))
def test_sparse_models_equal_generate(arch: str, condition: Condition) -> None:
    subject, reference = tiny(arch)
    assert sum(len(prompt) > 2 * TOPK for prompt in reference.prompts) >= 6
    check(subject.run(condition, reference), condition)


@pytest.mark.parametrize(
    "arch", ["deepseek_v32", *(pytest.param(a, marks=pytest.mark.nightly) for a in [*SPARSE][1:])]
)
def test_sparse_models_equal_generate_beyond_every_threshold(arch: str) -> None:
    assert TOPK + 1 in lengths_beyond(arch)
    subject, reference = beyond(arch)
    for condition in BEYOND_CONDITIONS:
        check(subject.run(condition, reference), condition)


def test_another_choice_gives_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: attention reads only the selected keys."""
    subject, reference = tiny("deepseek_v32")
    topk = _indexer._topk
    monkeypatch.setattr(_indexer, "_topk", lambda s, v, k: topk(-s, v, k))
    row = subject.run(TINY_CONDITIONS[0], reference)
    assert row.num_wrong_tokens > row.num_tokens // 2


@pytest.mark.parametrize(
    "settings",
    [
        {"mla_latent_cache": False},
        pytest.param({"compile": "eager"}, marks=pytest.mark.nightly),
        pytest.param({"transparent": False}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_other_ways_to_compute_equal_generate(settings: dict[str, Any]) -> None:
    model = tiny_model("glm_moe_dsa")
    _, reference = tiny("glm_moe_dsa")
    llm_settings = {"device": "cpu", "max_num_seqs": 16, **settings}
    condition = next(c for c in TINY_CONDITIONS if c.name == "tiny pool+cache")
    subject = Subject("glm_moe_dsa", model, **llm_settings)
    check(subject.run(condition, reference), condition)


def _maker(model: PreTrainedModel) -> Callable[..., LLM]:
    return lambda **settings: LLM(model, device="cpu", check_invariants=True, **settings)


@pytest.mark.parametrize(
    ("arch", "dtype", "both_overlaps"),
    [
        ("deepseek_v32", torch.float32, None),
        pytest.param("deepseek_v32", torch.float32, False, marks=pytest.mark.nightly),
        pytest.param("deepseek_v32", torch.float32, True, marks=pytest.mark.nightly),
        pytest.param("deepseek_v32", torch.bfloat16, True, marks=pytest.mark.nightly),
        pytest.param("glm_moe_dsa", torch.float32, True, marks=pytest.mark.nightly),
        pytest.param("hy_v4", torch.float32, True, marks=pytest.mark.nightly),
    ],
)
def test_answers_do_not_depend_on_the_schedule(
    arch: str, dtype: torch.dtype, both_overlaps: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``both_overlaps=None``: fewer cases."""
    capture_once(monkeypatch)
    size = FEW_CASES if both_overlaps is None else replace(GATE_SIZE, both_overlaps=both_overlaps)
    report = run_gate(_maker(tiny_model(arch).to(dtype)), **{**_GATE, "size": size})
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert report.is_transparent, report.idle
    assert report.num_hit_blocks > 100
    assert report.num_preemptions >= GATE_SIZE.num_tokens // (1 if both_overlaps else 2)
    assert report.has_power or dtype == torch.bfloat16


def _topk_of_the_layout(scores: Tensor, visible: Tensor, num_chosen: int) -> Tensor:
    """A top-k whose choice among equal scores depends on the padding of the batch."""
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    at = scores.masked_fill(hidden, float("-inf")).topk(num_chosen).indices
    at[visible <= num_chosen] = torch.arange(num_chosen)
    return at


@pytest.mark.nightly
@pytest.mark.parametrize("is_control", [False, True])
def test_equal_scores_are_told_apart_without_the_schedule(
    is_control: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_control:
        monkeypatch.setattr(_indexer, "_topk", _topk_of_the_layout)
    capture_once(monkeypatch)
    size = replace(GATE_SIZE, neighbour_lengths=(1, 300), both_overlaps=False)
    model = tiny_model("deepseek_v32", **_TIES)
    report = run_gate(_maker(model), **{**_GATE, "size": size}, with_control=False)
    assert bool(report.num_different) == is_control


def _token_by_token(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> Tensor:
    """Logits [num_tokens, vocabulary] of the greedy continuation by transformers, one token per
    call."""
    cache, text, logits = DynamicCache(config=model.config), list(prompt), []
    with torch.no_grad():
        for place in range(len(prompt) + num_tokens - 1):
            out = model(torch.tensor([[text[place]]]), past_key_values=cache, use_cache=True)
            if place >= len(prompt) - 1:
                logits.append(out.logits[0, -1])
                text.append(int(logits[-1].argmax()))
    return torch.stack(logits)


def test_equal_scores_are_told_apart_as_transformers_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_tied = 0
    topk = _indexer._topk

    def counted(scores: Tensor, visible: Tensor, num_chosen: int) -> Tensor:
        nonlocal num_tied
        chosen = topk(scores, visible, num_chosen)
        for row, at, n in zip(scores, chosen, visible.tolist(), strict=True):
            lowest = row[at].min()
            num_tied += n > num_chosen and int((row[:n] >= lowest).sum()) > num_chosen
        return chosen

    monkeypatch.setattr(_indexer, "_topk", counted)
    model = tiny_model("deepseek_v32", **_TIES)
    judge = copy.deepcopy(model)
    judge.set_attn_implementation("eager")
    prompts = mixed_prompts([90, 64, 41], VOCAB_SIZE)
    logits = [_token_by_token(judge, prompt, 4) for prompt in prompts]
    outputs = [rows.argmax(-1).tolist() for rows in logits]
    reference = Reference(prompts, outputs, logits)
    condition = Condition("plain", {"max_num_batched_tokens": 32, "max_num_seqs": 16})
    check(Subject("ties", model, device="cpu").run(condition, reference), condition)
    assert num_tied > 30
    whole = reference_of(judge, prompts, [4] * 3)
    assert any(
        float((a[0] - b[0]).abs().max()) > 1e-2 for a, b in zip(whole.logits, logits, strict=True)
    )


@pytest.mark.parametrize(
    ("kv_cache_dtype", "mla_latent_cache"),
    [
        ("auto", True),
        pytest.param("fp8", True, marks=pytest.mark.nightly),
        pytest.param("auto", False, marks=pytest.mark.nightly),
        pytest.param("fp8", False, marks=pytest.mark.nightly),
    ],
)
def test_continuations_of_one_prompt_share_its_blocks(
    kv_cache_dtype: str, mla_latent_cache: bool
) -> None:
    """A partly filled block of the prompt is copied for each continuation, with its index keys.
    Answers equal those of separate requests."""

    ways = {"kv_cache_dtype": kv_cache_dtype, "mla_latent_cache": mla_latent_cache}
    subject = Subject("glm_moe_dsa", tiny_model("glm_moe_dsa"), device="cpu", **ways)

    def llm() -> LLM:
        return subject.llm(block_size=8, num_blocks=96, max_model_len=128, check_invariants=True)

    prompt = list(range(3, 48))
    params = SamplingParams(n=4, temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)
    shared = llm()
    (together,) = shared.generate([prompt], params, use_tqdm=False)
    answers = [answer.token_ids for answer in together.outputs]
    assert len({tuple(answer) for answer in answers}) == 4
    (again,) = shared.generate([prompt], params, use_tqdm=False)  # from the cache
    assert again.metrics.num_cached_tokens == 40
    assert [answer.token_ids for answer in again.outputs] == answers
    # And of a fresh engine, told the prompt with each answer but its last token.
    alone = llm()
    for answer in answers[1:]:
        last = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        (one,) = alone.generate([[*prompt, *answer[:-1]]], last, use_tqdm=False)
        (two,) = shared.generate([[*prompt, *answer[:-1]]], last, use_tqdm=False)
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
