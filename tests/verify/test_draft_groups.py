"""The groups of ``pagespec verify`` with draft tokens, on a CPU: models of each kind, and a control
with wrong rules of acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pagespec import LLM, InvalidInputError
from pagespec.engine.plan import StepPlan
from pagespec.verify import GateReport, GateSize, run_gate
from tests.support.captures import capture_once
from tests.support.models import VOCAB_SIZE, tiny_model

SIZE = GateSize(
    max_batch=5,
    neighbour_lengths=(),
    cuts=(),
    budgets=(),
    num_tokens=6,
    both_overlaps=False,
)
NUM_CASES = 3 * (2 * 6 + 6 + 6 + 12 + 2 * 6 + 3 * 6)  # preempted, batches, budgets, pauses


@pytest.fixture(autouse=True)
def _one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_once(monkeypatch)


def groups_of(
    model: Any,
    *,
    device: str = "cpu",
    block_size: int = 8,
    with_control: bool = False,
    **settings: Any,
) -> GateReport:
    """The report of the groups with draft tokens.

    Args:
        settings: arguments of ``LLM``.
    """

    def make_llm(**arguments: Any) -> LLM:
        return LLM(model, device=device, check_invariants=True, **settings, **arguments)

    return run_gate(
        make_llm,
        vocabulary=VOCAB_SIZE,
        block_size=block_size,
        size=SIZE,
        with_control=with_control,
        only_drafts=True,
    )


def check_equal(report: GateReport) -> None:
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert report.is_transparent, report.idle
    assert report.num_cases == NUM_CASES
    assert report.num_preemptions > 12
    assert report.num_hit_blocks > 50
    assert report.num_accepted_drafts > 200
    assert report.num_rejected_drafts > 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "arch",
    [
        # By day, the tests of an FP8 cache and of the control have a dense model in both dtypes.
        pytest.param("llama", marks=pytest.mark.nightly),
        pytest.param("mistral", marks=pytest.mark.nightly),
        "qwen3_moe",
        "deepseek_v3",
        pytest.param("deepseek_v32", marks=pytest.mark.nightly),
        pytest.param("gemma2", marks=pytest.mark.nightly),
        pytest.param("gpt_oss", marks=pytest.mark.nightly),
    ],
)
def test_answers_do_not_depend_on_draft_tokens(arch: str, dtype: torch.dtype) -> None:
    """Dense, sliding window, mixture of experts, latent attention with and without an indexer."""
    check_equal(groups_of(tiny_model(arch).to(dtype)))


def test_an_fp8_cache_does_not_depend_on_draft_tokens() -> None:
    check_equal(groups_of(tiny_model("llama").to(torch.bfloat16), kv_cache_dtype="fp8"))


@pytest.mark.nightly
def test_two_ranks_do_not_depend_on_draft_tokens(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    check_equal(groups_of(tmp_path, tensor_parallel_size=2))


def test_without_transparency_answers_differ() -> None:
    report = groups_of(tiny_model("llama"), with_control=True)
    check_equal(report)
    assert report.controls[0].name == "control: transparent=False, draft tokens"
    assert report.has_power


@pytest.mark.parametrize("num_more", [1, pytest.param(99, marks=pytest.mark.nightly)])
def test_a_wrong_rule_of_acceptance_is_found(
    num_more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rejected sample is accepted, or all are. Right draft tokens hide such a rule."""
    accepted = StepPlan.accepted

    def wrong(plan: StepPlan, token_ids: Sequence[int]) -> list[Sequence[int]]:
        found, begin = [], 0
        for right, num_samples in zip(accepted(plan, token_ids), plan.num_samples, strict=True):
            samples = token_ids[begin : begin + num_samples]
            found.append(samples[: len(right) + num_more])
            begin += num_samples
        return found

    monkeypatch.setattr(StepPlan, "accepted", wrong)
    model = tiny_model("llama")
    report = run_gate(
        lambda **arguments: LLM(model, device="cpu", **arguments),
        vocabulary=VOCAB_SIZE,
        block_size=8,
        size=SIZE,
        with_control=False,
        only_drafts=True,
    )
    different = {group.name for group in report.groups if group.num_different}
    assert {"draft tokens: wrong", "draft tokens: random"} <= different
    assert not report.is_transparent


def without_drafts(**arguments: Any) -> LLM:
    config = arguments.get("speculative_config")
    if config is not None:
        raise InvalidInputError("speculative_config", config["method"], "is not supported")
    return LLM(tiny_model("llama", num_hidden_layers=1), device="cpu", **arguments)


def test_groups_of_an_engine_without_draft_tokens_are_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="speculative_config = 'prediction'"):
        run_gate(without_drafts, vocabulary=VOCAB_SIZE, size=SIZE, only_drafts=True)


def test_the_whole_gate_leaves_out_groups_that_an_engine_does_not_support() -> None:
    report = run_gate(without_drafts, vocabulary=VOCAB_SIZE, size=SIZE)
    names = [group.name for group in (*report.groups, *report.controls)]
    assert "batch sizes" in names
    assert not any("draft tokens" in name for name in names)
