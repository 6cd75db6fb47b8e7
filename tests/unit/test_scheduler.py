"""Schedules by hand: the rules of `engine/scheduler.py`, one at a time."""

from __future__ import annotations

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.invariants import check_plan, check_state
from pagespec.engine.plan import StepPlan
from pagespec.engine.policy import Policy
from pagespec.engine.request import Request, RequestState
from pagespec.engine.scheduler import Scheduler


def make_scheduler(num_blocks=16, block_size=2, max_num_seqs=4, budget=16, **more) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size, enable_prefix_caching=more.pop("caching", True)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **more,
    )


def add(
    scheduler: Scheduler, name: str, num_prompt_tokens: int, num_outputs=4, token=None, **more
) -> Request:
    first = ord(name[0]) if token is None else token
    request = Request(
        name,
        [first] * num_prompt_tokens,
        SamplingParams(),
        max_num_tokens=num_prompt_tokens + num_outputs,
        **more,
    )
    scheduler.add(request)
    return request


def rows(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(r.request_id, start, n, sampled) for r, start, n, sampled in plan.rows()]


def step(scheduler: Scheduler, token: int = 1) -> StepPlan:
    plan = scheduler.schedule()
    check_state(scheduler)
    check_plan(scheduler, plan)
    if plan.requests:
        scheduler.commit(plan, [token] * plan.num_sampled)
        check_state(scheduler)
    return plan


def test_a_long_prompt_is_cut_into_chunks_and_sampled_once_at_its_end() -> None:
    scheduler = make_scheduler(budget=4)
    add(scheduler, "a", 10, 2)
    assert rows(step(scheduler)) == [("a", 0, 4, False)]
    assert rows(step(scheduler)) == [("a", 4, 4, False)]
    assert rows(step(scheduler)) == [("a", 8, 2, True)]
    assert rows(step(scheduler)) == [("a", 10, 1, True)]
    assert not scheduler.has_work


def test_decodes_and_prompts_share_a_step_and_decodes_keep_their_token() -> None:
    scheduler = make_scheduler(budget=5)
    add(scheduler, "a", 2)
    step(scheduler)
    add(scheduler, "b", 9)
    assert rows(step(scheduler)) == [("a", 2, 1, True), ("b", 0, 4, False)]
    assert rows(step(scheduler)) == [("a", 3, 1, True), ("b", 4, 4, False)]


def test_a_resumed_elder_does_not_take_the_token_of_a_younger_decode() -> None:
    scheduler = make_scheduler(budget=4, caching=False)
    elder = add(scheduler, "a", 9)
    scheduler.pause("a")
    add(scheduler, "b", 2)
    step(scheduler)
    scheduler.resume("a")
    assert rows(step(scheduler)) == [("a", 0, 3, False), ("b", 2, 1, True)]
    assert elder.state is RequestState.RUNNING


def test_the_cap_is_on_the_running_set_not_on_a_step() -> None:
    scheduler = make_scheduler(max_num_seqs=2, budget=2)
    for name in "abc":
        add(scheduler, name, 1)
    assert [row[0] for row in rows(step(scheduler))] == ["a", "b"]
    assert [row[0] for row in rows(step(scheduler))] == ["a", "b"]
    assert scheduler.waiting[0].request_id == "c"


def test_the_youngest_is_preempted_and_keeps_its_outputs_and_its_place() -> None:
    scheduler = make_scheduler(num_blocks=4, caching=False)
    add(scheduler, "a", 3, 5)
    younger = add(scheduler, "b", 3, 5)
    assert len(step(scheduler)) == 2
    assert len(step(scheduler)) == 2
    plan = step(scheduler)  # a wants its third block
    assert rows(plan) == [("a", 4, 1, True)]
    assert plan.preempted == (younger,)
    assert younger.state is RequestState.WAITING
    assert younger.output_token_ids == [1, 1]
    assert (younger.num_computed, younger.block_table) == (0, [])
    for _ in range(20):
        step(scheduler)
    assert younger.output_token_ids == [1] * 5


def test_a_preempted_request_finds_its_blocks_again_in_the_cache() -> None:
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, "a", 4, 5)
    younger = add(scheduler, "b", 4, 2)
    step(scheduler)
    scheduler.pause("b")
    assert younger.block_table == []
    scheduler.resume("b")
    plan = scheduler.schedule()
    assert rows(plan)[1] == ("b", 4, 1, True), "both full blocks were hits, one token to compute"


def test_nobody_is_preempted_in_vain() -> None:
    """`b` and `c` share their only block; taking one of them alone would free nothing (S21)."""
    scheduler = make_scheduler(num_blocks=3, block_size=4, budget=32, max_num_seqs=3)
    elder = add(scheduler, "a", 7, 6, token=9)
    step(scheduler)
    add(scheduler, "b", 4, 1, token=5)
    step(scheduler)
    assert elder.num_computed == 8
    b, c = (add(scheduler, name, 5, 3, token=5) for name in "bc")
    plan = scheduler.schedule()  # `a` needs a third block; the cached one is evicted for it
    assert rows(plan) == [("a", 8, 1, True)]
    assert plan.preempted == ()
    assert b.num_preemptions == c.num_preemptions == 0


def test_a_victim_in_flight_is_held_until_it_has_drained() -> None:
    scheduler = make_scheduler(num_blocks=4, caching=False, pipeline_depth=1)
    add(scheduler, "a", 3, 5)
    victim = add(scheduler, "b", 3, 5)
    plans = [scheduler.schedule(), scheduler.schedule()]
    scheduler.commit(plans[0], [1, 1])
    held = scheduler.schedule()
    assert rows(held) == []
    assert victim.block_table != [], "S28: a step in flight still writes them"
    scheduler.commit(plans[1], [1, 1])
    plan = scheduler.schedule()
    assert rows(plan) == [("a", 4, 1, True)]
    assert plan.preempted == (victim,)


def test_steps_overlap_and_an_early_stop_drops_what_is_in_flight() -> None:
    scheduler = make_scheduler(pipeline_depth=1)
    request = add(scheduler, "a", 2, 5, stop_token_ids=frozenset({7}))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert rows(second) == [("a", 2, 1, True)], "scheduled before its input token is known"
    assert scheduler.commit(first, [7]) == [request]
    assert request.finish_reason == "stop"
    assert request.block_table, "still written by the step in flight"
    assert scheduler.commit(second, [3]) == []
    assert request.output_token_ids == [7]
    assert request.block_table == []
    assert scheduler.blocks.num_available_blocks == 16


def test_the_last_token_is_not_fed_back_even_when_steps_overlap() -> None:
    scheduler = make_scheduler(pipeline_depth=2)
    request = add(scheduler, "a", 1, 2)
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert len(scheduler.schedule()) == 0
    for plan in plans:
        scheduler.commit(plan, [3])
    assert request.output_token_ids == [3, 3]
    assert request.finish_reason == "length"


def test_commits_come_in_order_and_with_the_right_count() -> None:
    scheduler = make_scheduler(pipeline_depth=1)
    add(scheduler, "a", 2)
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(ValueError, match="not the oldest"):
        scheduler.commit(second, [1])
    with pytest.raises(ValueError, match="2 tokens for 1"):
        scheduler.commit(first, [1, 2])
    scheduler.commit(first, [1])
    scheduler.commit(second, [1])


@pytest.mark.parametrize("state", ["waiting", "running", "paused", "in flight"])
def test_abort_from_any_state_gives_all_blocks_back(state: str) -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 5)
    if state in ("running", "paused"):
        step(scheduler)
    plan = scheduler.schedule() if state == "in flight" else None
    if state == "paused":
        scheduler.pause("a")
    assert scheduler.abort("a") is request
    assert request.finish_reason == "abort"
    assert scheduler.abort("a") is None, "a second abort is a no-op (S26)"
    if plan is not None:
        scheduler.commit(plan, [1])
    assert request.output_token_ids == ([1] if state in ("running", "paused") else [])
    check_state(scheduler)
    assert scheduler.blocks.num_available_blocks == 16


def test_a_request_that_can_never_fit_is_refused_and_nothing_changes() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, "fits", 5, 4)
    with pytest.raises(InvalidInputError, match=r"needs 5 KV blocks of 2 tokens.*num_blocks = 4"):
        add(scheduler, "x", 6, 4)
    with pytest.raises(InvalidInputError, match="in use"):
        add(scheduler, "fits", 1, 1)
    assert list(scheduler.requests) == ["fits"]


def test_a_blocked_head_lets_nobody_pass() -> None:
    scheduler = make_scheduler(num_blocks=4, caching=False)
    add(scheduler, "a", 4, 4)
    step(scheduler)
    add(scheduler, "b", 6, 1)
    add(scheduler, "c", 1, 1)
    assert [row[0] for row in rows(step(scheduler))] == ["a"]


def test_no_younger_takes_blocks_in_a_step_in_which_an_elder_wanted_some() -> None:
    scheduler = make_scheduler(num_blocks=11, block_size=1, max_num_seqs=3, budget=4, caching=False)
    add(scheduler, "elder", 6, 1)
    scheduler.pause("elder")
    add(scheduler, "b", 1, 8)
    add(scheduler, "c", 1, 8)
    step(scheduler)
    scheduler.resume("elder")
    for start in (0, 2):
        assert rows(step(scheduler))[0] == ("elder", start, 2, False)
    plan = step(scheduler)  # one block is left, the elder wants two
    assert rows(plan) == [("elder", 4, 1, False)]
    assert plan.preempted == ()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", ["long", "a", "b", "c"]), ("shortest_first", ["a", "b", "long", "c"])],
)
def test_later_arrivals_overtake_at_most_k_times(policy: str, expected: list[str]) -> None:
    scheduler = make_scheduler(
        num_blocks=400, max_num_seqs=1, budget=600, policy=Policy(policy, max_overtakes=3)
    )
    add(scheduler, "long", 500, 1)
    for name in "abc":
        add(scheduler, name, 1, 1)
    order = []
    while scheduler.has_work:
        order += [row[0] for row in rows(step(scheduler))]
    assert order == expected


def test_priorities_go_first_but_age() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy=Policy("priority", max_overtakes=3))
    add(scheduler, "low", 1, 1, priority=5)
    for name in "abc":
        add(scheduler, name, 1, 1)
    order = []
    while scheduler.has_work:
        order += [row[0] for row in rows(step(scheduler))]
    assert order == ["a", "b", "low", "c"]


def test_stop_reasons_have_a_fixed_precedence() -> None:
    scheduler = make_scheduler()
    both = add(scheduler, "a", 1, 1, stop_token_ids=frozenset({1}), on_token=lambda token: True)
    text = add(scheduler, "b", 1, 1, on_token=lambda token: True)
    length = add(scheduler, "c", 1, 1, on_token=lambda token: False)
    step(scheduler)
    assert [r.finish_reason for r in (both, text, length)] == ["stop", "stop", "length"]
