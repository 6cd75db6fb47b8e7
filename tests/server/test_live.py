"""The data of the live view matches the engine's state."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from pagespec import AsyncLLM, SamplingParams
from pagespec.server.app import create_app
from pagespec.server.live import MAX_CELLS, WINDOW_S, LiveView
from pagespec.server.metrics import EngineMetrics
from tests.support.content_llm import slow_llm
from tests.support.server import client, serving

LONG = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


async def frame_of(http: httpx.AsyncClient) -> dict[str, Any]:
    await asyncio.sleep(0.3)  # a frame is kept for a quarter of a second
    answer = await http.get("/live")
    assert answer.status_code == 200
    frame: dict[str, Any] = answer.json()
    return frame


def test_a_frame_is_the_engine_before_and_after_requests() -> None:
    async def main() -> None:
        engine = AsyncLLM(slow_llm(0.005, num_blocks=24), max_num_requests=7)
        async with client(create_app(engine)) as http:
            before = await frame_of(http)
            assert before["state"] == "ready"
            assert before["model"] == {
                "name": "model",
                "max_model_len": engine.llm.max_model_len,
                "has_chat_template": False,
            }
            assert before["requests"]["running"] == 0
            assert before["requests"]["limit"] == 7
            assert before["first_token_s"] == {"count": 0, "p50": None, "p99": None}
            assert before["blocks"]["map"]["owned"] == "0" * 24

            await engine.pause_generation()
            running = [await engine.submit([0, 0, k], LONG) for k in range(2)]
            paused = await frame_of(http)
            assert paused["state"] == "paused"
            assert paused["requests"]["waiting"] == 2

            await engine.resume_generation()
            for generation in running:
                await generation.result()
            after = await frame_of(http)
            blocks = after["blocks"]
            assert after["requests"]["running"] == 0
            assert after["requests"]["ended"]["length"] == 2
            assert after["tokens"]["generated"] == 40
            assert after["tokens"]["prompt"] == 6
            assert after["tokens"]["generated_per_s"] > 0
            assert after["first_token_s"]["count"] == 2
            assert after["between_tokens_s"]["p99"] >= after["between_tokens_s"]["p50"] > 0
            assert after["steps"]["mean_tokens"] > 0
            assert blocks["owned"] == 0
            assert blocks["cached"] > 0
            assert blocks["cached"] + blocks["free"] == blocks["total"] == 24
            assert blocks["map"]["cached"].count("9") == blocks["cached"]
            await engine.shutdown()

    asyncio.run(main())


def test_a_stream_brings_frames_and_ends_with_the_server() -> None:
    with serving(slow_llm(0.005)) as url:
        frames = []
        begin = time.monotonic()
        with httpx.stream("GET", f"{url}/live/stream", timeout=10) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    frames.append(json.loads(line[5:]))
                if len(frames) == 3:
                    break
        assert 0.8 < time.monotonic() - begin < 5
        assert [frame["state"] for frame in frames] == ["ready"] * 3
        http = httpx.Client(timeout=20)
        still = http.send(http.build_request("GET", f"{url}/live/stream"), stream=True)
        next(still.iter_lines())
    # The server has ended although one was still looking.
    still.close()


def test_frames_are_shared_by_all_viewers() -> None:
    async def main() -> None:
        engine = AsyncLLM(slow_llm(0.005))
        app = create_app(engine)
        view = LiveView(EngineMetrics(engine))
        first = await view.frame(app.state.context)
        assert await view.frame(app.state.context) is first
        await engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("num_blocks", [1, 2048, 2049, 300_000])
def test_a_map_has_few_cells(num_blocks: int) -> None:
    engine = AsyncLLM(slow_llm(0.005, num_blocks=num_blocks))
    view = LiveView(EngineMetrics(engine))
    begin = time.perf_counter()
    found = view._map(num_blocks)
    print(f"{num_blocks} blocks: {1000 * (time.perf_counter() - begin):.2f} ms")
    num_cells = len(found["owned"])
    assert num_cells == len(found["cached"]) <= MAX_CELLS
    assert num_cells * found["blocks_per_cell"] >= num_blocks
    assert (num_cells - 1) * found["blocks_per_cell"] < num_blocks
    asyncio.run(engine.shutdown())


def test_rates_and_quantiles_forget_what_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = AsyncLLM(slow_llm(0.005))
        app = create_app(engine)
        view = LiveView(EngineMetrics(engine))
        await (await engine.submit([0], LONG)).result()
        now, seconds = time.monotonic, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)
        frame = await view.frame(app.state.context)
        assert frame["between_tokens_s"]["count"] > 0
        for has_step in (False, True):
            if has_step:
                seconds = WINDOW_S
                view.on_step()  # of another request
            seconds = WINDOW_S + (3 if has_step else 1)
            frame = await view.frame(app.state.context)
            assert frame["between_tokens_s"]["count"] == 0
            assert frame["tokens"]["generated_per_s"] == 0
        monkeypatch.undo()
        await engine.shutdown()

    asyncio.run(main())
