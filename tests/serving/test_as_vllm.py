"""AsyncLLM as vLLM's users call it: ``from_engine_args``, ``abort``, ``shutdown``, its states."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pagespec import AsyncEngineArgs, AsyncLLM, EngineStoppedError, InvalidInputError
from pagespec.engine.sampling_params import SamplingParams
from pagespec.llm_engine import ASYNC_INSTEAD as INSTEAD
from pagespec.params.foreign import CALL
from tests.support.content_llm import answer_alone, content_llm
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner

PROMPT = [0, TOKEN_STRIDE, 0, 2 * TOKEN_STRIDE, TOKEN_STRIDE]
SHORT = SamplingParams(max_tokens=4, seed=5, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)


class SlowRunner(ContentRunner):
    def collect(self, *given: Any) -> Any:
        time.sleep(0.01)
        return super().collect(*given)


def slow_llm() -> Any:
    return content_llm(runner=SlowRunner(num_blocks=24, block_size=2, vocab_size=3))


def run(test: Callable[[AsyncLLM], Awaitable[None]], llm: Any = None) -> None:
    async def whole() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=llm or content_llm()))
        try:
            async with asyncio.timeout(60):
                await test(engine)
        finally:
            await engine.shutdown()

    asyncio.run(whole())


def test_generate_as_vllm_calls_it() -> None:
    llm = content_llm()
    expected = answer_alone(llm, PROMPT, SHORT)

    async def test(engine: AsyncLLM) -> None:
        prompt: Any = {"prompt_token_ids": PROMPT}
        neutral: dict[str, Any] = dict.fromkeys(CALL)
        for given in ({}, {"priority": 0, **neutral}, {"tokenization_kwargs": {}}):
            async for output in engine.generate(
                request_id="a", prompt=prompt, sampling_params=SHORT, **given
            ):
                assert output.request_id == "a" or not output.finished
            assert output.outputs[0].token_ids == expected
        with pytest.raises(InvalidInputError, match=r"^lora_request = .*merge the adapter"):
            async for _ in engine.generate(prompt, SHORT, "b", lora_request=object()):
                pass

    run(test, llm)


def test_tokenization_options_are_those_of_llm_generate() -> None:
    last_two = {"tokenization_kwargs": {"truncation": True, "max_length": 2}}

    async def test(engine: AsyncLLM) -> None:
        seen = [output async for output in engine.generate(PROMPT, SHORT, "a", **last_two)]
        assert seen[-1].prompt_token_ids == PROMPT[-2:]
        async with await engine.submit(engine.llm.reader.read(PROMPT), SHORT, **last_two) as one:
            assert (await one.result()).prompt_token_ids == PROMPT[-2:]
        with pytest.raises(InvalidInputError, match=r"^tokenization_kwargs.stride = 2"):
            await engine.submit(PROMPT, SHORT, tokenization_kwargs={"stride": 2})

    run(test)


def test_several_requests_are_aborted_at_once() -> None:
    async def test(engine: AsyncLLM) -> None:
        made = [await engine.submit(PROMPT, LONG, str(i)) for i in range(4)]
        await engine.abort(["1", "3", "no such id"], internal=False)
        await engine.abort("0")
        ends = [(await one.result()).outputs[0].finish_reason for one in made]
        assert ends == ["abort", "abort", "length", "abort"]
        with pytest.raises(InvalidInputError, match=r"^internal = True"):
            await engine.abort("0", internal=True)

    run(test, slow_llm())


def test_states_before_and_after_shutdown() -> None:
    async def test(engine: AsyncLLM) -> None:
        assert engine.is_running
        assert not engine.is_stopped
        assert not engine.errored
        assert engine.get_tokenizer() is engine.tokenizer is engine.llm.tokenizer
        assert not await engine.is_tracing_enabled()
        await engine.do_log_stats()
        await engine.check_health()
        await engine.shutdown()
        assert engine.is_stopped
        assert engine.errored
        assert "ended" in str(engine.dead_error)

    run(test)


@pytest.mark.parametrize("given", [{}, {"drain_s": 30.0}, {"timeout": 30}])
def test_shutdown_without_await_aborts(given: dict[str, Any]) -> None:
    async def test() -> None:
        others = set(threading.enumerate())
        engine = AsyncLLM(slow_llm())
        generation = await engine.submit(PROMPT, LONG)
        (own,) = (
            t for t in threading.enumerate() if t.name == "pagespec-engine" and t not in others
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.shutdown(**given)
            gc.collect()
        assert not own.is_alive()
        answer = (await asyncio.wait_for(generation.result(), 10)).outputs[0]
        assert answer.finish_reason == "abort"
        with pytest.raises(EngineStoppedError):
            await engine.submit(PROMPT, LONG)
        await engine.shutdown()

    asyncio.run(test())


def test_shutdown_with_vllms_name_of_the_drain() -> None:
    async def test() -> None:
        engine = AsyncLLM(slow_llm())
        generation = await engine.submit(PROMPT, LONG)
        await engine.shutdown(timeout=30.0)
        assert (await generation.result()).outputs[0].finish_reason == "length"

    asyncio.run(test())


def test_shutdown_outside_an_event_loop() -> None:
    engine = AsyncLLM(content_llm())
    engine.shutdown()
    asyncio.run(engine.shutdown())
    assert engine.is_stopped


def test_a_pause_with_vllms_older_argument() -> None:
    async def test(engine: AsyncLLM) -> None:
        generation = await engine.submit(PROMPT, LONG)
        await engine.pause_generation(wait_for_inflight_requests=True, clear_cache=False)
        assert generation.has_ended
        await engine.resume_generation()
        with pytest.raises(InvalidInputError, match=r"^clear_cache = 1"):
            await engine.pause_generation(clear_cache=1)  # type: ignore[arg-type]

    run(test, slow_llm())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"start_engine_loop": False}, "start_engine_loop = False"),
        ({"stat_loggers": [object]}, "/metrics"),
        ({"nonsense": 1}, "nonsense = 1: there is no such argument"),
    ],
)
def test_arguments_of_from_engine_args_are_checked(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model="m"), **given)


@pytest.mark.parametrize("name", sorted(set(INSTEAD) - set(dir(AsyncLLM))))
def test_a_missing_method_names_the_replacement(name: str) -> None:
    engine = object.__new__(AsyncLLM)
    with pytest.raises(AttributeError, match=name) as caught:
        getattr(engine, name)
    assert INSTEAD[name] in str(caught.value)
