"""Unit tests of several continuations of one prompt: shared blocks, copies, and waiting."""

from __future__ import annotations

from pagespec import SamplingParams
from pagespec.engine.core import Engine
from pagespec.engine.request import Request, RequestState
from pagespec.engine.scheduler import Scheduler
from spec import replay
from tests.engine.schedules import add, make_scheduler, rows, step
from tests.support.content_runner import ContentRunner, stream_alone


def add_group(
    scheduler: Scheduler, name: str, num_prompt_tokens: int, num_siblings: int, num_outputs=4
) -> list[Request]:
    leader = Request(
        name,
        [ord(name)] * num_prompt_tokens,
        SamplingParams(),
        max_num_tokens=num_prompt_tokens + num_outputs,
    )
    siblings = [leader.sibling(f"{name}{i}", i, None) for i in range(1, num_siblings + 1)]
    scheduler.add(leader, siblings)
    return [leader, *siblings]


def states(requests: list[Request]) -> set[str]:
    return {request.state.value for request in requests}


def test_a_prompt_is_computed_once_and_its_last_block_copied() -> None:
    scheduler = make_scheduler(block_size=4)
    leader, *siblings = add_group(scheduler, "a", 6, 2)
    assert rows(step(scheduler)) == [("a", 0, 6, True)]
    plan = step(scheduler)
    assert rows(plan) == [("a", 6, 1, True), ("a1", 5, 1, True), ("a2", 5, 1, True)]
    assert plan.is_decode_only, "so that it is a captured graph's"
    assert [sibling.block_table for sibling in siblings] == [[0, 2], [0, 3]]
    assert plan.copies == ((1, 2), (1, 3))
    assert plan.tables == {1: (0, 2), 2: (0, 3)}
    assert scheduler.blocks.ref_counts[:4] == [3, 1, 1, 1]
    assert [sibling.num_cached_tokens for sibling in siblings] == [5, 5]
    assert leader.block_table == [0, 1]


def test_full_blocks_are_shared_and_nothing_is_copied() -> None:
    scheduler = make_scheduler(block_size=4, caching=False)
    add_group(scheduler, "a", 5, 1)
    step(scheduler)
    plan = step(scheduler)
    assert (plan.copies, plan.tables) == ((), {1: (0, 2)})


def test_a_full_last_block_is_copied_for_the_token_that_each_computes() -> None:
    scheduler = make_scheduler(block_size=4)
    add_group(scheduler, "a", 4, 1)
    step(scheduler)
    plan = step(scheduler)
    assert rows(plan)[1] == ("a1", 3, 1, True)
    assert plan.copies == ((0, 2),)


def test_no_request_behind_the_siblings_waits_for_the_prompt() -> None:
    scheduler = make_scheduler(budget=4)
    add_group(scheduler, "a", 9, 1)
    add(scheduler, "b", 1)
    assert rows(step(scheduler)) == [("a", 0, 4, False)]
    step(scheduler)
    plan = step(scheduler)
    assert rows(plan) == [("a", 8, 1, True), ("b", 0, 1, True)], "b is served, the sibling pends"
    assert [row[0] for row in rows(step(scheduler))] == ["a", "a1", "b"]


def test_siblings_wait_before_requests_that_arrived_later() -> None:
    scheduler = make_scheduler(budget=4, max_num_seqs=2)
    add_group(scheduler, "a", 8, 1)
    add(scheduler, "b", 1)
    assert rows(step(scheduler)) == [("a", 0, 4, False)]
    assert rows(step(scheduler)) == [("a", 4, 4, True)]
    assert [row[0] for row in rows(step(scheduler))] == ["a", "a1"], "b arrived behind the group"


def test_siblings_of_a_leader_that_was_given_up_compute_the_prompt() -> None:
    scheduler = make_scheduler()
    leader, *siblings = add_group(scheduler, "a", 4, 2)
    scheduler.abort("a")
    assert leader.finish_reason == "abort"
    assert states(siblings) == {"waiting"}
    assert rows(step(scheduler)) == [("a1", 0, 4, True), ("a2", 0, 4, True)]


def test_a_leader_that_is_preempted_computes_it_again_and_its_siblings_pend() -> None:
    scheduler = make_scheduler(num_blocks=5, budget=4, caching=False)
    add(scheduler, "b", 3, 6)
    leader, sibling = add_group(scheduler, "a", 6, 1, num_outputs=2)
    while not leader.num_preemptions:
        step(scheduler)
    assert (leader.state, sibling.state) == (RequestState.WAITING, RequestState.PENDING)
    while scheduler.has_work:
        step(scheduler)
    assert states([leader, sibling]) == {"finished"}


def test_a_pending_sibling_may_be_given_up_paused_and_resumed() -> None:
    scheduler = make_scheduler(budget=4)
    _, *siblings = add_group(scheduler, "a", 9, 3)
    step(scheduler)
    scheduler.abort("a1")
    scheduler.pause("a2")
    step(scheduler)
    step(scheduler)
    assert [s.state.value for s in siblings] == ["finished", "paused", "waiting"]
    scheduler.resume("a2")
    assert [row[0] for row in rows(step(scheduler))] == ["a", "a2", "a3"]


def test_a_sibling_shares_with_an_older_one_when_the_leader_is_gone() -> None:
    scheduler = make_scheduler(caching=False, max_num_seqs=2, budget=8)
    add_group(scheduler, "a", 4, 2, num_outputs=4)
    step(scheduler)
    step(scheduler)
    scheduler.abort("a")
    plan = step(scheduler)
    assert rows(plan) == [("a1", 4, 1, True), ("a2", 3, 1, True)]
    assert len(plan.copies) == 1, "of what a1 has of the prompt's last block"


def test_siblings_are_the_same_as_requests_alone_and_their_trace_is_accepted(tmp_path) -> None:
    for caching in (True, False):
        for depth in (0, 1):
            for num_tokens in range(1, 10):
                scheduler = make_scheduler(
                    num_blocks=12, block_size=4, caching=caching, pipeline_depth=depth
                )
                runner = ContentRunner(
                    num_blocks=12, block_size=4, vocab_size=9, pipeline_depth=depth
                )
                path = tmp_path / "trace.jsonl"
                engine = Engine(scheduler, runner, trace=path, check_invariants=True)
                leader = Request(
                    "a", [512] * num_tokens, SamplingParams(), max_num_tokens=num_tokens + 6
                )
                siblings = [leader.sibling(f"a{i}", i, None) for i in (1, 2, 3)]
                engine.add(leader, siblings=siblings)
                while engine.has_work:
                    engine.step()
                for request in (leader, *siblings):
                    assert request.output_token_ids == stream_alone(
                        [512] * num_tokens, num_tokens + 6, seed=request.seed, vocab_size=9
                    )
                verdict = replay.check(path.read_text().splitlines())
                assert (verdict.property_id, verdict.num_requests) == ("", 4)


def test_nothing_is_shared_with_a_younger_one_which_the_admission_may_preempt() -> None:
    scheduler = make_scheduler(num_blocks=3, caching=False)
    _, older, younger = add_group(scheduler, "a", 4, 2, num_outputs=3)
    scheduler.pause("a1")
    step(scheduler)
    scheduler.abort("a")
    step(scheduler)
    step(scheduler)
    assert len(younger.block_table) == 3
    scheduler.resume("a1")
    plan = step(scheduler)
    assert plan.preempted == (younger.info,)
    assert (rows(plan), plan.copies) == ([("a1", 0, 4, True)], ())
    assert len(older.block_table) == 2
