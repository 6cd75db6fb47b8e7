"""The gate of ``pagespec verify`` on tiny models, reduced so that it runs on every commit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagespec import LLM
from pagespec.runner.cpu import platform as cpu_platform
from pagespec.verify import GateSize, run_gate
from tests.support.captures import capture_once
from tests.support.models import VOCAB_SIZE, WINDOW, tiny_model
from tests.support.tiny_configs import RECURRENT

SIZE = GateSize(
    max_batch=5,
    neighbour_lengths=(1, 2, 3, 65, 300),
    cuts=(1, 2, 3, 23, 32, 50, 62, 63),
    budgets=(2, 5, 33),
    num_tokens=4,
)


@pytest.fixture
def _one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_once(monkeypatch)


@pytest.fixture
def _packing_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the engine had loaded the module itself. The module is the test's, so that engines
    share it."""
    monkeypatch.setattr(cpu_platform, "_packing_bytes", lambda **_: request.param)


@pytest.mark.usefixtures("_one_capture", "_packing_bytes")
@pytest.mark.parametrize(
    ("arch", "dtype", "_packing_bytes"),
    [
        pytest.param("llama", torch.float32, 0, marks=pytest.mark.nightly),
        pytest.param("llama", torch.float32, 1 << 30, marks=pytest.mark.nightly),
        ("llama", torch.bfloat16, 0),
        ("mistral", torch.float32, 0),
        ("qwen3_moe", torch.float32, 1 << 30),
    ],
    indirect=["_packing_bytes"],
)
def test_answers_do_not_depend_on_the_schedule(arch: str, dtype: torch.dtype) -> None:
    """Dense, sliding window (prompts of 64 tokens exceed it), mixture of experts."""
    assert WINDOW < 64
    model = tiny_model(arch).to(dtype)

    def make_llm(**arguments: Any) -> LLM:
        return LLM(model, device="cpu", check_invariants=True, **arguments)

    report = run_gate(make_llm, vocabulary=VOCAB_SIZE, block_size=8, size=SIZE)
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert all(group.num_cases > 0 for group in report.groups)
    assert report.num_cases > 100
    assert report.num_preemptions >= SIZE.num_tokens
    assert report.num_hit_blocks > 100
    assert report.is_transparent
    # The gate sees differences where there are some. bfloat16 rounds most of them away.
    assert report.has_power or dtype == torch.bfloat16
    scores = [control for control in report.controls if control.name.endswith(", scores")]
    assert any(control.num_different for control in scores) or dtype == torch.bfloat16
    names = [group.name for group in report.groups]
    assert "scores beside sampled log-probabilities" in names
    assert {f"draft tokens: {kind}" for kind in ("right", "wrong", "random")} <= set(names)
    assert {f"draft tokens: {kind}, preempted" for kind in ("right", "random")} <= set(names)
    assert report.num_accepted_drafts > 200
    assert report.num_rejected_drafts > 200


@pytest.mark.usefixtures("_one_capture")
@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({}, []),
        ({"enable_prefix_caching": False}, ["prefix hits", "paused and found in the cache"]),
        (
            {"num_blocks": 200},
            [
                "preempted for blocks",
                *(f"draft tokens: {kind}, preempted" for kind in ("right", "wrong", "random")),
            ],
        ),
    ],
)
def test_groups_without_hits_or_preemptions_show_nothing(
    settings: dict[str, Any], idle: list[str]
) -> None:
    """Equal answers prove nothing if the group's event never occurred."""
    model = tiny_model("llama", num_hidden_layers=1)
    size = GateSize(
        max_batch=2,
        neighbour_lengths=(1,),
        cuts=(1,),
        budgets=(33,),
        num_tokens=4,
        both_overlaps=False,
    )

    def make_llm(**arguments: Any) -> LLM:
        return LLM(model, device="cpu", **(arguments | settings))

    report = run_gate(make_llm, vocabulary=VOCAB_SIZE, size=size, with_control=False)
    assert report.num_different == 0
    assert report.idle == idle
    assert report.is_transparent == (not idle)


@pytest.mark.usefixtures("_one_capture", "_packing_bytes")
@pytest.mark.parametrize(
    ("arch", "_packing_bytes"),
    [
        ("falcon", 1 << 30),
        pytest.param("falcon", 0, marks=pytest.mark.nightly),
        pytest.param("llama4_text", 0, marks=pytest.mark.nightly),
        pytest.param("llama4_text", 1 << 30, marks=pytest.mark.nightly),
        pytest.param("aria_text", 1 << 30, marks=pytest.mark.nightly),
        pytest.param("aria_text", 0, marks=pytest.mark.nightly),
    ],
    indirect=["_packing_bytes"],
)
def test_answers_of_models_with_matmuls_of_their_own_do_not_depend_on_the_schedule(
    arch: str,
) -> None:
    """``x @ weight.T``, ``bmm`` and ``x @ weight``; widths that 16 does not divide."""
    model = tiny_model(arch, hidden_size=72, intermediate_size=40)
    size = GateSize(
        max_batch=3,
        neighbour_lengths=(65,),
        cuts=(1,),
        budgets=(5,),
        num_tokens=4,
        both_overlaps=False,
    )

    def make_llm(**arguments: Any) -> LLM:
        return LLM(model, device="cpu", check_invariants=True, **arguments)

    report = run_gate(make_llm, vocabulary=VOCAB_SIZE, block_size=8, size=size, with_control=False)
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert report.is_transparent, report.idle


@pytest.mark.usefixtures("_one_capture")
@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=() if arch == "qwen3_next" else pytest.mark.nightly)
        for arch in RECURRENT
    ],
)
def test_answers_of_recurrent_models_do_not_depend_on_the_schedule(arch: str) -> None:
    """Hits begin at checkpoints, and requests continue from states that other requests left."""
    model = tiny_model(arch)
    size = GateSize(
        max_batch=3,
        neighbour_lengths=(1, 65),
        cuts=(1, 23, 32),
        budgets=(5, 33),
        num_tokens=4,
        both_overlaps=False,
    )

    def make_llm(**arguments: Any) -> LLM:
        states = {"state_interval": 8, "num_state_slots": 64}
        return LLM(model, device="cpu", check_invariants=True, **states, **arguments)

    report = run_gate(make_llm, vocabulary=VOCAB_SIZE, block_size=8, size=size, with_control=False)
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert report.is_transparent, report.idle
    assert report.num_hit_blocks > 50
    names = {group.name for group in report.groups}
    assert {f"draft tokens: {kind}" for kind in ("right", "wrong", "random")} <= names
    assert report.num_accepted_drafts > 20
    assert report.num_rejected_drafts > 20
