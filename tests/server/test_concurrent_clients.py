"""Many clients at once: each gets the answer that it gets alone.

Requests of clients that disconnect are aborted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pagespec import LLM, AsyncLLM
from tests.server.chunks import alike, joined_answer, read_events
from tests.support.chat_models import save_chat_model
from tests.support.content_llm import content_llm, slow_llm
from tests.support.server import serving

NUM_CLIENTS = 64
Asked = tuple[str, dict[str, Any]]


def mixed_request(rng: random.Random) -> Asked:
    """A request to any endpoint of a model with a chat template, with log-probabilities."""
    common = {"seed": rng.randrange(100), "temperature": rng.choice([0.0, 0.8, 1.5])}
    stream = {"stream": rng.random() < 0.5}
    if common["temperature"]:
        common["n"] = rng.choice([1, 1, 3])
    ids = [rng.randrange(3, 200) for _ in range(rng.randrange(1, 30))]
    kind = rng.randrange(3)
    max_tokens = rng.randrange(1, 16)
    if kind == 0:
        fields = {"prompt": ids, "logprobs": rng.randrange(4), "echo": rng.random() < 0.5}
        return "/v1/completions", {**common, **stream, **fields, "max_tokens": max_tokens}
    if kind == 1:
        messages = [{"role": "user", "content": rng.choice(["hé?", "ab" * 9, "語"])}]
        fields = {"messages": messages, "logprobs": True, "top_logprobs": rng.randrange(3)}
        return "/v1/chat/completions", {**common, **stream, **fields, "max_tokens": max_tokens}
    params = {**common, "logprobs": 1, "max_tokens": max_tokens}
    return "/inference/v1/generate", {**stream, "token_ids": ids, "sampling_params": params}


def letters_request(rng: random.Random) -> Asked:
    prompt = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 12)))
    fields = {"prompt": prompt, "seed": rng.randrange(50), "max_tokens": rng.randrange(1, 14)}
    options = {"n": rng.choice([1, 2, 4]), "ignore_eos": rng.random() < 0.7}
    return "/v1/completions", {**fields, **options, "stream": rng.random() < 0.7}


async def ask(http: httpx.AsyncClient, asked: Asked) -> dict[str, Any]:
    path, body = asked
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = joined_answer(read_events(answer.text)) if body.get("stream") else answer.json()
    found.pop("usage", None)
    return alike(found)


@pytest.fixture(scope="module")
def model_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    with serving(LLM(folder, max_num_seqs=16, num_blocks=150)) as url:
        yield url


@pytest.fixture(scope="module", params=[0, 1])
def letters_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server with so few blocks that requests are preempted all the time."""
    with serving(content_llm(pipeline_depth=request.param, max_num_seqs=6)) as url:
        yield url


def check_all(url: str, make: Callable[[random.Random], Asked], seed: int) -> None:
    rng = random.Random(seed)
    requests = [make(rng) for _ in range(NUM_CLIENTS)]

    async def run() -> None:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
            alone = [await ask(http, asked) for asked in requests]
            order = list(range(NUM_CLIENTS))
            rng.shuffle(order)
            together = await asyncio.gather(*(ask(http, requests[i]) for i in order))
        assert together == [alone[i] for i in order]

    asyncio.run(run())


def test_the_same_tokens_and_floats_as_alone(model_url: str) -> None:
    check_all(model_url, mixed_request, 1)


def test_the_same_tokens_on_a_crowded_engine(letters_url: str) -> None:
    check_all(letters_url, letters_request, 2)


@pytest.mark.parametrize("stream", [True, False])
def test_requests_of_disconnected_clients_are_aborted(stream: bool) -> None:
    """The other clients get answers, and no block stays owned. The aborted answers would take 390
    steps (4 s), so their clients disconnect before any answer is complete."""
    engine = AsyncLLM(slow_llm(0.01, num_blocks=200, block_size=2))
    body = {"prompt": "abc", "max_tokens": 390, "ignore_eos": True, "stream": stream}

    async def leaves(http: httpx.AsyncClient, after_s: float) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(after_s):
                await http.post("/v1/completions", json=body | {"n": 2, "seed": 1})

    async def run(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            leaving = [leaves(http, 0.1 + 0.01 * i) for i in range(8)]
            short = {"prompt": "ab", "max_tokens": 5, "ignore_eos": True}
            staying = [http.post("/v1/completions", json=short) for _ in range(4)]
            answers = await asyncio.gather(*leaving, *staying)
            assert [a.json()["usage"]["completion_tokens"] for a in answers[8:]] == [5] * 4

    with serving(engine) as url:
        asyncio.run(run(url))
        until = time.monotonic() + 10
        while engine.num_live_requests and time.monotonic() < until:
            time.sleep(0.01)
        assert engine.num_live_requests == 0
        assert engine.snapshot().num_owned_blocks == 0


def test_a_failing_step_ends_a_stream_with_an_error() -> None:
    llm = content_llm(num_blocks=200)
    body = {"prompt": "abc", "max_tokens": 700, "ignore_eos": True, "stream": True}
    with serving(llm) as url, httpx.Client(base_url=url, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert '"text"' in next(lines)
            llm._runner.fail_at_step = 0  # type: ignore[attr-defined]
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"error":{"message":"the engine failed' in rest[-2]
        assert "out of memory" not in rest[-2]
        after = http.post("/v1/completions", json=body | {"stream": False, "max_tokens": 3})
        assert after.status_code == 200
