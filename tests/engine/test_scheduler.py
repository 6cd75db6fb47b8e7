"""Unit tests of `engine/scheduler.py`, one rule at a time."""

from __future__ import annotations

import pytest

from pagespec import InvalidInputError
from pagespec.engine.invariants import check_state
from pagespec.engine.request import RequestState
from tests.engine.schedules import add, make_scheduler, rows, step


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


def test_a_resumed_request_leaves_a_token_of_the_budget_to_each_decode() -> None:
    scheduler = make_scheduler(budget=4, caching=False)
    older = add(scheduler, "a", 9)
    scheduler.pause("a")
    add(scheduler, "b", 2)
    step(scheduler)
    scheduler.resume("a")
    assert rows(step(scheduler)) == [("a", 0, 3, False), ("b", 2, 1, True)]
    assert older.state is RequestState.RUNNING


def test_max_num_seqs_limits_running_requests_not_rows() -> None:
    scheduler = make_scheduler(max_num_seqs=2, budget=2)
    for name in "abc":
        add(scheduler, name, 1)
    assert [row[0] for row in rows(step(scheduler))] == ["a", "b"]
    assert [row[0] for row in rows(step(scheduler))] == ["a", "b"]
    assert scheduler.queues.waiting[0].request_id == "c"


def test_the_youngest_is_preempted_and_keeps_its_outputs_and_its_place() -> None:
    scheduler = make_scheduler(num_blocks=4, caching=False)
    add(scheduler, "a", 3, 5)
    younger = add(scheduler, "b", 3, 5)
    assert len(step(scheduler)) == 2
    assert len(step(scheduler)) == 2
    plan = step(scheduler)  # a wants its third block
    assert rows(plan) == [("a", 4, 1, True)]
    assert plan.preempted == (younger.info,)
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


def test_no_request_is_preempted_without_gain() -> None:
    """`b` and `c` share their only block; taking one of them alone would free nothing (S21)."""
    scheduler = make_scheduler(num_blocks=3, block_size=4, budget=32, max_num_seqs=3)
    older = add(scheduler, "a", 7, 6, token=9)
    step(scheduler)
    add(scheduler, "b", 4, 1, token=5)
    step(scheduler)
    assert older.num_computed == 8
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
    assert plan.preempted == (victim.info,)


def test_an_early_stop_discards_tokens_in_flight() -> None:
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
    assert scheduler.blocks.num_available == 16


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
def test_an_abort_in_any_state_releases_all_blocks(state: str) -> None:
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
    assert scheduler.blocks.num_available == 16


def test_a_request_that_can_never_fit_is_refused_and_nothing_changes() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, "fits", 5, 4)
    with pytest.raises(InvalidInputError, match=r"needs 5 KV blocks of 2 tokens.*num_blocks = 4"):
        add(scheduler, "x", 6, 4)
    with pytest.raises(InvalidInputError, match="in use"):
        add(scheduler, "fits", 1, 1)
    assert list(scheduler.requests) == ["fits"]


def test_no_request_is_admitted_behind_a_blocked_one() -> None:
    scheduler = make_scheduler(num_blocks=4, caching=False)
    add(scheduler, "a", 4, 4)
    step(scheduler)
    add(scheduler, "b", 6, 1)
    add(scheduler, "c", 1, 1)
    assert [row[0] for row in rows(step(scheduler))] == ["a"]


def test_no_younger_request_allocates_while_an_older_one_is_short_of_blocks() -> None:
    scheduler = make_scheduler(num_blocks=11, block_size=1, max_num_seqs=3, budget=4, caching=False)
    add(scheduler, "older", 6, 1)
    scheduler.pause("older")
    add(scheduler, "b", 1, 8)
    add(scheduler, "c", 1, 8)
    step(scheduler)
    scheduler.resume("older")
    for start in (0, 2):
        assert rows(step(scheduler))[0] == ("older", start, 2, False)
    plan = step(scheduler)  # one block is left, the older wants two
    assert rows(plan) == [("older", 4, 1, False)]
    assert plan.preempted == ()


def test_stop_reasons_have_a_fixed_precedence() -> None:
    scheduler = make_scheduler()
    both = add(scheduler, "a", 1, 1, stop_token_ids=frozenset({1}), on_token=lambda token: True)
    text = add(scheduler, "b", 1, 1, on_token=lambda token: True)
    length = add(scheduler, "c", 1, 1, on_token=lambda token: False)
    step(scheduler)
    assert [r.finish_reason for r in (both, text, length)] == ["stop", "stop", "length"]


def test_on_token_sees_every_output_once_and_nothing_else() -> None:
    """Neither a chunk that samples nothing nor the fast path of decodes may leave it out."""
    scheduler = make_scheduler(budget=4)
    seen: list[int] = []
    add(scheduler, "a", 6, 3, on_token=lambda token: seen.append(token) or False)
    for token in (5, 6, 7, 8):  # the first step is a chunk, and its token is not used
        step(scheduler, token)
    assert seen == [6, 7, 8]


def test_hits_are_counted_at_the_first_admission_only() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, "a", 5)
    step(scheduler)
    second = add(scheduler, "b", 7, token=ord("a"))
    step(scheduler)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    scheduler.pause("b")
    scheduler.resume("b")
    step(scheduler)
    assert second.num_dispatched > 6, "it found its own blocks too"
    assert second.num_cached_tokens == 4


def test_every_preemption_is_counted() -> None:
    scheduler = make_scheduler(num_blocks=4, caching=False)
    older, younger = add(scheduler, "a", 3, 6), add(scheduler, "b", 3, 6)
    for count in (1, 2):
        while not step(scheduler).preempted:
            pass
        assert younger.num_preemptions == count
        scheduler.pause("a")
        step(scheduler)
        scheduler.resume("a")
    assert older.num_preemptions == 0


def test_a_reset_of_the_prefix_cache_preempts_running_requests() -> None:
    scheduler = make_scheduler(pipeline_depth=1, max_num_seqs=2)
    older, younger = add(scheduler, "a", 5), add(scheduler, "b", 3)
    waiter, paused = add(scheduler, "c", 3), add(scheduler, "d", 3)
    scheduler.pause("d")
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError, match="1 steps are in flight"):
        scheduler.reset_prefix_cache()
    assert scheduler.queues.running == [older, younger]
    scheduler.commit(plan, [7, 8])
    scheduler.reset_prefix_cache()
    check_state(scheduler)
    assert scheduler.queues.waiting == [older, younger, waiter]
    assert scheduler.blocks.free == list(range(15, -1, -1))
    assert not scheduler.blocks.index
    assert (older.output_token_ids, younger.output_token_ids) == ([7], [8])
    assert (older.num_computed, older.block_table, older.num_preemptions) == (0, [], 1)
    assert paused.state is RequestState.PAUSED
    plan = step(scheduler)
    assert rows(plan) == [("a", 0, 6, True), ("b", 0, 4, True)]
    assert sorted(plan.released) == ["a", "b"]


def test_the_queues_count_preemptions_and_hits() -> None:
    scheduler = make_scheduler()
    queues = scheduler.queues

    def counts() -> tuple[int, int, int]:
        return queues.num_preemptions, queues.num_queried_tokens, queues.num_hit_tokens

    add(scheduler, "a", 5)
    step(scheduler)
    assert counts() == (0, 5, 0)
    add(scheduler, "b", 7, token=ord("a"))
    add(scheduler, "c", 7, token=ord("a"), reads_cache=False)
    step(scheduler)
    assert counts() == (0, 12, 4)
    scheduler.reset_prefix_cache()
    assert counts() == (3, 12, 4)
    step(scheduler)
    assert counts() == (3, 27, 4), "each with the token it has sampled, or two"
    scheduler.reset("error")
    assert counts() == (3, 27, 4)
    assert not queues.waiting


def test_a_disabled_cache_counts_no_queries() -> None:
    scheduler = make_scheduler(caching=False)
    add(scheduler, "a", 5)
    step(scheduler)
    assert (scheduler.queues.num_queried_tokens, scheduler.queues.num_hit_tokens) == (0, 0)


def refusal(act) -> tuple[str, object, str]:
    with pytest.raises(InvalidInputError) as caught:
        act()
    return caught.value.field, caught.value.value, caught.value.limit


def test_refusals_name_the_field_the_value_and_the_limit() -> None:
    scheduler = make_scheduler(num_blocks=2)
    add(scheduler, "a", 1)
    pool = "needs 3 KV blocks of 2 tokens, the pool has num_blocks = 2"
    limit = (
        "must be at least max_num_seqs = 4, so that every running request can decode one token "
        "per step"
    )
    assert [
        refusal(lambda: add(scheduler, "a", 1)),
        refusal(lambda: add(scheduler, "b", 0)),
        refusal(lambda: add(scheduler, "b", 3, 0)),
        refusal(lambda: add(scheduler, "b", 3, 3)),
        refusal(lambda: scheduler.pause("b")),
        refusal(lambda: make_scheduler(max_num_seqs=0)),
        refusal(lambda: make_scheduler(max_num_seqs=4, budget=3)),
    ] == [
        ("request_id", "a", "is in use"),
        ("prompt", "0 tokens", "must have 1 to 3 tokens"),
        ("prompt", "3 tokens", "must have 1 to 2 tokens"),
        ("prompt + max_tokens", 6, pool),
        ("request_id", "b", "is not a live request"),
        ("max_num_seqs", 0, "must be 1 or more"),
        ("max_num_batched_tokens", 3, limit),
    ]
