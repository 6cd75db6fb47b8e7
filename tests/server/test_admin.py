"""Endpoints for operators, which work only if they are enabled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from pagespec import AsyncLLM
from tests.support.content_llm import content_llm, slow_llm
from tests.support.server import serving

BODY = {"prompt": [0, 0, 0, 0, 0], "max_tokens": 3, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def engine() -> AsyncLLM:
    return AsyncLLM(content_llm())


@pytest.fixture(scope="module")
def http(engine: AsyncLLM) -> Iterator[httpx.Client]:
    with serving(engine, enable_admin=True) as url, httpx.Client(base_url=url) as http:
        yield http


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_and_resume(http: httpx.Client, mode: str) -> None:
    assert http.post("/v1/completions", json=BODY).status_code == 200
    assert http.post("/pause", params={"mode": mode}).json() == {"status": "paused"}
    assert http.get("/is_paused").json() == {"is_paused": True}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=BODY, timeout=0.3)
    assert http.post("/resume").json() == {"status": "resumed"}
    assert http.get("/is_paused").json() == {"is_paused": False}
    assert http.post("/v1/completions", json=BODY).status_code == 200


def test_a_pause_that_was_ended_while_it_waited_says_so() -> None:
    long = BODY | {"max_tokens": 100}
    with (
        serving(slow_llm(0.02), enable_admin=True) as url,
        httpx.Client(base_url=url, timeout=30) as http,
        ThreadPoolExecutor(2) as threads,
    ):
        answer = threads.submit(http.post, "/v1/completions", json=long)
        while not http.get("/load").json()["server_load"]:
            time.sleep(0.01)
        pause = threads.submit(http.post, "/pause?mode=wait")
        time.sleep(0.3)
        assert http.post("/resume").json() == {"status": "resumed"}
        refused = pause.result()
        assert refused.status_code == 409
        assert "pause was ended" in refused.json()["error"]["message"]
        assert http.get("/is_paused").json() == {"is_paused": False}
        assert answer.result().status_code == 200


def test_another_mode_is_refused(http: httpx.Client) -> None:
    answer = http.post("/pause?mode=now")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mode")
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_the_prefix_cache_is_emptied(http: httpx.Client, engine: AsyncLLM) -> None:
    assert http.post("/v1/completions", json=BODY).status_code == 200
    assert engine.snapshot().num_cached_blocks > 0
    refused = http.post("/reset_prefix_cache?reset_external=true")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reset_external")
    assert engine.snapshot().num_cached_blocks > 0
    answer = http.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    assert engine.snapshot().num_cached_blocks == 0


@pytest.mark.parametrize("path", ["/pause", "/resume", "/reset_prefix_cache", "/is_paused"])
def test_without_the_option_there_is_no_such_path(path: str) -> None:
    with serving(content_llm()) as url:
        assert (
            httpx.request("GET" if path == "/is_paused" else "POST", url + path).status_code == 404
        )
