"""Why a request has no row, as the planner of a traced run tells it. That the specification gives
the same reasons everywhere is for the refinement test."""

from __future__ import annotations

from functools import partial

from pagespec.engine.planner import Planner
from pagespec.engine.refusals import ExplainingPlanner, PlanAccount
from pagespec.engine.scheduler import Scheduler
from tests.support.schedules import add, make_scheduler, step


def explained(scheduler: Scheduler) -> PlanAccount:
    account = PlanAccount()
    scheduler.make_planner = partial(ExplainingPlanner, account)
    return account


def test_the_waiting_are_refused_for_the_cap_and_only_the_eldest_is_named() -> None:
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


def test_one_resumed_at_once_drains_first() -> None:
    scheduler = make_scheduler(pipeline_depth=1)
    account = explained(scheduler)
    add(scheduler, "a", 2)
    add(scheduler, "b", 2)
    scheduler.schedule()
    scheduler.pause("b")
    scheduler.resume("b")
    scheduler.schedule()
    assert account.refused == [("b", "draining")]


def test_a_preemption_tells_for_whom_and_what_it_evicted() -> None:
    """The eldest takes a block of the youngest, which it has published: an eviction."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    account = explained(scheduler)
    add(scheduler, "a", 3, 5)
    add(scheduler, "b", 3, 5)
    plan = step(scheduler)
    while not plan.preempted:
        plan = step(scheduler)
    assert (account.askers, account.num_evicted) == (["a"], 1)
    assert account.refused == []
    step(scheduler)
    assert account.refused == [("b", "blocks")]


def test_a_scheduler_that_is_not_traced_explains_nothing() -> None:
    assert make_scheduler().make_planner is Planner
