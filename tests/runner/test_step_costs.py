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
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.plan import StepPlan
from pagespec.runner import step_costs
from pagespec.runner.step_costs import _plan, measure_costs
from tests.runner.both_runners import RUNNERS, make_runner
from tests.support.captures import graph_cache
from tests.support.models import tiny_model

DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
MODEL = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=4)


class TimedRunner:
    """Steps of known durations: 1 ms and 0.1 ms per token; with draft tokens 0.3 ms more on the
    device and 0.5 ms exposed."""

    num_blocks, block_size = 100, 16
    captured = SimpleNamespace(loaded=SimpleNamespace(vocab_size=1000))

    def __init__(
        self, max_num_samples: int | None = None, num_state_slots: int = 0, **sizes: int
    ) -> None:
        self.max_num_samples, self.num_state_slots = max_num_samples, num_state_slots
        vars(self).update(sizes)
        self.plans: list[StepPlan] = []

    def seconds_of(self, plan: StepPlan) -> tuple[float, float]:
        self.plans.append(plan)
        seconds = 1e-3 + 1e-4 * plan.total_num_tokens
        return (seconds, 0.0) if plan.is_decode_only else (seconds + 3e-4, 5e-4)

    def draft_seconds_of(self, plan: StepPlan) -> float:
        """1 ms per row and token to draft, with a drafter. Its positions need slots."""
        for row, num_wanted in plan.wanted_drafts.items():
            assert plan.num_tokens[row] + num_wanted <= len(plan.tables[row]) * self.block_size
        return 1e-3 * sum(plan.wanted_drafts.values())


def measured(
    runner: Any, drafts: SpeculativeConfig = DRAFTS, max_model_len: int = 64, **settings: Any
) -> StepCosts:
    config = EngineConfig(block_size=runner.block_size, **settings)
    return measure_costs(runner, config, drafts, max_model_len)


def test_sizes_end_at_the_largest_step() -> None:
    for num_seqs, limit, last in ((3, None, 12), (8, 24, 24), (100, None, 128), (100, 256, 256)):
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
    assert measured(TimedRunner(64), **settings).draft_s(8) == 0
    costs = measured(TimedRunner(64), MODEL, **settings)
    assert costs.draft_s(8) == pytest.approx(8e-3)


def test_rows_of_a_measured_step_have_draft_tokens_and_tables_of_their_own() -> None:
    runner = TimedRunner(num_state_slots=5)
    measured(runner, max_num_seqs=8, max_num_batched_tokens=512)
    assert max(len(plan) for plan in runner.plans) == 5  # one per state slot
    for plan in runner.plans:
        assert plan.num_samples == plan.num_tokens
        assert max(plan.num_tokens) <= 4
        assert len(set(plan.tables.values())) == len(plan)
        assert list(plan.state_tables.values()) == [(row,) for row in range(len(plan))]
        assert len(set(plan.token_ids)) == plan.total_num_tokens


@pytest.mark.parametrize("max_num_samples", [None, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_a_drafter_is_never_free(max_num_samples: int | None, num_rows: int) -> None:
    """A pass is measured for the most rows, too."""
    costs = measured(TimedRunner(max_num_samples), MODEL, max_num_seqs=num_rows)
    for n in {1, num_rows}:
        assert costs.draft_s(n) == pytest.approx(1e-3 * n)
    assert costs.draft_s(2 * num_rows) == pytest.approx(2e-3 * num_rows)


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_rows_of_small_blocks_have_several(block_size: int, num_rows: int) -> None:
    runner = TimedRunner(block_size=block_size)
    costs = measured(runner, MODEL, max_num_seqs=num_rows)
    assert costs.measured[-1][0] == 5 * num_rows
    assert costs.draft_s(num_rows) == pytest.approx(1e-3 * num_rows)
    for plan in runner.plans:
        blocks = [block for table in plan.tables.values() for block in table]
        assert len(set(blocks)) == len(blocks)
        assert max(blocks) < runner.num_blocks
        for row, table in plan.tables.items():
            assert plan.num_tokens[row] <= len(table) * block_size


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "max_model_len", "sizes"),
    [
        (1, 16, 64, [1, 2, 4, 5]),  # blocks of one row, though 8 may run
        (3, 2, 6, [1, 2, 4, 5]),
        (3, 1, 64, [1, 2, 3]),
        (100, 16, 4, [1, 2, 4, 8, 16, 24]),
        (100, 1, 3, [1, 2, 4, 8, 16]),
        (100, 1, 2, [1, 2, 4, 8]),  # a request has no slot for two draft tokens
    ],
)
def test_steps_that_a_small_cache_allows_are_measured(
    num_blocks: int, block_size: int, max_model_len: int, sizes: list[int]
) -> None:
    runner = TimedRunner(num_blocks=num_blocks, block_size=block_size)
    costs = measured(runner, MODEL, max_model_len, max_num_seqs=8)
    assert [size for size, _ in costs.measured] == sizes
    assert all(max(map(max, plan.tables.values())) < num_blocks for plan in runner.plans)
    assert costs.draft_s(8) == pytest.approx(8e-3)


def test_nothing_is_drafted_where_a_request_has_one_slot() -> None:
    runner = TimedRunner(num_blocks=1, block_size=1)
    costs = measured(runner, MODEL, max_model_len=2, max_num_seqs=8)
    assert [size for size, _ in costs.measured] == [1]
    assert not any(plan.wanted_drafts for plan in runner.plans)


def test_one_size_costs_in_proportion() -> None:
    costs = measured(TimedRunner(1), MODEL, max_num_seqs=8)
    assert [size for size, _ in costs.measured] == [1]
    assert costs.of(1) == pytest.approx(1.1e-3)
    assert costs.of(3) == pytest.approx(3.3e-3)
    assert costs.draft_s(1) == pytest.approx(1e-3)


def test_a_long_measurement_ends_with_all_draft_tokens_of_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise five tokens would be estimated at 2.5 times the time of two."""
    monkeypatch.setattr(step_costs, "_MAX_DURATION_S", 0.0)
    runner = TimedRunner()
    costs = measured(runner, MODEL, max_num_seqs=8)
    assert [size for size, _ in costs.measured] == [1, 2, 5]
    assert costs.of(5) == pytest.approx(1.8e-3)
    assert sum(plan.total_num_tokens == 5 for plan in runner.plans) == 1
    assert costs.draft_s(1) == pytest.approx(1e-3)
    assert costs.draft_s(8) == pytest.approx(8e-3)


def test_no_step_is_shorter_than_a_decode_step() -> None:
    class Slow(TimedRunner):
        """With draft tokens 3 ms more if there are many."""

        def seconds_of(self, plan: StepPlan) -> tuple[float, float]:
            seconds, exposed_s = super().seconds_of(plan)
            return seconds + 3e-3 * (not plan.is_decode_only and len(plan) > 1), exposed_s

    costs = measured(Slow(64), max_num_seqs=16)
    assert costs.of(1) >= 1.1e-3


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
    runner = make_runner(captured, kind, 12, max_num_seqs=6, max_num_blocks=4)
    costs = measured(runner, max_num_seqs=2, max_num_batched_tokens=16)
    assert [size for size, _ in costs.measured] == [1, 2, 4, 6 if kind == "gpu" else 8]
