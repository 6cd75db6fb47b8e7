"""The event loop handles a few requests per turn, and each again after newer events."""

from __future__ import annotations

import asyncio
from typing import Any

from pagespec.serving.served import LoopRequests


class Seen:
    """The interface of a ``Served`` that its event loop uses."""

    def __init__(self, name: int, looks: list[tuple[int, int]], turn: list[int]) -> None:
        self.name, self.looks, self.turn = name, looks, turn
        self.num_tokens = self.num_seen = 0
        self.has_ended = False

    def poll(self, _observers: list[Any]) -> bool:
        self.looks.append((self.turn[0], self.name))
        self.num_seen = self.num_tokens
        return self.has_ended


def make(num_served: int) -> tuple[LoopRequests, list[Seen], list[tuple[int, int]], list[int]]:
    requests = LoopRequests(asyncio.get_running_loop(), lambda: None)
    looks: list[tuple[int, int]] = []
    turn = [0]
    served = [Seen(i, looks, turn) for i in range(num_served)]
    for each in served:
        requests.add(each)  # type: ignore[arg-type]
    return requests, served, looks, turn


async def turns(turn: list[int], num: int) -> None:
    for _ in range(num):
        turn[0] += 1
        await asyncio.sleep(0)


def test_a_turn_handles_a_few_requests_youngest_first() -> None:
    async def run() -> None:
        requests, served, looks, turn = make(100)
        requests.post()
        await turns(turn, 12)
        assert [name for _, name in looks] == [each.name for each in reversed(served)]
        most = max(sum(when == t for when, _ in looks) for t in range(12))
        assert 1 <= most <= 16

    asyncio.run(run())


def test_events_during_a_pass_are_handled_by_the_next() -> None:
    async def run() -> None:
        requests, served, _, turn = make(100)
        requests.post()
        await turns(turn, 3)
        for each in served:
            each.num_tokens = 1
        requests.post()
        requests.post()
        await turns(turn, 20)
        assert all(each.num_seen == 1 for each in served)
        served[7].num_tokens = 2
        requests.post()
        await turns(turn, 12)
        assert served[7].num_seen == 2

    asyncio.run(run())


def test_ended_and_refused_requests_are_not_handled_again() -> None:
    async def run() -> None:
        requests, served, looks, turn = make(40)
        served[39].has_ended = True
        requests.post()
        await turns(turn, 2)
        requests.discard(served[0])  # type: ignore[arg-type]
        await turns(turn, 8)
        assert 0 not in [name for _, name in looks]
        looks.clear()
        requests.post()
        await turns(turn, 8)
        assert sorted(name for _, name in looks) == list(range(1, 39))

    asyncio.run(run())
