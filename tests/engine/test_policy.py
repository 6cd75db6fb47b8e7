"""Unit tests of scheduling policies: the order of requests, and rejected values."""

from __future__ import annotations

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.engine.policy import Policy
from pagespec.engine.request import Request
from tests.engine.schedules import add, make_scheduler, rows, step


def make_request(seniority: int, num_tokens: int = 10, priority: int = 0) -> Request:
    request = Request("r", [1], SamplingParams(), max_num_tokens=num_tokens, priority=priority)
    request.seniority = seniority
    return request


def test_first_come_first_served_ranks_by_arrival_alone() -> None:
    policy = Policy()
    ranks = [policy.rank(make_request(i, 500 - 100 * i, 9 - i)) for i in range(5)]
    assert ranks == sorted(ranks)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidInputError) as caught:
        Policy("lifo")
    error = caught.value
    limit = "must be one of ['fair', 'fcfs', 'priority', 'shortest_first']"
    assert (error.field, error.value, error.limit) == ("policy", "lifo", limit)


def test_ranks_are_places_and_break_ties_by_arrival() -> None:
    priority = Policy("priority", arrivals_per_priority=2)
    urgent, patient = make_request(4), make_request(0, priority=2)
    assert priority.rank(patient) < priority.rank(urgent), "both in place 4: the older is first"
    urgent.seniority = 3
    assert priority.rank(urgent) < priority.rank(patient)


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
