"""Unit tests of state slots: the slot of each interval, cache hits, and rejected requests."""

from __future__ import annotations

import pytest

from pagespec import InvalidInputError
from pagespec.engine.invariants import RunnerView
from pagespec.engine.planner import PlanAccount
from pagespec.engine.scheduler import Scheduler
from tests.engine.schedules import add, make_scheduler, rows, step


def with_states(num_state_slots: int = 5, state_interval: int = 4, **more) -> Scheduler:
    return make_scheduler(num_state_slots=num_state_slots, state_interval=state_interval, **more)


def test_without_recurrent_layers_a_plan_has_no_states() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    plan = step(scheduler)
    assert (plan.state_tables, plan.new_state_slots, scheduler.blocks.states) == ({}, {}, None)


def test_each_interval_has_a_slot_and_a_checkpoint_is_left_behind() -> None:
    scheduler = with_states()
    states = scheduler.blocks.states
    a = add(scheduler, "a", 6, 8)
    plan = step(scheduler)
    assert (plan.state_tables, plan.new_state_slots) == ({0: (0, 1)}, {})
    assert a.state_table == [-1, 1], "S44: what is settled goes beyond the first interval"
    assert list(states.lru) == [0], "S46: its end is a checkpoint"
    step(scheduler)
    assert a.num_computed == 7
    plan = step(scheduler)
    assert plan.new_state_slots == {}, "the last position of the interval"
    plan = step(scheduler)
    assert (plan.new_state_slots, a.state_table) == ({0: (2,)}, [-1, -1, 2])
    assert list(states.lru) == [0, 1]


def test_a_slot_is_released_only_after_the_next_position_is_settled() -> None:
    scheduler = with_states(pipeline_depth=1)
    a = add(scheduler, "a", 4, 4)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.new_state_slots == {0: (1,)}
    scheduler.commit(first, [1])
    assert a.state_table == [0, 1], "S47: the step in flight reads the first"
    scheduler.commit(second, [1])
    assert a.state_table == [-1, 1]


def test_a_hit_ends_at_the_longest_checkpoint() -> None:
    scheduler = with_states()
    add(scheduler, "a", 7, 1)
    step(scheduler)
    assert scheduler.blocks.states.num_available == 5
    b = add(scheduler, "b", 9, 4, token=ord("a"))
    plan = scheduler.schedule()
    assert rows(plan) == [("b", 4, 5, True)], "S49: three blocks are cached, the state after two"
    assert plan.state_tables[0][0] == 0, "the checkpoint, which is only read"
    assert scheduler.blocks.states.ref_counts[0] == 1
    scheduler.commit(plan, [1])
    assert b.state_table[:1] == [-1]
    assert scheduler.blocks.states.ref_counts[0] == 0


def test_without_a_slot_to_spare_the_state_moves_on_in_place() -> None:
    scheduler = with_states(3, max_num_seqs=2)
    a = add(scheduler, "a", 15, 2)
    b = add(scheduler, "b", 3, 4)
    plan = step(scheduler)
    assert plan.state_tables == {0: (0, 1, 2, 2)}, "a takes all there are, and b waits"
    assert (a.state_table, b.num_admissions) == ([-1, -1, -1, 2], 0)
    assert len(scheduler.blocks.states.index) == 2, "of three ends of intervals two are kept"
    assert step(scheduler).state_tables == {1: (0,)}


def test_without_a_cache_one_slot_is_enough() -> None:
    scheduler = with_states(caching=False)
    a = add(scheduler, "a", 11, 4)
    assert step(scheduler).state_tables == {0: (0, 0, 0)}
    assert a.state_table == [-1, -1, 0]
    assert step(scheduler).new_state_slots == {}
    assert step(scheduler).new_state_slots == {0: (0,)}


def test_a_request_without_a_slot_is_refused_and_none_is_preempted() -> None:
    scheduler = with_states(3, max_num_seqs=2)
    account = scheduler.account = PlanAccount()
    add(scheduler, "a", 11, 2)
    add(scheduler, "b", 3, 4)
    plan = step(scheduler)
    assert (account.refused, plan.preempted) == ([("b", "state slots")], ())
    step(scheduler)
    assert account.refused == []


def test_a_checkpoint_that_is_taken_loses_its_key() -> None:
    scheduler = with_states(2, max_num_seqs=1)
    states = scheduler.blocks.states
    add(scheduler, "a", 6, 1)
    step(scheduler)
    assert (list(states.lru), states.free) == ([0], [1])
    add(scheduler, "b", 6, 1)
    plan = step(scheduler)
    assert plan.state_tables == {0: (1, 0)}, "S52: the free one first"
    assert list(states.index.values()) == [1]


def test_a_second_state_for_the_same_tokens_is_no_checkpoint() -> None:
    scheduler = with_states()
    states = scheduler.blocks.states
    add(scheduler, "a", 6, 1)
    add(scheduler, "b", 6, 1, token=ord("a"))
    step(scheduler)
    assert (len(states.index), len(states.lru), len(states.free)) == (1, 1, 4)


def test_siblings_share_no_state_and_so_no_blocks() -> None:
    scheduler = with_states()
    request = add(scheduler, "a", 1, 1)  # ends at once; the group is another
    step(scheduler)
    assert request.finish_reason == "length"
    leader = add(scheduler, "b", 6, 4)
    scheduler.abort("b")
    leader = leader.sibling("c", 0, None)
    leader.leader = None
    sibling = leader.sibling("d", 0, None)
    scheduler.add(leader, [sibling])
    step(scheduler)
    plan = step(scheduler)
    assert plan.copies == ()
    assert rows(plan)[1] == ("d", 4, 2, True), "from the checkpoint on"


def test_a_reset_forgets_all_states() -> None:
    scheduler = with_states()
    a = add(scheduler, "a", 6, 8)
    step(scheduler)
    scheduler.reset_prefix_cache()
    states = scheduler.blocks.states
    assert (a.state_table, states.num_available, states.index) == ([], 5, {})
    step(scheduler)
    scheduler.reset("error")
    assert (a.state_table, scheduler.blocks.states.free[-1]) == ([], 0)


def test_a_runner_rebuilds_the_tables_from_the_plans_alone() -> None:
    scheduler, view = with_states(), RunnerView()
    add(scheduler, "a", 6, 8)
    add(scheduler, "b", 3, 8)
    while scheduler.has_work:
        plan = scheduler.schedule()
        view.check(scheduler, plan)
        scheduler.commit(plan, [1] * plan.num_sampled)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_state_slots": 4}, "num_state_slots"),
        ({"state_interval": 3}, "state_interval"),
        ({"state_interval": 0}, "state_interval"),
    ],
)
def test_too_few_slots_and_broken_intervals_are_refused(settings, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        with_states(**settings)
    assert caught.value.field == field
