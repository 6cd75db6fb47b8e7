"""An AsyncLLM that is deleted without shutdown(): its thread ends, and its callers get errors."""

# ruff: noqa: PT031 (it warns where the last reference goes)
from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, AsyncLLM, EngineError, SamplingParams, StructuredOutputs
from tests.support.content_llm import answer_alone, content_llm
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner
from tests.support.models import tiny_model
from tests.support.structured import save_byte_model

PROMPT = [0, TOKEN_STRIDE, 0, 2 * TOKEN_STRIDE, TOKEN_STRIDE]
LONG = SamplingParams(max_tokens=90, seed=5, ignore_eos=True)
DROPPED = "dropped without shutdown"


class SlowRunner(ContentRunner):
    def dispatch(self, plan: Any) -> Any:
        time.sleep(0.002)
        return super().dispatch(plan)


def slow_llm() -> LLM:
    runner = SlowRunner(num_blocks=60, block_size=2, vocab_size=3)
    return content_llm(runner=runner, num_blocks=60)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end, what
        gc.collect()
        time.sleep(0.01)


def engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "pagespec-engine"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    before = len(engine_threads())
    yield
    wait_until(lambda: len(engine_threads()) <= before, "a thread is left")


def test_it_warns_and_ends_its_thread_and_frees_its_llm() -> None:
    with pytest.warns(ResourceWarning, match=DROPPED):
        engine: AsyncLLM | None = AsyncLLM(content_llm())
        assert engine is not None
        llm, num_threads = weakref.ref(engine.llm), len(engine_threads())
        del engine
        gc.collect()
    wait_until(lambda: len(engine_threads()) < num_threads, "its thread is alive")
    wait_until(lambda: llm() is None, "its LLM is kept")


def test_twenty_leave_nothing() -> None:
    num_threads, llms = len(engine_threads()), []
    with pytest.warns(ResourceWarning, match=DROPPED):
        for _ in range(20):
            engine = AsyncLLM(content_llm())
            llms.append(weakref.ref(engine.llm))
            del engine
    wait_until(lambda: len(engine_threads()) == num_threads, "threads are left")
    wait_until(lambda: not any(llm() for llm in llms), "an LLM is kept")


@pytest.mark.parametrize("is_paused", [False, True])
def test_waiting_callers_get_an_error(is_paused: bool) -> None:
    async def test() -> None:
        engine = AsyncLLM(slow_llm())
        llm = engine.llm
        if is_paused:
            await engine.pause_generation()
        whole = await engine.submit(PROMPT, LONG)
        streamed = await engine.submit(PROMPT, SamplingParams(n=2, max_tokens=90, ignore_eos=True))
        waiting = asyncio.create_task(whole.result())
        await asyncio.sleep(0.02)
        with pytest.warns(ResourceWarning, match=DROPPED):
            del engine
            gc.collect()
        async with asyncio.timeout(15):
            with pytest.raises(EngineError, match=DROPPED):
                await waiting
            with pytest.raises(EngineError, match=DROPPED):
                async for _ in streamed.deltas():
                    pass
        whole.abort()  # of an engine that is gone: nothing happens
        (output,) = await asyncio.to_thread(llm.generate, PROMPT, LONG, use_tqdm=False)
        assert output.outputs[0].token_ids == answer_alone(llm, PROMPT, LONG)
        assert not llm.engine.scheduler.requests

    asyncio.run(test())


def test_iterating_keeps_it() -> None:
    """An iterator of ``generate`` keeps the engine alive: it reads to the end."""

    async def test() -> None:
        outputs = AsyncLLM(slow_llm()).generate(PROMPT, SamplingParams(max_tokens=5, seed=1))
        gc.collect()
        last = [output async for output in outputs][-1]
        assert last.finished

    with pytest.warns(ResourceWarning, match=DROPPED):
        asyncio.run(test())
        gc.collect()


def test_an_observer_that_holds_it_does_not_keep_it() -> None:
    class Holding:
        def __init__(self, engine: AsyncLLM) -> None:
            self.engine, self.num_steps = engine, 0

        def on_step(self, _num_tokens: int) -> None:
            self.num_steps += 1

        def on_arrival(self, *_: object) -> None: ...

        on_tokens = on_end = on_arrival

    async def test() -> None:
        engine = AsyncLLM(content_llm())
        observer = Holding(engine)
        engine.observers.append(observer)
        await (await engine.submit(PROMPT, LONG)).result()
        assert observer.num_steps >= 40

    with pytest.warns(ResourceWarning, match=DROPPED):
        asyncio.run(test())
        gc.collect()


def test_it_may_be_finalised_on_its_own_thread_or_within_a_step() -> None:
    llm = content_llm()
    dispatch, held = llm.engine.runner.dispatch, []

    def drop(plan: Any) -> Any:
        held.clear()
        return dispatch(plan)

    llm.engine.runner.dispatch = drop  # type: ignore[method-assign]
    with pytest.warns(ResourceWarning, match=DROPPED):
        held.append(AsyncLLM(llm))
        llm.generate(PROMPT, SamplingParams(max_tokens=3), use_tqdm=False)
    with pytest.warns(ResourceWarning, match=DROPPED):
        held.append(AsyncLLM(llm))
        held[0]._thread.call(held.clear).result(20)
        wait_until(lambda: not held, "it is held")


def test_after_shutdown_nothing_is_said() -> None:
    async def test() -> None:
        engine = AsyncLLM(content_llm())
        await (await engine.submit(PROMPT, LONG)).result()
        await engine.shutdown()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(test())
        gc.collect()


# An LLM by itself ---------------------------------------------------------------------------------


def test_an_llm_that_is_dropped_leaves_no_thread_that_makes_masks(tmp_path: Path) -> None:
    save_byte_model(tmp_path)
    before = set(threading.enumerate())
    llm = LLM(tmp_path, device="cpu", max_model_len=64, num_blocks=32)
    asked = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(regex="ab"))
    assert llm.generate("a", asked, use_tqdm=False)[0].outputs[0].text == "ab"
    made = {t for t in threading.enumerate() if t.name.startswith("pagespec-masks")} - before
    assert made
    kept = weakref.ref(llm.engine)
    del llm
    wait_until(lambda: kept() is None, "the engine is kept")
    wait_until(lambda: not any(t.is_alive() for t in made), "a thread is left")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_trace_of_an_llm_that_is_dropped_is_whole(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    llm = LLM(tiny_model("llama"), num_blocks=40, compile="eager", trace=trace)
    llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    num_lines = trace.read_text().count("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del llm
        gc.collect()
    text = trace.read_text()
    assert text.endswith("\n")
    assert text.count("\n") == num_lines > 4
