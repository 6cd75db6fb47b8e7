"""AsyncLLM over the content runner: each request gets the answer that it gets alone."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pagespec import (
    AsyncLLM,
    EngineBusyError,
    EngineError,
    EngineStoppedError,
    InvalidInputError,
    SamplingParams,
)
from pagespec.engine.sampling_params import RequestOutputKind
from pagespec.serving.generation import AnswerDelta
from tests.support.content_llm import answer_alone, content_llm, text_alone
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner

PROMPT = [0, TOKEN_STRIDE, 0, 2 * TOKEN_STRIDE, TOKEN_STRIDE]
LONG = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)


def run(test: Callable[[AsyncLLM], Awaitable[None]], **settings: Any) -> None:
    """Run a test on an engine, which must be empty and intact when the test ends."""
    limit = settings.pop("max_num_requests", None)

    async def whole() -> None:
        llm = content_llm(**settings)
        engine = AsyncLLM(llm, max_num_requests=limit)
        try:
            async with asyncio.timeout(60):
                await test(engine)
                assert await engine.wait_for_requests_to_drain(10)
        finally:
            await engine.shutdown()
        llm.engine.settle()
        now = engine.snapshot()
        assert (now.num_running, now.num_waiting, now.num_paused) == (0, 0, 0)
        assert now.num_owned_blocks == 0  # S14

    asyncio.run(whole())


class SlowRunner(ContentRunner):
    """Slow, so that a request does not end before its caller has read it."""

    def dispatch(self, plan: Any) -> Any:
        time.sleep(0.001)
        return super().dispatch(plan)


class FailingCollect(SlowRunner):
    """Fails once when the tokens of a step are read."""

    is_failing = False

    def collect(self, handle: Any) -> Any:
        if self.is_failing:
            self.is_failing = False
            raise RuntimeError("lost, says the fake")
        return super().collect(handle)


def slow_runner(pipeline_depth: int = 0, num_blocks: int = 24) -> ContentRunner:
    return SlowRunner(
        num_blocks=num_blocks, block_size=2, vocab_size=3, pipeline_depth=pipeline_depth
    )


async def collect(deltas: Any) -> list[AnswerDelta]:
    return [delta async for group in deltas for delta in group]


@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_many_callers_get_what_each_gets_alone(pipeline_depth: int) -> None:
    rng = random.Random(3)

    async def test(engine: AsyncLLM) -> None:
        async def ask(number: int) -> None:
            await asyncio.sleep(rng.random() * 0.02)
            prompt = [rng.randrange(3) * TOKEN_STRIDE for _ in range(rng.randint(1, 9))]
            n = rng.choice([1, 1, 3])
            params = SamplingParams(n=n, max_tokens=rng.randint(1, 9), seed=number)
            expected = [answer_alone(engine.llm, prompt, params, i) for i in range(n)]
            texts = [text_alone(engine.llm, prompt, params, i) for i in range(n)]
            async with await engine.submit(prompt, params) as generation:
                if number % 2:
                    output = await generation.result()
                    assert [answer.token_ids for answer in output.outputs] == expected
                    assert [answer.text for answer in output.outputs] == texts
                else:
                    deltas = await collect(generation.deltas())
                    for index in range(n):
                        own = [delta for delta in deltas if delta.index == index]
                        assert [t for d in own for t in d.token_ids] == expected[index]
                        assert "".join(d.text for d in own) == texts[index]
                        assert [d.finish_reason is None for d in own[:-1]] == [True] * (
                            len(own) - 1
                        )
                        assert own[-1].finish_reason in ("stop", "length")

        await asyncio.gather(*(ask(number) for number in range(60)))

    run(test, pipeline_depth=pipeline_depth, max_num_seqs=5)


def test_generate_yields_growing_answers() -> None:
    async def test(engine: AsyncLLM) -> None:
        lengths, last = [], None
        async for output in engine.generate(PROMPT, LONG, "mine"):
            assert output.request_id == "mine"
            lengths.append(len(output.outputs[0].token_ids))
            last = output
        assert last is not None
        assert last.finished
        assert lengths == sorted(lengths)
        assert last.outputs[0].token_ids == answer_alone(engine.llm, PROMPT, LONG)

    run(test, runner=slow_runner())


@pytest.mark.parametrize("num", [1, 3])
def test_deltas_joined_are_the_only_output_of_the_kind_final_only(num: int) -> None:
    async def test(engine: AsyncLLM) -> None:
        params = SamplingParams(n=num, max_tokens=12, seed=5, ignore_eos=True)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        (final,) = [output async for output in engine.generate(PROMPT, params)]
        assert final.finished
        params.output_kind = RequestOutputKind.DELTA
        deltas = [output async for output in engine.generate(PROMPT, params)]
        assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
        assert len(deltas) > 2
        joined = deltas[0]
        for output in deltas[1:]:
            assert all(answer.token_ids or answer.finish_reason for answer in output.outputs)
            joined.add(output, aggregate=True)
        assert sorted(joined.outputs, key=lambda answer: answer.index) == final.outputs
        assert final.outputs[0].token_ids == answer_alone(engine.llm, PROMPT, params)

    run(test, runner=slow_runner())


@pytest.mark.parametrize("way", ["close", "cancel", "forget", "abort", "leave"])
def test_a_disconnected_request_is_aborted(way: str) -> None:
    async def test(engine: AsyncLLM) -> None:
        await engine.pause_generation()  # so that it cannot just end

        async def read() -> None:
            async for _ in engine.generate(PROMPT, LONG, "mine"):
                pass

        if way == "cancel":
            task = asyncio.create_task(read())
            while not engine.num_live_requests:
                await asyncio.sleep(0.001)
            task.cancel()
        elif way == "leave":
            async with await engine.submit(PROMPT, LONG):
                assert engine.num_live_requests == 1
        elif way == "close":
            await engine.resume_generation()
            generator = engine.generate(PROMPT, LONG)
            await anext(generator)
            await generator.aclose()
        else:
            generation = await engine.submit(PROMPT, LONG, "mine")
            assert engine.num_live_requests == 1
            if way == "forget":
                del generation
                gc.collect()
            else:
                await engine.abort("mine")
                assert (await generation.result()).outputs[0].finish_reason == "abort"
        await engine.resume_generation()

    run(test, runner=slow_runner())


@pytest.mark.parametrize("ending", ["its caller goes away", "resume"])
def test_a_pause_that_waits_may_end_early_and_blocks_no_request(ending: str) -> None:
    async def test(engine: AsyncLLM) -> None:
        first = await engine.submit(PROMPT, LONG)
        pause = asyncio.create_task(engine.pause_generation("wait"))
        await asyncio.sleep(0.02)
        if ending == "resume":
            await engine.resume_generation()
            with pytest.raises(EngineStoppedError, match="pause was ended"):
                await pause
        else:
            pause.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pause
        assert not await engine.is_paused()
        async with asyncio.timeout(20):
            await (await engine.submit(PROMPT, LONG)).result()
            await first.result()

    run(test, runner=slow_runner(1))


def test_more_continuations_than_can_ever_be_live_are_refused_before_they_are_made() -> None:
    async def test(engine: AsyncLLM) -> None:
        engine._make = None  # type: ignore[assignment, method-assign]
        items = [(PROMPT, SamplingParams(n=2, seed=1))] * 2
        with pytest.raises(InvalidInputError, match=r"^n = 4: must be at most max_num_requests"):
            await engine.submit_all(items)

    run(test, max_num_requests=3)


def test_the_loop_does_not_wait_for_a_thread_that_encodes_a_long_text() -> None:
    async def test(engine: AsyncLLM) -> None:
        is_held, go_on = threading.Event(), threading.Event()

        def encode() -> None:
            with engine._reader.encoding_lock:
                is_held.set()
                go_on.wait(20)

        thread = threading.Thread(target=encode)
        thread.start()
        is_held.wait(20)
        try:
            asked = asyncio.create_task(engine.submit(PROMPT, LONG))
            began = time.monotonic()
            await asyncio.sleep(0.05)
            assert time.monotonic() - began < 5
        finally:
            go_on.set()
            thread.join()
        assert (await (await asked).result()).finished

    run(test)


@pytest.mark.parametrize("form", ["list", "prompt_token_ids", "segments", "many segments"])
def test_long_lists_of_ids_are_not_checked_on_the_loop(form: str) -> None:
    """In every form of prompt; a short list is checked on the loop."""

    def prompt_of(ids: list[int]) -> Any:
        if form == "list":
            return ids
        if form == "prompt_token_ids":
            return {"prompt_token_ids": ids}
        size = 1 if form == "many segments" else len(ids) // 2
        parts = [ids[i : i + size] for i in range(0, len(ids), size)]
        return {"segments": [{"prompt_token_ids": part} for part in parts]}

    async def test(engine: AsyncLLM) -> None:
        make, threads = engine._make, []

        def recorded(*given: Any) -> Any:
            threads.append(threading.get_ident())
            return make(*given)

        engine._make = recorded  # type: ignore[method-assign]
        await (await engine.submit(prompt_of([1, 2, 3, 4]), LONG)).result()
        with pytest.raises(InvalidInputError, match="40000 tokens"):
            await engine.submit(prompt_of([1] * 40_000), LONG)
        loop = threading.get_ident()
        assert [thread == loop for thread in threads] == [True, False]

    run(test)


def test_an_observer_that_raises_delays_no_other() -> None:
    class Raising:
        def __getattr__(self, name: str) -> Any:
            def fail(*_: object) -> None:
                raise OverflowError(name)

            return fail

    async def test(engine: AsyncLLM) -> None:
        engine.observers.append(Raising())
        for _ in range(2):
            async with asyncio.timeout(20):
                assert (await (await engine.submit(PROMPT, LONG)).result()).finished

    run(test)


def test_modes_of_pause() -> None:
    async def test(engine: AsyncLLM) -> None:
        expected = answer_alone(engine.llm, PROMPT, LONG)
        for mode in ("keep", "wait", "abort"):
            first = await engine.submit(PROMPT, LONG)
            async for _ in first.deltas():
                break
            await engine.pause_generation(mode)
            assert await engine.is_paused()
            num_steps = engine.snapshot().num_steps
            later = asyncio.create_task(engine.submit(PROMPT, LONG))
            await asyncio.sleep(0.02)
            assert engine.snapshot().num_steps == num_steps
            await engine.resume_generation()
            answer = (await first.result()).outputs[0]
            assert answer.finish_reason == ("abort" if mode == "abort" else "length")
            assert answer.token_ids == expected[: len(answer.token_ids)]
            assert (await (await later).result()).outputs[0].token_ids == expected
        with pytest.raises(InvalidInputError, match="mode"):
            await engine.pause_generation("now")

    run(test, runner=slow_runner(1))


def test_the_cache_is_reset_in_mid_run() -> None:
    async def test(engine: AsyncLLM) -> None:
        generations = [await engine.submit(PROMPT, LONG) for _ in range(3)]
        for _ in range(5):
            assert await engine.reset_prefix_cache()
            assert not await engine.reset_prefix_cache(reset_running_requests=False)
            await asyncio.sleep(0.001)
        for generation in generations:
            output = await generation.result()
            assert output.outputs[0].token_ids == answer_alone(engine.llm, PROMPT, LONG)
        await engine.wait_for_requests_to_drain()
        assert await engine.reset_prefix_cache(reset_running_requests=False)
        with pytest.raises(InvalidInputError, match="reset_connector"):
            await engine.reset_prefix_cache(reset_connector=True)

    run(test, runner=slow_runner(1, 80), num_blocks=80)


@pytest.mark.parametrize("how", ["pause", "reset"])
def test_requests_that_end_in_settled_steps_are_reported(how: str) -> None:
    params = SamplingParams(max_tokens=6, seed=5, ignore_eos=True)

    async def test(engine: AsyncLLM) -> None:
        for number in range(40):
            async with await engine.submit(PROMPT, params) as generation:
                # Some time in the answer: at most moments its last tokens are in flight.
                await asyncio.sleep(number * 3e-4)
                if how == "pause":
                    await engine.pause_generation()
                    await engine.resume_generation()
                else:
                    await engine.reset_prefix_cache()
                async with asyncio.timeout(5):
                    (answer,) = (await generation.result()).outputs
                assert answer.token_ids == answer_alone(engine.llm, PROMPT, params)

    run(test, runner=slow_runner(pipeline_depth=4), pipeline_depth=4)


@pytest.mark.parametrize("how", ["pause", "reset"])
def test_a_step_that_fails_when_it_is_settled_ends_its_requests(how: str) -> None:
    runner = FailingCollect(num_blocks=24, block_size=2, vocab_size=3, pipeline_depth=1)

    async def test(engine: AsyncLLM) -> None:
        async with await engine.submit(PROMPT, LONG) as generation:
            while generation.num_output_tokens == 0:
                await asyncio.sleep(0.001)
            operation = engine.pause_generation if how == "pause" else engine.reset_prefix_cache

            def fail_what_is_next() -> None:
                runner.is_failing = True
                time.sleep(0.1)  # until the operation is there: then no step comes before it

            engine._thread.call(fail_what_is_next)
            with pytest.raises(EngineError):
                await operation()
            with pytest.raises(EngineError):
                async with asyncio.timeout(5):
                    await generation.result()
        await engine.check_health()
        await engine.resume_generation()

    run(test, runner=runner, pipeline_depth=1)


def test_requests_beyond_the_limit_are_refused_and_disturb_no_others() -> None:
    async def test(engine: AsyncLLM) -> None:
        first = await engine.submit(PROMPT, LONG, "first")
        with pytest.raises(EngineBusyError, match="max_num_requests = 2"):
            await engine.submit(PROMPT, SamplingParams(n=2, seed=1))
        with pytest.raises(InvalidInputError, match="request_id = 'first': is in use"):
            await engine.submit(PROMPT, LONG, "first")
        with pytest.raises(InvalidInputError, match=r"prompts\[1\]"):
            await engine.submit_all([(PROMPT, LONG), ([], LONG)])
        with pytest.raises(InvalidInputError, match="max_tokens"):
            await engine.submit(
                [0] * 40, SamplingParams(max_tokens=200, ignore_eos=True, min_tokens=201)
            )
        assert (await first.result()).outputs[0].finish_reason == "length"
        assert (await (await engine.submit(PROMPT, LONG, "first")).result()).finished

    run(test, max_num_requests=2, runner=slow_runner())


@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_a_failed_step_ends_its_requests_and_the_engine_checks_itself(pipeline_depth: int) -> None:
    runner = slow_runner(pipeline_depth)

    async def test(engine: AsyncLLM) -> None:
        generations = [await engine.submit(PROMPT, LONG) for _ in range(3)]
        runner.fail_at_step = runner.num_steps + 2
        for generation in generations:
            with pytest.raises(EngineError, match="says the fake"):
                await collect(generation.deltas())
        await engine.check_health()
        output = await (await engine.submit(PROMPT, LONG)).result()
        assert output.outputs[0].token_ids == answer_alone(engine.llm, PROMPT, LONG)

    run(test, runner=runner)


def test_an_engine_that_fails_for_good_says_so() -> None:
    class Broken(SlowRunner):
        is_broken = False

        def dispatch(self, plan: Any) -> Any:
            if self.is_broken:
                raise RuntimeError("no device")
            return super().dispatch(plan)

    runner = Broken(num_blocks=24, block_size=2, vocab_size=3)

    async def test(engine: AsyncLLM) -> None:
        generation = await engine.submit(PROMPT, LONG)
        runner.is_broken = True
        with pytest.raises(EngineError):
            await generation.result()
        with pytest.raises(EngineError, match="no device"):
            await engine.submit(PROMPT, LONG)
        with pytest.raises(EngineError, match="no device"):
            await engine.check_health()
        runner.is_broken = False
        assert (await (await engine.submit(PROMPT, LONG)).result()).finished
        await engine.check_health()

    run(test, runner=runner)


@pytest.mark.parametrize("drain_s", [0.0, 30.0])
def test_shutdown_drains_or_aborts(drain_s: float) -> None:
    async def test() -> None:
        engine = AsyncLLM(content_llm(runner=slow_runner()))
        generation = await engine.submit(PROMPT, LONG)
        await engine.shutdown(drain_s)
        answer = (await generation.result()).outputs[0]
        assert answer.finish_reason == ("length" if drain_s else "abort")
        with pytest.raises(EngineStoppedError):
            await engine.submit(PROMPT, LONG)
        await engine.shutdown()

    asyncio.run(test())


def test_callers_on_several_loops() -> None:
    llm = content_llm()
    engine = AsyncLLM(llm)
    expected = answer_alone(llm, PROMPT, LONG)

    async def ask() -> list[int]:
        return (await (await engine.submit(PROMPT, LONG)).result()).outputs[0].token_ids

    async def on_threads() -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(asyncio.run, ask()) for _ in range(8)))

    assert asyncio.run(on_threads()) == [expected] * 8
    asyncio.run(engine.shutdown())
