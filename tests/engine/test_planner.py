"""Unit tests of `engine/planner.py`: edge cases, most of them found by mutmut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pagespec.engine.planner import choose_victims
from pagespec.engine.request import RequestState
from tests.engine.schedules import add, make_scheduler, rows, step


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


def test_a_plan_has_whole_tables_of_the_admitted_and_growth_of_the_others() -> None:
    scheduler = make_scheduler()
    a = add(scheduler, "a", 5)
    plan = step(scheduler)
    assert (plan.tables, plan.new_blocks) == ({0: (0, 1, 2)}, {})
    b = add(scheduler, "b", 7, token=ord("a"))
    plan = step(scheduler)
    assert plan.tables == {1: (0, 1, 3, 4)}, "two hits, then two of its own"
    assert plan.new_blocks == {}
    plan = step(scheduler)
    assert (plan.tables, plan.new_blocks) == ({}, {0: (5,)}), "a grows"
    assert (a.block_table, b.block_table) == ([0, 1, 2, 5], [0, 1, 3, 4])
    assert step(scheduler).new_blocks == {1: (6,)}


def test_hits_and_one_block_more_are_one_whole_table() -> None:
    """A request is paused when its blocks are full and resumed when all of them are cached. It
    needs just one more block, which the fast path allocates."""
    scheduler = make_scheduler(num_blocks=8)
    add(scheduler, "a", 4, 8)
    step(scheduler)
    b = add(scheduler, "b", 4, 8, token=ord("a"))
    step(scheduler)
    assert len(b.token_ids) == 5, "its two full blocks are a's; its third will be its own"
    scheduler.pause("b")
    step(scheduler)
    scheduler.resume("b")
    plan = step(scheduler)
    row = [info.request_id for info in plan.requests].index("b")
    assert plan.tables == {row: tuple(b.block_table)}
    assert len(b.block_table) == 3
    assert row not in plan.new_blocks


def test_a_plan_releases_requests_that_ended_since_the_previous_plan() -> None:
    scheduler = make_scheduler(num_blocks=8)
    for name in "abcd":
        add(scheduler, name, 2, 1 if name == "d" else 5)
    assert step(scheduler).released == ()
    scheduler.abort("a")
    scheduler.pause("b")
    plan = step(scheduler)
    assert plan.released == ("d", "a", "b"), "d had its one token"
    scheduler.resume("b")
    plan = step(scheduler)
    assert plan.released == ()
    assert list(plan.tables) == [0], "b, whole"


def test_the_token_ids_of_a_plan_are_settled_ones_or_places_in_the_step_before() -> None:
    scheduler = make_scheduler(pipeline_depth=1)
    add(scheduler, "a", 3)
    add(scheduler, "b", 2)
    assert scheduler.schedule().token_ids == (97, 97, 97, 98, 98)
    plan = scheduler.schedule()
    assert plan.token_ids == (-1, -2), "the step before was no decode: a row is not its place"
    scheduler.commit(scheduler.in_flight[0].plan, [5, 6])
    assert scheduler.schedule().token_ids == range(-1, -3, -1)
    scheduler.commit(scheduler.in_flight[0].plan, [7, 8])
    scheduler.abort("a")
    assert scheduler.schedule().token_ids == (-2,), "b was the second row"


def test_a_plan_does_not_change_with_its_requests() -> None:
    scheduler = make_scheduler()
    a = add(scheduler, "a", 5)
    plan = scheduler.schedule()
    before = (plan.token_ids, dict(plan.tables))
    scheduler.commit(plan, [1])
    step(scheduler)
    scheduler.abort("a")
    assert not a.block_table
    assert (plan.token_ids, plan.tables) == before


def test_a_plan_says_whether_every_row_is_a_decode() -> None:
    scheduler = make_scheduler(budget=5)
    assert scheduler.schedule().is_decode_only is False, "it has no rows"
    add(scheduler, "a", 2)
    assert step(scheduler).is_decode_only is False
    assert step(scheduler).is_decode_only is True
    add(scheduler, "b", 5, 1)
    assert rows(step(scheduler))[1] == ("b", 0, 4, False)
    assert step(scheduler).is_decode_only is True, "the last token of a prompt is one like it"


def test_a_request_without_tokens_in_a_step_takes_no_blocks() -> None:
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


def test_no_younger_takes_blocks_in_a_step_in_which_an_older_was_refused() -> None:
    scheduler = make_scheduler(num_blocks=8, caching=False)
    add(scheduler, "a", 7)
    older = add(scheduler, "b", 9)
    scheduler.pause("b")
    add(scheduler, "c", 2)
    step(scheduler)
    scheduler.resume("b")
    assert scheduler.blocks.num_available == 3, "and one of c's: b wants five"
    assert rows(step(scheduler)) == [("a", 7, 1, True)]
    assert older.state is RequestState.WAITING


def test_no_request_is_admitted_into_blocks_that_a_step_in_flight_writes() -> None:
    scheduler = make_scheduler(num_blocks=4, caching=False, pipeline_depth=1)
    older = add(scheduler, "a", 4)
    scheduler.pause("a")
    victim = add(scheduler, "b", 5)
    in_flight = scheduler.schedule()
    scheduler.resume("a")
    assert rows(scheduler.schedule()) == []
    assert older.state is RequestState.WAITING
    scheduler.commit(in_flight, [1])
    plan = step(scheduler)
    assert rows(plan) == [("a", 0, 4, True)]
    assert plan.preempted == (victim.info,)


def test_a_request_after_a_victim_is_served_although_an_older_one_waits() -> None:
    """The victim leaves the running set while it is walked: the place in it is another one then."""
    scheduler = make_scheduler(num_blocks=4, block_size=1)
    add(scheduler, "a", 2, 3)
    scheduler.pause("a")
    victim = add(scheduler, "b", 1)
    add(scheduler, "c", 1)
    scheduler.pause("c")
    add(scheduler, "d", 1, token=ord("a"))
    step(scheduler)
    scheduler.resume("a")
    assert rows(step(scheduler)) == [("a", 1, 1, True), ("b", 1, 1, True)], "no block for d"
    scheduler.resume("c")
    plan = step(scheduler)
    assert plan.preempted == (victim.info,), "d shares its only block with a"
    assert rows(plan) == [("a", 2, 1, True), ("d", 1, 1, True)]


def test_a_readmitted_request_gets_its_tokens_even_in_an_unchanged_batch() -> None:
    """A runner may have forgotten what it sampled for a request that has left."""
    scheduler = make_scheduler(block_size=1)
    add(scheduler, "a", 2, needs_history=True)
    step(scheduler, 5)
    step(scheduler, 6)
    scheduler.pause("a")
    scheduler.resume("a")
    plan = scheduler.schedule()
    assert (plan.is_decode_only, plan.prefixes) == (True, {0: (97, 97, 5)})
    assert tuple(plan.token_ids) == (6,)


# The choice of victims ---------------------------------------------------------------------------


def request(rank: int, *block_table: int) -> Any:
    return SimpleNamespace(rank=rank, block_table=list(block_table))


def victims(running: list[Any], asker: Any, num_blocks: int) -> list[Any] | None:
    tables = [block for each in running for block in each.block_table]
    counts = [tables.count(block) for block in range(max(tables) + 1)]
    blocks: Any = SimpleNamespace(ref_counts=counts)
    return choose_victims(blocks, running, asker, num_blocks)


def test_a_victim_whose_blocks_all_stay_in_use_is_not_preempted() -> None:
    """The youngest shares its blocks with the oldest, which stays."""
    oldest, asker, owner, sharer = (
        request(0, 0, 1),
        request(1, 2),
        request(2, 3),
        request(3, 0, 1),
    )
    running = [oldest, asker, owner, sharer]
    assert victims(running, asker, 1) == [owner]
    assert victims(running, asker, 2) is None


def test_victims_that_share_with_each_other_free_their_blocks_together() -> None:
    oldest, one, other = request(0, 0), request(1, 1, 2), request(2, 1, 2)
    assert victims([oldest, one, other], oldest, 1) == [other, one]


def test_as_few_of_the_youngest_as_are_enough() -> None:
    oldest, *younger = (request(rank, rank) for rank in range(4))
    assert victims([oldest, *younger], oldest, 2) == younger[:0:-1]
    assert victims([oldest, *younger], younger[-1], 1) is None
