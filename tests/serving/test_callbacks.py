"""Callbacks that raise a BaseException: callers get answers, and the next request is served."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pagespec import LLM, AsyncLLM, EngineError, SamplingParams
from tests.support.content_llm import answer_alone, content_llm
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner
from tests.support.models import tiny_model

PROMPT = [0, TOKEN_STRIDE, 0, 2 * TOKEN_STRIDE, TOKEN_STRIDE]
LONG = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
WATCHED = SamplingParams(max_tokens=30, seed=5, ignore_eos=True, stop=["no such text"])
KINDS = [KeyboardInterrupt, SystemExit, GeneratorExit]
WAIT_S = 15


class PanicError(BaseException):
    """Like the panic of a Rust library, which is not an Exception."""


def run(engine: AsyncLLM, test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            async with asyncio.timeout(60):
                await test()
        finally:
            await engine.shutdown()

    asyncio.run(whole())


async def in_time(answer: Awaitable[Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await answer


class Raising:
    """Raises the given error, ``times`` times, when a callback is called."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.times = 0

    def __call__(self, *_: object) -> None:
        if self.error is not None and self.times > 0:
            self.times -= 1
            raise self.error


def llm_that_calls(where: str, callback: Callable[..., None]) -> LLM:
    """An ``LLM`` that calls ``callback`` at one of the points where a step calls user code."""

    class Runner(ContentRunner):
        def dispatch(self, plan: Any) -> Any:
            time.sleep(0.0005)
            if where == "dispatch":
                callback()
            return super().dispatch(plan)

        def collect(self, handle: Any) -> Any:
            if where == "collect":
                callback()
            return super().collect(handle)

        def reset(self) -> None:
            if where == "reset":
                callback()
            super().reset()

    llm = content_llm(runner=Runner(num_blocks=60, block_size=2, vocab_size=3), num_blocks=60)
    if where == "detokenizer":
        decode = llm.tokenizer.decode

        def decode_or_raise(token_ids: list[int], **arguments: Any) -> str:
            if threading.current_thread().name == "pagespec-engine":
                callback()
            return str(decode(token_ids, **arguments))

        llm.tokenizer.decode = decode_or_raise
    return llm


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["dispatch", "collect", "detokenizer"])
def test_what_is_no_exception_ends_requests_and_not_the_engine(
    where: str, kind: type[BaseException]
) -> None:
    callback = Raising()
    engine = AsyncLLM(llm_that_calls(where, callback))

    async def test() -> None:
        generations = [await engine.submit(PROMPT, params) for params in (LONG, WATCHED)]
        waiting = [asyncio.create_task(each.result()) for each in generations]
        streamed = await engine.submit(PROMPT, LONG)
        callback.error, callback.times = kind("from a callback"), 1
        for task in waiting:
            with pytest.raises(EngineError, match=kind.__name__):
                await in_time(task)
        with pytest.raises(EngineError, match=kind.__name__):
            async for _ in streamed.deltas():
                pass
        await in_time(engine.check_health())
        output = await in_time((await engine.submit(PROMPT, LONG)).result())
        assert output.outputs[0].token_ids == answer_alone(engine.llm, PROMPT, LONG)

    run(engine, test)


def test_a_callback_that_always_raises_leaves_no_caller_waiting() -> None:
    callback = Raising()
    engine = AsyncLLM(llm_that_calls("dispatch", callback))

    async def test() -> None:
        callback.error, callback.times = KeyboardInterrupt(), 1_000_000
        with pytest.raises(EngineError, match="KeyboardInterrupt"):
            await in_time((await engine.submit(PROMPT, LONG)).result())
        for _ in range(3):
            with pytest.raises(EngineError, match="KeyboardInterrupt"):
                await in_time(engine.submit(PROMPT, LONG))
        with pytest.raises(EngineError, match="KeyboardInterrupt"):
            await in_time(engine.check_health())
        callback.times = 0
        output = await in_time((await engine.submit(PROMPT, LONG)).result())
        assert output.outputs[0].token_ids == answer_alone(engine.llm, PROMPT, LONG)

    run(engine, test)


def test_a_runner_whose_reset_raises_leaves_no_caller_waiting() -> None:
    callback = Raising()
    llm = llm_that_calls("reset", callback)
    engine = AsyncLLM(llm)

    async def test() -> None:
        generation = await engine.submit(PROMPT, LONG)
        callback.error, callback.times = SystemExit(), 2
        llm.engine.runner.fail_at_step = 0  # type: ignore[attr-defined]
        with pytest.raises(EngineError):
            await in_time(generation.result())
        while callback.times:
            await asyncio.sleep(0.01)
        output = await in_time((await engine.submit(PROMPT, LONG)).result())
        assert output.outputs[0].token_ids == answer_alone(engine.llm, PROMPT, LONG)
        await in_time(engine.check_health())

    run(engine, test)


@pytest.mark.parametrize("how", ["pause", "reset"])
def test_an_operation_that_a_callback_stops_raises_an_error_that_ends_no_loop(how: str) -> None:
    callback = Raising()

    class Runner(ContentRunner):
        def collect(self, handle: Any) -> Any:
            time.sleep(0.002)
            callback()
            return super().collect(handle)

    runner = Runner(num_blocks=60, block_size=2, vocab_size=3, pipeline_depth=1)
    engine = AsyncLLM(content_llm(runner=runner, num_blocks=60))

    async def test() -> None:
        generation = await engine.submit(PROMPT, SamplingParams(max_tokens=90, ignore_eos=True))
        while generation.num_output_tokens == 0:
            await asyncio.sleep(0.001)

        def fail_what_is_next() -> None:
            callback.error, callback.times = SystemExit(), 1
            time.sleep(0.1)  # until the operation is there: then no step comes before it

        engine._thread.call(fail_what_is_next)
        operation = engine.pause_generation if how == "pause" else engine.reset_prefix_cache
        with pytest.raises(EngineError, match="SystemExit"):
            await in_time(operation())
        with pytest.raises(EngineError, match="SystemExit"):
            await in_time(generation.result())
        await in_time(engine.check_health())

    run(engine, test)


def test_on_logits_of_a_real_model_may_raise_anything() -> None:
    callback = Raising()
    llm = LLM(
        tiny_model("llama"), max_num_seqs=4, num_blocks=40, compile="eager", on_logits=callback
    )
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    expected = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids
    engine = AsyncLLM(llm)

    async def test() -> None:
        generations = [await engine.submit([5, 6, i], params) for i in range(7, 10)]
        callback.error, callback.times = KeyboardInterrupt(), 1
        answers = await in_time(
            asyncio.gather(*(g.result() for g in generations), return_exceptions=True)
        )
        assert any(isinstance(answer, EngineError) for answer in answers)
        output = await in_time((await engine.submit([5, 6, 7], params)).result())
        assert output.outputs[0].token_ids == expected

    run(engine, test)
    callback.times = 1
    with pytest.raises(KeyboardInterrupt):
        llm.generate([5, 6, 7], params, use_tqdm=False)
    assert llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids == expected
