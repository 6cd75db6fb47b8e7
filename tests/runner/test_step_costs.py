"""Durations of steps, measured at start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pagespec.compile.captured_model import capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.engine.config import EngineConfig
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.costs import DEFAULT_COSTS, StepCosts
from pagespec.engine.plan import StepPlan
from pagespec.runner import step_costs
from pagespec.runner.step_costs import _plan, measure_costs
from tests.runner.both_runners import RUNNERS, make_runner
from tests.support.captures import graph_cache
from tests.support.models import tiny_model

DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


class TimedRunner:
    """Steps of known durations: 1 ms and 0.1 ms per token; with draft tokens 0.3 ms more on the
    device and 0.5 ms exposed."""

    num_blocks = 100
    captured = SimpleNamespace(loaded=SimpleNamespace(vocab_size=1000))

    def __init__(self, max_num_samples: int | None = None, num_state_slots: int = 0) -> None:
        self.max_num_samples, self.num_state_slots = max_num_samples, num_state_slots
        self.plans: list[StepPlan] = []

    def seconds_of(self, plan: StepPlan) -> tuple[float, float]:
        self.plans.append(plan)
        seconds = 1e-3 + 1e-4 * plan.total_num_tokens
        return (seconds, 0.0) if plan.is_decode_only else (seconds + 3e-4, 5e-4)

    def draft_seconds_of(self, plan: StepPlan) -> float:
        """1 ms per row and token to draft, with a drafter."""
        return 1e-3 * sum(plan.wanted_drafts.values())


def measured(runner: Any, **settings: Any) -> StepCosts:
    return measure_costs(runner, EngineConfig(**settings), DRAFTS, max_model_len=64)


def test_sizes_end_at_the_largest_step() -> None:
    for num_seqs, limit, last in ((3, None, 8), (8, 24, 16), (100, None, 128), (100, 256, 256)):
        costs = measured(TimedRunner(limit), max_num_seqs=num_seqs, max_num_batched_tokens=512)
        sizes = [size for size, _ in costs.measured]
        assert (sizes[0], sizes[-1]) == (1, last)


def test_draft_tokens_cost_what_decode_steps_do_not() -> None:
    costs = measured(TimedRunner(64), max_num_seqs=8, max_num_batched_tokens=512)
    assert costs.exposed_s == pytest.approx(8e-4)
    assert costs.of(16) == pytest.approx(1e-3 + 16e-4)
    on_cpu = measured(TimedRunner(), max_num_seqs=8, max_num_batched_tokens=512)
    assert on_cpu.of(16) == pytest.approx(1.3e-3 + 16e-4)


def test_a_second_model_costs_time_by_the_number_of_rows() -> None:
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    config = EngineConfig(**settings)
    model = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=4)
    assert measured(TimedRunner(64), **settings).draft_s(8) == 0
    costs = measure_costs(TimedRunner(64), config, model, max_model_len=64)
    assert costs.draft_s(8) == pytest.approx(8e-3)


def test_rows_of_a_measured_step_have_draft_tokens_and_tables_of_their_own() -> None:
    runner = TimedRunner(num_state_slots=5)
    measured(runner, max_num_seqs=8, max_num_batched_tokens=512)
    assert max(len(plan) for plan in runner.plans) == 4  # 16 tokens; 32 need 8 state slots
    for plan in runner.plans:
        assert plan.num_samples == plan.num_tokens
        assert max(plan.num_tokens) <= 4
        assert len(set(plan.tables.values())) == len(plan)
        assert plan.state_tables == plan.tables
        assert len(set(plan.token_ids)) == plan.total_num_tokens


def test_one_size_gives_default_costs() -> None:
    assert measured(TimedRunner(1), max_num_seqs=8) is DEFAULT_COSTS


@pytest.mark.usefixtures("passed_events")
@pytest.mark.parametrize("kind", RUNNERS)
def test_measuring_leaves_no_trace_in_the_runner(kind: str) -> None:
    calls: list[object] = []
    loaded = load_model(tiny_model("llama", num_hidden_layers=1))
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    runner = make_runner(
        captured, kind, 12, max_num_blocks=4, on_logits=lambda *given: calls.append(given)
    )
    plan = _plan(3, 1, runner)
    for _ in range(3):
        seconds, exposed_s = runner.seconds_of(plan)
        assert seconds > 0 <= exposed_s
    assert (runner.pack_s, runner.wait_s, calls) == (0.0, 0.0, [])
    result = runner.collect(runner.dispatch(plan))
    assert len(result.token_ids) == 3
    assert len(calls) == 1


@pytest.mark.usefixtures("passed_events")
@pytest.mark.parametrize("kind", RUNNERS)
def test_steps_with_draft_tokens_are_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "_MAX_DURATION_S", 1e9)  # interpreted kernels are slow
    loaded = load_model(tiny_model("llama", num_hidden_layers=1))
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    runner = make_runner(captured, kind, 12, max_num_blocks=4)
    costs = measured(runner, max_num_seqs=2, block_size=4, max_num_batched_tokens=16)
    assert [size for size, _ in costs.measured] == ([1, 2, 4] if kind == "gpu" else [1, 2, 4, 8])
