"""A task that is cancelled in ``submit``, at any of its await points, leaves no live request."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import pytest

from pagespec import AsyncLLM, SamplingParams
from pagespec.serving import host
from tests.support.content_llm import content_llm
from tests.support.content_runner import TOKEN_STRIDE

PROMPT = [0, TOKEN_STRIDE, 0, 2 * TOKEN_STRIDE]
LONG_TEXT = "a" * 2_100  # tokenised on another thread
PARAMS = SamplingParams(n=2, max_tokens=8, seed=5, ignore_eos=True)
TRUNCATED = SamplingParams(n=2, max_tokens=8, seed=5, ignore_eos=True, truncate_prompt_tokens=4)


class LineCounter:
    """Counts lines that the engine's thread executes in ``host.py``, and stops at one of them.

    Args:
        place: the line, counted from 1.
        at_line: called there, on the engine's thread.
    """

    def __init__(self, place: int, at_line: Callable[[], None]) -> None:
        self._place, self._at_line = place, at_line
        self.num_lines = 0

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename != host.__file__:
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._place:
                self._at_line()
        return self.trace


def run(test: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def whole() -> None:
        engine = AsyncLLM(content_llm(num_blocks=60))
        try:
            async with asyncio.timeout(60):
                await test(engine)
        finally:
            await engine.shutdown()

    asyncio.run(whole())


async def settled(engine: AsyncLLM) -> int:
    """The number of live requests, after all queued operations and a pass of the engine's thread.
    The engine is paused, so no request ends by itself."""
    for _ in range(2):
        await engine._call(lambda: None)
    return engine.num_live_requests


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task. The caller keeps it, and with its exception the frames of ``submit``."""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.parametrize("prompt", [PROMPT, LONG_TEXT], ids=["quick", "long"])
def test_at_any_turn_of_the_event_loop(prompt: Any) -> None:
    params = PARAMS if prompt is PROMPT else TRUNCATED

    async def test(engine: AsyncLLM) -> None:
        await engine.pause_generation()
        tasks, outcomes = [], set()
        for num_turns in [*range(8), 200]:
            for wait_s in (0.0, 0.0005, 0.002):
                task = asyncio.create_task(engine.submit(prompt, params))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                time.sleep(wait_s)  # the other threads go on; the loop does not see it
                outcomes.add(task.done())
                if task.done():
                    (await task).abort()
                else:
                    await cancelled(task)
                tasks.append(task)
                assert await settled(engine) == 0, (num_turns, wait_s)
        assert False in outcomes

    run(test)


def test_at_any_line_of_its_admission() -> None:
    async def test(engine: AsyncLLM) -> None:
        await engine.pause_generation()
        loop = asyncio.get_running_loop()
        tasks, place, is_over = [], 0, False
        while not is_over:
            place += 1
            task = asyncio.create_task(engine.submit(PROMPT, PARAMS))
            is_cancelled = threading.Event()

            async def cancel(task: Any = task, is_cancelled: Any = is_cancelled) -> None:
                await cancelled(task)
                is_cancelled.set()

            def at_line(cancel: Any = cancel, is_cancelled: Any = is_cancelled) -> None:
                asyncio.run_coroutine_threadsafe(cancel(), loop)
                assert is_cancelled.wait(20)

            counter = LineCounter(place, at_line)
            admit = engine._host.admit

            def traced(*arguments: Any, admit: Any = admit, counter: Any = counter) -> None:
                sys.settrace(counter.trace)
                try:
                    admit(*arguments)
                finally:
                    sys.settrace(None)

            engine._host.admit = traced  # type: ignore[method-assign]
            await asyncio.wait([task])
            engine._host.admit = admit  # type: ignore[method-assign]
            is_over = not task.cancelled()
            if is_over:
                (await task).abort()
            tasks.append(task)
            assert await settled(engine) == 0, f"line {place}"
        assert place > 20

    run(test)


def test_a_handle_that_is_dropped_while_the_engine_is_paused() -> None:
    async def test(engine: AsyncLLM) -> None:
        await engine.pause_generation()
        await engine.submit(PROMPT, PARAMS)
        assert await engine.wait_for_requests_to_drain(10)

    run(test)
