"""Every request gets an answer and no block is lost under faults.

Faults are engine failures, clients that disconnect, and full queues.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from pagespec import AsyncLLM
from tests.server.raw_http import connected, head
from tests.support.content_llm import content_llm
from tests.support.content_runner import ContentRunner
from tests.support.server import serving

BODY = {"prompt": [0, 0], "max_tokens": 40, "ignore_eos": True, "seed": 1}
NUM_BLOCKS = 64


class Faulty(ContentRunner):
    """A runner that is slow, so that requests can be interrupted midway, and that can fail
    permanently."""

    is_broken = False

    def dispatch(self, plan: Any) -> Any:
        time.sleep(0.003)
        if self.is_broken:
            raise RuntimeError("secret: no device")
        return super().dispatch(plan)


@contextmanager
def served(**config: Any) -> Iterator[tuple[httpx.Client, AsyncLLM, Faulty]]:
    """A server whose engine must be intact at the end."""
    runner = Faulty(num_blocks=NUM_BLOCKS, block_size=2, vocab_size=3, pipeline_depth=1)
    limit = config.pop("max_num_requests", None)
    llm = content_llm(num_blocks=NUM_BLOCKS, runner=runner)
    engine = AsyncLLM(llm, max_num_requests=limit)
    with (
        serving(engine, **config) as url,
        httpx.Client(base_url=url, timeout=30, limits=httpx.Limits(max_connections=300)) as http,
    ):
        yield http, engine, runner
        wait_for(lambda: http.get("/load").json() == {"server_load": 0})
        wait_for(lambda: engine.num_live_requests == 0)
        wait_for(lambda: engine.snapshot().num_owned_blocks == 0)  # S14


def wait_for(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def events_of(http: httpx.Client, **more: Any) -> list[Any]:
    answer = http.post("/v1/completions", json={**BODY, "stream": True, **more})
    assert answer.status_code == 200
    *events, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_failed_step_is_answered_and_the_engine_goes_on() -> None:
    with served() as (http, _, runner), ThreadPoolExecutor(8) as pool:
        runner.fail_at_step = runner.num_steps + 10
        plain = [pool.submit(http.post, "/v1/completions", json=BODY) for _ in range(4)]
        streams = [pool.submit(events_of, http) for _ in range(4)]
        for answer in plain:
            error = answer.result().json()["error"]
            assert answer.result().status_code == error["code"] == 500
            assert error["type"] == "InternalServerError"
            assert "fake" not in error["message"]
        for stream in streams:
            *choices, last = stream.result()
            assert last["error"]["code"] == 500
            assert all(choice["choices"][0]["finish_reason"] is None for choice in choices)
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json=BODY).status_code == 200


def test_an_engine_that_fails_for_good_is_not_healthy() -> None:
    with served() as (http, _, runner):
        runner.is_broken = True
        for _ in range(2):
            answer = http.post("/v1/completions", json=BODY)
            assert answer.status_code == 500
            assert "secret" not in answer.text
        assert http.get("/health").status_code == http.get("/ping").status_code == 503
        assert http.get("/liveness").status_code == 200
        runner.is_broken = False  # the next request checks it
        assert http.post("/v1/completions", json=BODY).status_code == 200
        assert http.get("/health").status_code == 200


def test_a_full_queue_is_refused_with_a_time_to_come_again() -> None:
    with served(max_num_requests=2) as (http, _, _), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: http.post("/v1/completions", json=BODY), range(8)))
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 1 <= len(refused) <= 6
        for answer in refused:
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["type"] == "RateLimitError"


def test_bad_json_is_named() -> None:
    with served() as (http, _, _):
        for content in (b"{", b"\xff", b"[1", b'{"prompt": NaN', b""):
            headers = {"Content-Type": "application/json"}
            answer = http.post("/v1/completions", content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)
        for value in (None, [], "text", 1):
            assert http.post("/v1/completions", json=value).status_code == 400
        deep = b"[" * 100_000 + b"]" * 100_000
        answer = http.post("/v1/completions", content=deep, headers=headers)
        assert answer.status_code == 400


@pytest.mark.parametrize("seed", [0, 1])
def test_two_hundred_clients_of_which_a_third_leaves(seed: int) -> None:
    rng = random.Random(seed)
    fates = rng.choices(["leaves", "stream", "plain"], k=200)
    delays = [rng.random() * 0.3 for _ in fates]

    with served() as (http, engine, _), ThreadPoolExecutor(200) as pool:

        def ask(number: int) -> str:
            body = {**BODY, "seed": number, "max_tokens": 5 + number % 11}
            if fates[number] == "plain":
                choices = http.post("/v1/completions", json=body).json()["choices"]
                return str(choices[0]["finish_reason"])
            if fates[number] == "stream":
                return str(events_of(http, **body)[-1]["choices"][0]["finish_reason"])
            text = json.dumps({**body, "stream": bool(number % 2)}).encode()
            with connected(str(http.base_url)) as connection:
                length = f"Content-Length: {len(text)}"
                start = head("/v1/completions", "Content-Type: application/json", length)
                connection.sendall(start + text)
                time.sleep(delays[number])
            return "left"

        ends = list(pool.map(ask, range(200)))
        assert {end for end, fate in zip(ends, fates, strict=True) if fate != "leaves"} == {
            "length"
        }
        wait_for(lambda: engine.num_live_requests == 0)


def test_a_disconnected_request_is_aborted_within_a_few_steps() -> None:
    with served() as (http, engine, runner):
        for stream in (True, False):
            text = json.dumps({**BODY, "max_tokens": 100, "stream": stream}).encode()
            with connected(str(http.base_url)) as connection:
                length = f"Content-Length: {len(text)}"
                start = head("/v1/completions", "Content-Type: application/json", length)
                connection.sendall(start + text)
                wait_for(lambda: engine.num_live_requests == 1)
            num_steps = runner.num_steps
            wait_for(lambda: engine.num_live_requests == 0)
            assert runner.num_steps - num_steps < 30, "it was answered to its end"
