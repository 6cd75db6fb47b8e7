"""The policy "fair": equal shares among owners, first come first served within each owner.

The tests count the tokens that the plans compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from pagespec.engine.plan import StepPlan
from pagespec.engine.policy import Policy
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from tests.engine.schedules import add, make_scheduler, rows, step

NUM_SLOTS = 4


def fair_scheduler(depth: int = 0, policy: str = "fair", **more) -> Scheduler:
    settings = {"num_blocks": 400, "max_num_seqs": NUM_SLOTS, "budget": 64}
    return make_scheduler(**settings | more, pipeline_depth=depth, policy=Policy(policy))


def flood(scheduler: Scheduler, num_requests: int, owner: str = "flood", **more) -> list[Request]:
    return [
        add(scheduler, f"{owner}{i}", 4, more.get("num_outputs", 16), owner=owner)
        for i in range(num_requests)
    ]


def overlapped(scheduler: Scheduler) -> Iterator[StepPlan]:
    """Each step is settled when ``pipeline_depth`` later ones were dispatched."""
    in_flight: list[StepPlan] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan.requests:
            in_flight.append(plan)
            yield plan
        if len(in_flight) > scheduler.pipeline_depth or not plan.requests:
            oldest = in_flight.pop(0)
            scheduler.commit(oldest, [1] * oldest.num_sampled)


def num_steps_to_first_token(policy: str, depth: int, *, num_flood: int, num_before: int) -> int:
    """Steps, from the arrival of another owner's request on, up to the one that samples its first
    token."""
    scheduler = fair_scheduler(depth, policy)
    flood(scheduler, num_flood)
    steps = overlapped(scheduler)
    for _ in range(num_before if num_flood else 0):
        next(steps)
    add(scheduler, "other", 4, 4, owner="other")
    for number, plan in enumerate(steps, 1):
        if any(name == "other" and sampled for name, _, _, sampled in rows(plan)):
            return number
    raise AssertionError("it was never served")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_before", [1, 3, 10, 17, 60])
def test_another_owner_is_served_at_once_in_a_flood(depth: int, num_before: int) -> None:
    alone = num_steps_to_first_token("fair", depth, num_flood=0, num_before=0)
    in_flood = num_steps_to_first_token("fair", depth, num_flood=200, num_before=num_before)
    assert alone == 1
    # Its place is taken from the youngest of the flood, once that has drained.
    assert in_flood <= 1 + depth
    assert num_steps_to_first_token("fcfs", depth, num_flood=200, num_before=num_before) > 100


def test_owners_with_requests_that_wait_are_served_equally() -> None:
    scheduler = fair_scheduler()
    flood(scheduler, 300)
    for _ in range(50):
        step(scheduler)
    flood(scheduler, 300, "late")
    served: Counter[str] = Counter()
    for _ in range(400):
        for name, _, num_tokens, _ in rows(step(scheduler)):
            served[name.rstrip("0123456789")] += num_tokens
    assert abs(served["flood"] - served["late"]) < 300, served
    assert sum(served.values()) > 1500, "the slots are used"


def test_a_long_answer_costs_its_owner_more_turns_than_a_short_one() -> None:
    """Owners are charged for computed, not requested, tokens: one owner's answers end early."""
    scheduler = fair_scheduler(max_num_seqs=1)
    for i in range(250):
        add(scheduler, f"short{i}", 4, 200, owner="short", stop_token_ids=frozenset({7}))
        add(scheduler, f"long{i}", 4, 20, owner="long")
    num_ended: Counter[str] = Counter()
    for number in range(1000):
        plan = scheduler.schedule()
        names = [name for name, *_ in rows(plan)]
        tokens = [7 if name.startswith("short") else 1 for name in names]
        for request in scheduler.commit(plan, tokens):
            num_ended[request.owner] += number >= 300  # the first is charged 200 until it has ended
    num_tokens = {"short": 5 * num_ended["short"], "long": 24 * num_ended["long"]}
    assert abs(num_tokens["short"] - num_tokens["long"]) < 100, num_tokens
    assert num_ended["long"] > 20


def test_one_owner_alone_is_served_first_come_first_served() -> None:
    plans = []
    for policy in ("fcfs", "fair"):
        scheduler = fair_scheduler(policy=policy, num_blocks=12)
        for i in range(30):
            add(scheduler, f"r{i}", 1 + i % 9, 1 + i * 7 % 11, owner="x")
        plans.append([])
        while scheduler.has_work:
            plan = step(scheduler)
            plans[-1].append((rows(plan), [info.request_id for info in plan.preempted]))
    assert plans[0] == plans[1]
    assert any(preempted for _, preempted in plans[0])


def test_within_an_owner_the_order_is_that_of_arrival() -> None:
    scheduler = fair_scheduler()
    for i in range(40):
        add(scheduler, f"a{i}", 1 + i % 5, 3, owner="a")
        add(scheduler, f"b{i}", 1 + i % 3, 5, owner="b")
    seen: list[str] = []
    while scheduler.has_work:
        seen += [name for name, *_ in rows(step(scheduler)) if name not in seen]
    for owner in "ab":
        numbers = [int(name[1:]) for name in seen if name[0] == owner]
        assert numbers == list(range(40))


def test_what_is_aborted_before_it_was_computed_costs_nothing() -> None:
    scheduler = fair_scheduler(max_num_seqs=1)
    add(scheduler, "first", 4, 100, owner="a")
    step(scheduler)
    for request in flood(scheduler, 50, "b"):
        scheduler.abort(request.request_id)
    flood(scheduler, 3, "c")
    add(scheduler, "back", 4, 4, owner="b")
    first: dict[str, int] = {}
    for number in range(200):
        if not scheduler.has_work:
            break
        for name, *_ in rows(step(scheduler)):
            first.setdefault(name, number)
    assert first["back"] < first["c1"], "it comes after no more than one request of the other"


def test_a_stream_of_new_owners_cannot_starve_others() -> None:
    """A new owner may precede owners that have used their share; the clock still advances."""
    scheduler = make_scheduler(
        num_blocks=400,
        max_num_seqs=1,
        budget=64,
        policy=Policy("fair", credit=10, ticks_per_token=1, reply_tokens=4),
    )
    flood(scheduler, 6, "a", num_outputs=4)
    step(scheduler)
    done: set[str] = set()
    for number in range(400):
        add(scheduler, f"n{number}", 4, 1, owner=f"n{number}")
        done |= {name for name, *_ in rows(step(scheduler)) if name.startswith("a")}
        if len(done) == 6:
            break
    assert len(done) == 6
    assert number < 200


def test_records_of_owners_that_are_gone_are_dropped() -> None:
    scheduler = make_scheduler(
        num_blocks=400,
        max_num_seqs=4,
        budget=64,
        policy=Policy("fair", credit=10, ticks_per_token=1, reply_tokens=4),
    )
    for number in range(5000):
        add(scheduler, f"n{number}", 4, 1, owner=f"n{number}")
        step(scheduler)
    assert scheduler.queues.shares is not None
    assert len(scheduler.queues.shares.accounts()) < 2100


def test_a_pause_and_an_abort_let_the_next_of_an_owner_take_its_turn() -> None:
    scheduler = fair_scheduler(max_num_seqs=1)
    for name in ("a", "b", "c", "d"):
        add(scheduler, name, 2, 2, owner="x")
    scheduler.pause("a")
    scheduler.abort("b")
    scheduler.pause("d")
    order: list[str] = []
    while scheduler.has_work:
        order += [name for name, *_ in rows(step(scheduler)) if name not in order]
    assert order == ["c"]
    scheduler.resume("d")
    scheduler.resume("a")
    while scheduler.has_work:
        order += [name for name, *_ in rows(step(scheduler)) if name not in order]
    assert sorted(order[1:]) == ["a", "d"]


def test_after_a_failure_no_owner_is_charged() -> None:
    scheduler = fair_scheduler(max_num_seqs=1)
    flood(scheduler, 20, "a")
    step(scheduler)
    scheduler.reset("error")
    add(scheduler, "first", 2, 2, owner="a")
    add(scheduler, "second", 2, 2, owner="b")
    order: list[str] = []
    while scheduler.has_work:
        order += [name for name, *_ in rows(step(scheduler)) if name not in order]
    assert order == ["first", "second"]
