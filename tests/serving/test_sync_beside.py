"""AsyncLLM with concurrent synchronous calls of its ``llm``.

Every caller gets its answers, whichever thread runs the steps.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pagespec import AsyncLLM, EngineError, SamplingParams
from pagespec.serving.generation import AnswerDelta
from tests.support.content_llm import answer_alone, content_llm, text_alone
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner

PROMPT = [0, TOKEN_STRIDE, 0, 2 * TOKEN_STRIDE, TOKEN_STRIDE]
WAIT_S = 15


class SlowRunner(ContentRunner):
    """Steps that other threads overlap with; the next step raises ``error``."""

    error: BaseException | None = None
    delay_s = 0.0005

    def dispatch(self, plan: Any) -> Any:
        time.sleep(self.delay_s)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().dispatch(plan)


def made(pipeline_depth: int = 0, num_blocks: int = 60, **settings: Any) -> tuple[Any, AsyncLLM]:
    runner = SlowRunner(
        num_blocks=num_blocks, block_size=2, vocab_size=3, pipeline_depth=pipeline_depth
    )
    return runner, AsyncLLM(content_llm(runner=runner, num_blocks=num_blocks, **settings))


@contextmanager
def sync_calls(engine: AsyncLLM, **params: Any) -> Iterator[list[BaseException]]:
    """Consecutive calls of ``generate`` on a separate thread, until the block ends."""
    is_over, errors = threading.Event(), []
    sampling = SamplingParams(**{"max_tokens": 30, "seed": 1, "ignore_eos": True, **params})
    expected = answer_alone(engine.llm, PROMPT, sampling)

    def call() -> None:
        while not is_over.is_set():
            try:
                (output,) = engine.llm.generate(PROMPT, sampling, use_tqdm=False)
                assert output.outputs[0].token_ids == expected
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        yield errors
    finally:
        is_over.set()
        thread.join(60)
        assert not thread.is_alive()


def run(engine: AsyncLLM, test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            async with asyncio.timeout(60):
                await test()
                assert await engine.wait_for_requests_to_drain(10)
        finally:
            await engine.shutdown()

    asyncio.run(whole())
    engine.llm.engine.settle()
    now = engine.snapshot()
    assert (now.num_running, now.num_waiting, now.num_owned_blocks) == (0, 0, 0)


async def in_time(answer: Awaitable[Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await answer


async def collect(generation: Any) -> list[AnswerDelta]:
    return [delta async for group in generation.deltas() for delta in group]


@pytest.mark.parametrize("pipeline_depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_each_caller_is_answered_whichever_thread_steps(pipeline_depth: int, seed: int) -> None:
    _, engine = made(pipeline_depth, max_num_seqs=6)
    rng = random.Random(seed)

    async def ask(number: int) -> None:
        await asyncio.sleep(rng.random() * 0.05)
        n = rng.choice([1, 1, 3])
        params = SamplingParams(n=n, max_tokens=rng.randint(1, 12), seed=number)
        expected = [answer_alone(engine.llm, PROMPT, params, i) for i in range(n)]
        async with await engine.submit(PROMPT, params) as generation:
            way = rng.choice(["result", "deltas", "abort"])
            if way == "result":
                output = await in_time(generation.result())
                assert [answer.token_ids for answer in output.outputs] == expected
            elif way == "deltas":
                deltas = await in_time(collect(generation))
                for i in range(n):
                    own = [d for d in deltas if d.index == i]
                    assert [t for d in own for t in d.token_ids] == expected[i]
                    assert "".join(d.text for d in own) == text_alone(engine.llm, PROMPT, params, i)
                    assert own[-1].finish_reason in ("stop", "length")
            else:
                await asyncio.sleep(rng.random() * 0.01)
                generation.abort()
                output = await in_time(generation.result())
                for answer, whole in zip(output.outputs, expected, strict=True):
                    assert answer.token_ids == whole[: len(answer.token_ids)]

    async def test() -> None:
        with sync_calls(engine) as errors, sync_calls(engine, max_tokens=1):
            await asyncio.gather(*(ask(number) for number in range(24)))
        assert not errors

    run(engine, test)


def test_results_of_a_synchronous_step_while_paused_are_delivered() -> None:
    """No other thread runs a step then: all results come from the synchronous call."""
    _, engine = made()
    params = SamplingParams(n=2, max_tokens=5, seed=3, ignore_eos=True)

    async def test() -> None:
        await engine.pause_generation()
        generation = await engine.submit(PROMPT, params)
        reading = asyncio.create_task(collect(generation))
        longer = {"max_tokens": 20, "ignore_eos": True, "seed": 1}
        await asyncio.to_thread(
            engine.llm.generate, PROMPT, SamplingParams(**longer), use_tqdm=False
        )
        output = await in_time(generation.result())
        expected = [answer_alone(engine.llm, PROMPT, params, i) for i in range(2)]
        assert [answer.token_ids for answer in output.outputs] == expected
        deltas = await in_time(reading)
        for i in range(2):
            own = [d for d in deltas if d.index == i]
            assert [t for d in own for t in d.token_ids] == expected[i]
            assert own[-1].finish_reason == "length"
        assert engine.num_live_requests == 0
        await engine.resume_generation()

    run(engine, test)


def test_tokens_of_a_synchronous_step_are_streamed_at_once() -> None:
    """The stream has the token of each step before the next step."""
    _, engine = made()
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
    expected = answer_alone(engine.llm, PROMPT, params)

    async def test() -> None:
        await engine.pause_generation()
        generation = await engine.submit(PROMPT, params)
        deltas = generation.deltas()
        got: list[int] = []
        for num_tokens in range(1, 9):
            await asyncio.to_thread(engine.llm.engine.step)
            (delta,) = await in_time(anext(deltas))
            got += delta.token_ids
            assert got == expected[:num_tokens]
        await engine.resume_generation()

    run(engine, test)


@pytest.mark.parametrize("pipeline_depth", [0, 1])
@pytest.mark.parametrize(
    "error", [RuntimeError("lost, says the fake"), KeyboardInterrupt(), SystemExit(3)]
)
def test_a_synchronous_step_that_fails_ends_asynchronous_requests(
    pipeline_depth: int, error: BaseException
) -> None:
    runner, engine = made(pipeline_depth)
    params = SamplingParams(n=2, max_tokens=40, seed=3, ignore_eos=True)

    async def test() -> None:
        await engine.pause_generation()  # so that the synchronous call takes the step that fails
        generation = await engine.submit(PROMPT, params)
        streamed = await engine.submit(PROMPT, params)
        runner.error = error
        raised = await error_of_a_call(engine)
        assert isinstance(raised, EngineError if isinstance(error, Exception) else type(error))
        said = "says the fake" if isinstance(error, Exception) else type(error).__name__
        with pytest.raises(EngineError, match=said):
            await in_time(generation.result())
        with pytest.raises(EngineError, match=said):
            await in_time(collect(streamed))
        assert engine.num_live_requests == 0
        await engine.resume_generation()
        await engine.check_health()
        output = await in_time((await engine.submit(PROMPT, params)).result())
        assert output.outputs[0].token_ids == answer_alone(engine.llm, PROMPT, params)

    run(engine, test)


async def error_of_a_call(engine: AsyncLLM) -> BaseException | None:
    """The exception of a synchronous call on a separate thread."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            engine.llm.generate(PROMPT, SamplingParams(max_tokens=2), use_tqdm=False)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, WAIT_S)
    assert not thread.is_alive()
    return errors[0] if errors else None


@pytest.mark.parametrize("seed", range(3))
def test_failures_among_many_calls_leave_no_caller_waiting(seed: int) -> None:
    runner, engine = made(1, max_num_seqs=6)
    rng = random.Random(seed)
    num_failed = 0

    async def ask(number: int) -> None:
        nonlocal num_failed
        await asyncio.sleep(rng.random() * 0.1)
        params = SamplingParams(n=rng.choice([1, 2]), max_tokens=rng.randint(1, 12), seed=number)
        try:
            generation = await in_time(engine.submit(PROMPT, params))
            if rng.random() < 0.5:
                await in_time(collect(generation))
            output = await in_time(generation.result())
        except EngineError:
            num_failed += 1
        else:
            expected = answer_alone(engine.llm, PROMPT, params)
            assert output.outputs[0].token_ids == expected

    async def fail_now_and_then() -> None:
        for number in range(8):
            await asyncio.sleep(0.015)
            runner.error = SystemExit() if number % 2 else RuntimeError("lost, says the fake")

    async def test() -> None:
        with sync_calls(engine) as errors, sync_calls(engine, max_tokens=2):
            await asyncio.gather(fail_now_and_then(), *(ask(number) for number in range(40)))
        assert all(isinstance(error, (EngineError, SystemExit)) for error in errors)
        await in_time(engine.check_health())
        assert num_failed + len(errors) > 0

    run(engine, test)


@pytest.mark.parametrize("drain_s", [0.0, 30.0])
def test_shutdown_while_a_synchronous_call_steps(drain_s: float) -> None:
    _, engine = made()
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)

    async def test() -> None:
        with sync_calls(engine) as errors:
            generation = await engine.submit(PROMPT, params)
            waiting = asyncio.create_task(generation.result())
            await in_time(engine.shutdown(drain_s))
            (answer,) = (await in_time(waiting)).outputs
            assert answer.finish_reason == ("length" if drain_s else "abort")
            await asyncio.sleep(0.05)
        assert not errors

    run(engine, test)


def test_the_cache_is_reset_by_a_synchronous_call() -> None:
    """The reset settles steps in flight, which ends other requests."""
    _, engine = made(2)
    params = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)

    async def test() -> None:
        for number in range(30):
            generation = await engine.submit(PROMPT, params)
            await asyncio.sleep(number * 2e-4)
            await asyncio.to_thread(engine.llm.reset_prefix_cache)
            (answer,) = (await in_time(generation.result())).outputs
            assert answer.token_ids == answer_alone(engine.llm, PROMPT, params)

    run(engine, test)


def test_an_abort_by_another_thread_is_reported() -> None:
    _, engine = made()

    async def test() -> None:
        await engine.pause_generation()
        generation = await engine.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
        for request_id in list(engine.llm.engine.scheduler.requests):
            await asyncio.to_thread(engine.llm.engine.abort, request_id)
        (answer,) = (await in_time(generation.result())).outputs
        assert answer.finish_reason == "abort"
        await engine.resume_generation()

    run(engine, test)
