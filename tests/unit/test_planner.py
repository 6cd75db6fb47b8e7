"""Plans by hand: the corners of `engine/planner.py`, most of them found by mutmut."""

from __future__ import annotations

import pytest

from pagespec.engine.request import RequestState
from tests.unit.schedules import add, make_scheduler, rows, step


def test_steps_are_numbered_in_the_order_of_dispatch() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule().step == 0, "an empty plan is no step and takes no number"
    add(scheduler, "a", 2)
    assert [step(scheduler).step for _ in range(3)] == [0, 1, 2]


def test_steps_do_not_overlap_unless_that_was_asked_for() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 2)
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="1 steps are in flight; commit one first"):
        scheduler.schedule()


def test_a_plan_lists_the_new_blocks_of_each_row_hits_first() -> None:
    scheduler = make_scheduler()
    a = add(scheduler, "a", 5)
    assert step(scheduler).new_blocks == {0: (0, 1, 2)}
    b = add(scheduler, "b", 7, token=ord("a"))
    assert step(scheduler).new_blocks == {1: (0, 1, 3, 4)}, "two hits, then two of its own"
    assert step(scheduler).new_blocks == {0: (5,)}, "a grows"
    assert (a.block_table, b.block_table) == ([0, 1, 2, 5], [0, 1, 3, 4])
    assert step(scheduler).new_blocks == {1: (6,)}


def test_a_plan_says_whether_every_row_is_a_decode() -> None:
    scheduler = make_scheduler(budget=5)
    assert scheduler.schedule().is_decode_only is False, "it has no rows"
    add(scheduler, "a", 2)
    assert step(scheduler).is_decode_only is False
    assert step(scheduler).is_decode_only is True
    add(scheduler, "b", 5, 1)
    assert rows(step(scheduler))[1] == ("b", 0, 4, False)
    assert step(scheduler).is_decode_only is True, "the last token of a prompt is one like it"


def test_who_gets_no_tokens_takes_no_blocks_from_anybody() -> None:
    """`q` uses up the budget and the pool; `p`, at the end of its blocks, gets no token, so `c`
    must keep its blocks. And `q` leaves a token for `c` alone: `p` has no claim to one."""
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=3, budget=5, caching=False)
    add(scheduler, "q", 4)
    p = add(scheduler, "p", 9, 1)
    for name in "qp":
        scheduler.pause(name)
    add(scheduler, "c", 2)
    step(scheduler)
    scheduler.resume("p")
    assert rows(step(scheduler)) == [("p", 0, 4, False), ("c", 2, 1, True)]
    assert p.num_dispatched == p.num_slots
    scheduler.resume("q")
    plan = step(scheduler)
    assert rows(plan) == [("q", 0, 4, True), ("c", 3, 1, True)]
    assert plan.preempted == ()


def test_no_younger_takes_blocks_in_a_step_in_which_an_elder_was_refused() -> None:
    scheduler = make_scheduler(num_blocks=8, caching=False)
    add(scheduler, "a", 7)
    elder = add(scheduler, "b", 9)
    scheduler.pause("b")
    add(scheduler, "c", 2)
    step(scheduler)
    scheduler.resume("b")
    assert scheduler.blocks.num_available_blocks == 3, "and one of c's: b wants five"
    assert rows(step(scheduler)) == [("a", 7, 1, True)]
    assert elder.state is RequestState.WAITING


def test_nobody_is_admitted_into_blocks_that_a_step_in_flight_still_writes() -> None:
    scheduler = make_scheduler(num_blocks=4, caching=False, pipeline_depth=1)
    elder = add(scheduler, "a", 4)
    scheduler.pause("a")
    victim = add(scheduler, "b", 5)
    in_flight = scheduler.schedule()
    scheduler.resume("a")
    assert rows(scheduler.schedule()) == []
    assert elder.state is RequestState.WAITING
    scheduler.commit(in_flight, [1])
    plan = step(scheduler)
    assert rows(plan) == [("a", 0, 4, True)]
    assert plan.preempted == (victim,)
