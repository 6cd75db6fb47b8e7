"""The token budget of a step follows the measured speed, on a simulated machine and clock."""

from __future__ import annotations

import pytest

from pagespec.engine.pace import MIN_PROMPT_TOKENS, StepPace
from pagespec.engine.plan import StepPlan
from tests.engine.schedules import add, make_scheduler, rows

TARGET_S = 0.5
BUDGET = 2048


def seconds_of(plan: StepPlan, costs: tuple[float, float, float]) -> float:
    overhead, per_token, per_read = costs
    reads = sum(n * (start + n / 2) for _, start, n, _ in plan.rows())
    return overhead + per_token * plan.total_num_tokens + per_read * reads


def run(costs: tuple[float, float, float], pace: StepPace | None, *, num_prompt_tokens: int = 6000):
    """(steps that the prompt took, seconds of the longest step that had an answer beside it)."""
    scheduler = make_scheduler(num_blocks=1200, block_size=16, max_num_seqs=8, budget=BUDGET)
    add(scheduler, "neighbour", 20, 5000)
    longest, num_steps = 0.0, 0
    for number in range(4000):
        if number == 20:
            add(scheduler, "prompt", num_prompt_tokens, 4)
        plan = scheduler.schedule(
            pace.budget(scheduler.queues, BUDGET) if pace is not None else None
        )
        took = seconds_of(plan, costs)
        scheduler.commit(plan, [1] * plan.num_sampled)
        if pace is not None:
            pace.note(plan, took)
        names = [name for name, *_ in rows(plan)]
        if "prompt" in names:
            assert "neighbour" in names, "a running answer has a token in every step"
            longest, num_steps = max(longest, took), num_steps + 1
            if any(name == "prompt" and sampled for name, _, _, sampled in rows(plan)):
                return num_steps, longest
    raise AssertionError("the prompt is not computed")


@pytest.mark.parametrize(
    "costs",
    [
        (0.02, 0.002, 0.0),
        (0.02, 0.002, 1e-6),
        (0.2, 0.005, 0.0),
        (0.001, 0.0004, 2e-7),
        (0.05, 0.01, 3e-6),
    ],
)
def test_a_step_beside_an_answer_keeps_to_the_target(costs: tuple[float, float, float]) -> None:
    _, before = run(costs, None)
    num_steps, after = run(costs, StepPace(TARGET_S))
    assert before > TARGET_S
    assert after <= 1.3 * TARGET_S
    # It is used, too: not more steps than twice what steps of the target would take.
    whole = costs[1] * 6000 + costs[2] * 6000 * 3000
    assert num_steps <= 2 * whole / (TARGET_S - costs[0] - 8 * costs[1]) + 6


def test_a_fast_machine_takes_whole_steps() -> None:
    num_steps, _ = run((0.001, 1e-5, 0.0), StepPace(TARGET_S))
    assert num_steps <= 5  # 256 at first, then as many as there may be


def test_a_machine_too_slow_for_the_target_makes_progress() -> None:
    num_steps, _ = run((2.0, 0.01, 0.0), StepPace(TARGET_S), num_prompt_tokens=200)
    most = -(-200 // MIN_PROMPT_TOKENS)
    assert most - 1 <= num_steps <= most


def test_it_follows_a_machine_that_slows_down() -> None:
    pace = StepPace(TARGET_S)
    run((0.02, 0.0005, 0.0), pace)
    run((0.02, 0.005, 0.0), pace)  # learns meanwhile
    _, longest = run((0.02, 0.005, 0.0), pace)
    assert longest <= 1.3 * TARGET_S


def test_prompts_without_answers_beside_them_take_whole_steps() -> None:
    scheduler = make_scheduler(num_blocks=1200, block_size=16, max_num_seqs=8, budget=BUDGET)
    pace = StepPace(TARGET_S)
    add(scheduler, "a", 3000, 4)
    add(scheduler, "b", 3000, 4)
    plan = scheduler.schedule(pace.budget(scheduler.queues, BUDGET))
    assert plan.total_num_tokens == BUDGET


@pytest.mark.parametrize("budget", [0, 1, 2049])
def test_a_budget_out_of_its_limits_is_refused(budget: int) -> None:
    scheduler = make_scheduler(num_blocks=1200, block_size=16, max_num_seqs=8, budget=BUDGET)
    for name in "ab":
        add(scheduler, name, 4, 4)
    scheduler.commit(plan := scheduler.schedule(), [1] * plan.num_sampled)
    with pytest.raises(ValueError, match="2 to 2048"):
        scheduler.schedule(budget)
    assert len(scheduler.schedule(2)) == 2
