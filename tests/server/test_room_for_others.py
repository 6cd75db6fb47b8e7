"""The queue's limit counts all clients together; one client's flood leaves room for others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from pagespec import AsyncLLM
from tests.support.content_llm import content_llm
from tests.support.server import serving

LIMIT = 16  # of which 2 are for clients with few requests
KEPT = 2
KEYS = ("one", "two", "three")
_BODY = {"prompt": "ab", "max_tokens": 2, "ignore_eos": True}

Answers = list[Future[httpx.Response]]


class Clients:
    """Posts requests to one server, by client: its API key, or its ``user``. While the server is
    paused nothing ends that was admitted."""

    def __init__(
        self, url: str, engine: AsyncLLM, pool: ThreadPoolExecutor, has_keys: bool
    ) -> None:
        self._url, self._engine, self._pool, self._has_keys = url, engine, pool, has_keys
        self._sent: Answers = []

    def switch(self, name: str) -> None:
        """Pause or resume."""
        self._post("one", f"/{name}", {}).raise_for_status()

    def _post(self, client: str, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {client}"} if self._has_keys else {}
        return httpx.post(self._url + path, json=body, headers=headers, timeout=60)

    def send(self, client: str, number: int = 1, **fields: Any) -> Answers:
        """Returns when each request is in the engine or answered."""
        body = _BODY | fields | ({} if self._has_keys else {"user": client})
        sent = [
            self._pool.submit(self._post, client, "/v1/completions", body) for _ in range(number)
        ]
        self._sent += sent
        until = time.monotonic() + 60
        per_answer = fields.get("n", 1)
        while self._num_live() < sum(not answer.done() for answer in self._sent[:-number]) + (
            per_answer * sum(not answer.done() for answer in sent)
        ):
            assert time.monotonic() < until
            time.sleep(0.005)
        return sent

    def _num_live(self) -> int:
        return len(self._engine.llm.engine.scheduler.requests)


@contextmanager
def clients(
    *, has_keys: bool = False, policy: str = "fair", limit: int = LIMIT
) -> Iterator[Clients]:
    engine = AsyncLLM(content_llm(policy=policy, num_blocks=400), max_num_requests=limit)
    config: dict[str, Any] = {"api_keys": KEYS} if has_keys else {}
    with serving(engine, enable_admin=True, **config) as url, ThreadPoolExecutor(80) as pool:
        yield Clients(url, engine, pool, has_keys)


@contextmanager
def paused(clients: Clients) -> Iterator[None]:
    clients.switch("pause")
    try:
        yield
    finally:
        clients.switch("resume")


def statuses(answers: Answers) -> Counter[int]:
    return Counter(answer.result().status_code for answer in answers)


@pytest.mark.parametrize("has_keys", [True, False], ids=["keys", "users"])
def test_a_flood_leaves_room_for_others(has_keys: bool) -> None:
    with clients(has_keys=has_keys) as server:
        if not has_keys:  # without keys, the server counts users from their first request on
            assert statuses(server.send("two")) == {200: 1}
        with paused(server):
            flood = server.send("one", 30)
            others = [*server.send("two"), *server.send("three")]
            late = server.send("four" if not has_keys else "two")  # the queue is full
        assert statuses(others) == {200: 2}
        assert statuses(late) == {429: 1}
        assert statuses(flood) == {200: LIMIT - KEPT, 429: 30 - LIMIT + KEPT}
        refused = next(a.result() for a in flood if a.result().status_code == 429)
        assert refused.headers["retry-after"] == "1"
        said = refused.json()["error"]["message"]
        kept = f"the last {KEPT} of max_num_requests = {LIMIT} are reserved for clients with fewer"
        assert kept in said
        assert statuses(server.send("one")) == {200: 1}


def test_each_further_flood_leaves_room_too() -> None:
    with clients(has_keys=True, limit=64) as server:
        with paused(server):
            first, second = server.send("one", 60), server.send("two", 10)
            third = server.send("three", n=2)
        assert statuses(first) == {200: 56, 429: 4}
        assert statuses(second) == {200: 4, 429: 6}
        assert statuses(third) == {200: 1}


def test_one_client_may_fill_the_queue_until_another_arrives() -> None:
    with clients() as server:
        with paused(server):
            alone, other = server.send("one", LIMIT + 3), server.send("two")
        assert statuses(other) == {429: 1}
        assert statuses(alone) == {200: LIMIT, 429: 3}
        with paused(server):
            flood, other = server.send("one", LIMIT), server.send("two")
        assert statuses(other) == {200: 1}
        assert statuses(flood) == {200: LIMIT - KEPT, 429: KEPT}


def test_an_idle_server_takes_a_request_of_any_size() -> None:
    with clients(has_keys=True) as server:
        for fields in ({"n": LIMIT}, {"prompt": ["ab"] * LIMIT}):
            assert statuses(server.send("one", **fields)) == {200: 1}
        assert statuses(server.send("one", n=LIMIT + 1)) == {400: 1}


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_small_limits(limit: int) -> None:
    with clients(has_keys=True, limit=limit) as server:
        with paused(server):
            flood, other = server.send("one", 4), server.send("two")
        assert statuses(other) == {200 if limit > 1 else 429: 1}
        assert statuses(flood)[200] == max(1, limit - 1)


def test_under_fcfs_no_room_is_kept() -> None:
    with clients(has_keys=True, policy="fcfs") as server:
        with paused(server):
            flood, other = server.send("one", LIMIT), server.send("two")
        assert statuses(other) == {429: 1}
        assert statuses(flood) == {200: LIMIT}
