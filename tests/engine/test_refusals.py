"""Reasons why a request has no row in a plan, as the planner records them in a trace.

The refinement test checks that the specification gives the same reasons everywhere.
"""

from __future__ import annotations

from pagespec.engine.planner import PlanAccount
from pagespec.engine.scheduler import Scheduler
from tests.engine.schedules import add, make_scheduler, rows, step


def explained(scheduler: Scheduler) -> PlanAccount:
    account = scheduler.account = PlanAccount()
    return account


def test_only_the_oldest_waiting_request_is_listed_as_refused_for_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    account = explained(scheduler)
    for name in "abc":
        add(scheduler, name, 2)
    step(scheduler)
    assert account.refused == [("b", "full")]


def test_a_prompt_that_uses_the_budget_refuses_the_next() -> None:
    scheduler = make_scheduler(budget=4)
    account = explained(scheduler)
    add(scheduler, "a", 6)
    add(scheduler, "b", 2)
    step(scheduler)
    assert account.refused == [("b", "budget")]
    step(scheduler)
    assert account.refused == []


def test_a_request_that_is_resumed_at_once_drains_first() -> None:
    scheduler = make_scheduler(pipeline_depth=1)
    account = explained(scheduler)
    add(scheduler, "a", 2)
    add(scheduler, "b", 2)
    scheduler.schedule()
    scheduler.pause("b")
    scheduler.resume("b")
    scheduler.schedule()
    assert account.refused == [("b", "draining")]


def test_a_settled_only_request_has_every_second_step_with_overlap_and_others_have_each() -> None:
    scheduler = make_scheduler(pipeline_depth=1)
    account = explained(scheduler)
    add(scheduler, "a", 2, 8, settled_only=True)
    add(scheduler, "b", 2, 8)
    plans = [scheduler.schedule()]
    for _ in range(4):
        plans.append(scheduler.schedule())
        expected = [("a", "unsettled")] if len(plans) % 2 == 0 else []
        assert account.refused == expected
        scheduler.commit(plans[-2], [7] * plans[-2].num_sampled)
    assert [len(plan) for plan in plans] == [2, 1, 2, 1, 2]
    # What it computes is known, what the others compute is where the step before has put it.
    assert [tuple(plan.token_ids) for plan in plans[1:]] == [(-2,), (7, -1), (-2,), (7, -1)]


def test_chunks_of_a_settled_only_prompt_do_not_wait_for_settling() -> None:
    scheduler = make_scheduler(pipeline_depth=1, budget=4)
    add(scheduler, "a", 7, settled_only=True)
    assert rows(scheduler.schedule()) == [("a", 0, 4, False)]
    last = scheduler.schedule()
    assert rows(last) == [("a", 4, 3, True)]
    scheduler.commit(scheduler.in_flight[0].plan, [])
    assert not scheduler.schedule().requests
    scheduler.commit(last, [7])
    assert rows(scheduler.schedule()) == [("a", 7, 1, True)]


def test_a_preemption_records_its_beneficiary_and_its_evictions() -> None:
    """The oldest request takes a block that the youngest had published: an eviction."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    account = explained(scheduler)
    add(scheduler, "a", 3, 5)
    add(scheduler, "b", 3, 5)
    plan = step(scheduler)
    while not plan.preempted:
        plan = step(scheduler)
    assert (account.preempted_for, account.num_evicted) == (["a"], 1)
    assert account.refused == []
    step(scheduler)
    assert account.refused == [("b", "blocks")]


def test_without_a_trace_no_reasons_are_recorded() -> None:
    assert make_scheduler().account is None
