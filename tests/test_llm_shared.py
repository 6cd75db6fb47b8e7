"""Several calls on one ``LLM``: interleaved in one thread, and concurrent from many threads."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pagespec import LLM, EngineError, RequestOutput, SamplingParams
from pagespec.engine.invariants import check_state
from pagespec.engine.plan import StepPlan
from tests.support.content_llm import answer_alone, content_llm, text_alone
from tests.support.content_runner import TOKEN_STRIDE
from tests.support.models import tiny_model

PROMPT = [0, TOKEN_STRIDE, 0]
LONG = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True, seed=2)


@contextmanager
def failing(llm: LLM, error: BaseException) -> Iterator[None]:
    runner = llm.engine.runner
    dispatch = runner.dispatch

    def fail(_plan: StepPlan) -> object:
        raise error

    runner.dispatch = fail  # type: ignore[method-assign]
    yield
    runner.dispatch = dispatch  # type: ignore[method-assign]


# A failure of another call ----------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_stream_that_anothers_failure_ended_raises(error: BaseException, depth: int) -> None:
    llm = content_llm(pipeline_depth=depth)
    pieces = llm.stream(PROMPT, LONG)
    got = [next(pieces) for _ in range(3)]
    with failing(llm, error), pytest.raises((EngineError, KeyboardInterrupt)):
        llm.generate(PROMPT, SHORT, use_tqdm=False)
    with pytest.raises(EngineError, match=r"was ended: .*(out of memory|KeyboardInterrupt)"):
        got += list(pieces)
    assert text_alone(llm, PROMPT, LONG).startswith("".join(got))
    assert "".join(llm.stream(PROMPT, LONG)) == text_alone(llm, PROMPT, LONG)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_items_that_anothers_failure_ended_raise(error: BaseException) -> None:
    llm = content_llm()
    results = llm.generate_iter([(PROMPT, SHORT), (PROMPT, LONG)])
    first = next(results)
    assert isinstance(first, RequestOutput)
    with failing(llm, error), pytest.raises((EngineError, KeyboardInterrupt)):
        llm.generate(PROMPT, SHORT, use_tqdm=False)
    with pytest.raises(EngineError, match=r"was ended: .*(out of memory|KeyboardInterrupt)"):
        list(results)


def test_generate_raises_when_a_step_of_another_thread_failed() -> None:
    llm = content_llm(num_blocks=400)
    failures: list[str] = []

    def serve() -> None:
        try:
            llm.generate(PROMPT, SamplingParams(max_tokens=500, seed=1, ignore_eos=True))
        except EngineError as error:
            failures.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    while not llm.engine.has_work:
        time.sleep(0.001)
    # From here, each thread that steps fails, whichever of the two it is.
    with failing(llm, RuntimeError("out of memory")), pytest.raises(EngineError):
        llm.generate(PROMPT, SHORT, use_tqdm=False)
    thread.join(30)
    assert len(failures) == 1
    assert "out of memory" in failures[0]


def test_an_aborted_request_returns_its_partial_answer() -> None:
    llm = content_llm()
    pieces = llm.stream(PROMPT, LONG)
    got = [next(pieces) for _ in range(3)]
    llm.engine.abort(next(iter(llm.engine.scheduler.requests)))
    got += list(pieces)
    assert 3 <= len("".join(got)) < 30


# Calls given up -----------------------------------------------------------------------------------


def test_a_generator_finalised_inside_a_step_is_cleaned_up_after_it() -> None:
    llm = content_llm(pipeline_depth=1)
    results: Any = llm.generate_iter([(PROMPT, LONG)] * 3)
    cycle = [results, llm.stream(PROMPT, LONG)]
    next(cycle[1])
    cycle.append(cycle)  # only the garbage collector finds it
    dispatch = llm.engine.runner.dispatch

    def collect_garbage(plan: StepPlan) -> object:
        if plan.step == 4:
            gc.collect()
        return dispatch(plan)

    llm.engine.runner.dispatch = collect_garbage  # type: ignore[method-assign]
    del results, cycle
    output = llm.generate(PROMPT, LONG, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == answer_alone(llm, PROMPT, LONG)
    check_state(llm.engine.scheduler)
    assert not llm.engine.has_work


def test_a_callback_that_calls_back_is_refused() -> None:
    llm = content_llm()
    dispatch = llm.engine.runner.dispatch

    def call_back(plan: StepPlan) -> object:
        llm.generate(PROMPT, SHORT, use_tqdm=False)
        return dispatch(plan)

    llm.engine.runner.dispatch = call_back  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="in use by this thread"):
        llm.generate(PROMPT, SHORT, use_tqdm=False)
    llm.engine.runner.dispatch = dispatch  # type: ignore[method-assign]
    output = llm.generate(PROMPT, SHORT, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == answer_alone(llm, PROMPT, SHORT)


# Threads ------------------------------------------------------------------------------------------


@pytest.fixture
def fast_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_threads(calls: list[Callable[[], None]]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    return errors


def mixed_calls(llm: LLM, expected: Callable[..., list[int]], seed: int, has_text: bool) -> None:
    """Some calls of each kind, whose answers must be those of each request alone."""
    rng = random.Random(seed)
    for _ in range(5):
        questions = []
        for _ in range(rng.randint(1, 3)):
            prompt = [rng.randrange(2) * TOKEN_STRIDE for _ in range(rng.randint(1, 6))]
            params = SamplingParams(max_tokens=rng.randint(1, 12), seed=rng.randrange(3))
            questions.append((prompt, params))
        alone = [expected(*question) for question in questions]
        kind = rng.randrange(3 if has_text else 2)
        if kind == 0:
            prompts, params_list = zip(*questions, strict=True)
            outputs = llm.generate(list(prompts), list(params_list), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == alone
        elif kind == 1:
            results = llm.generate_iter(questions, window=2)
            assert [r.outputs[0].token_ids for r in results] == alone  # type: ignore[union-attr]
        else:
            assert "".join(llm.stream(*questions[0])) == text_alone(llm, *questions[0])
            abandoned = llm.stream(*questions[0])
            next(abandoned, None)
            abandoned.close()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_many_threads_share_an_llm(fast_switching: None, depth: int) -> None:
    llm = content_llm(num_blocks=40, pipeline_depth=depth, max_num_seqs=6, check_invariants=True)

    def alone(prompt: list[int], params: SamplingParams) -> list[int]:
        return answer_alone(llm, prompt, params)

    errors = run_threads(
        [lambda seed=seed: mixed_calls(llm, alone, seed, True) for seed in range(12)]
    )
    assert not errors, errors
    llm.generate(PROMPT, SHORT, use_tqdm=False)  # clears away what a close left to the next
    check_state(llm.engine.scheduler)
    assert not llm.engine.has_work
    assert not llm.engine._records


def test_many_threads_share_a_real_model() -> None:
    llm = LLM(tiny_model("llama"), max_num_seqs=4, num_blocks=40, compile="eager")
    params = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
    prompts = [[5 + i, 6, 7] for i in range(8)]
    alone = [llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]

    def call(i: int) -> None:
        for _ in range(3):
            output = llm.generate(prompts[i], params, use_tqdm=False)[0]
            assert output.outputs[0].token_ids == alone[i]
            results = llm.generate_iter([(prompts[i], params), (prompts[i - 1], params)])
            got = [r.outputs[0].token_ids for r in results]  # type: ignore[union-attr]
            assert got == [alone[i], alone[i - 1]]

    errors = run_threads([lambda i=i: call(i) for i in range(8)])
    assert not errors, errors


def test_calls_of_several_threads_are_batched() -> None:
    llm = content_llm(num_blocks=600, max_num_seqs=8)
    num_rows: list[int] = []
    dispatch = llm.engine.runner.dispatch

    def watched(plan: StepPlan) -> object:
        num_rows.append(len(plan))
        time.sleep(0.001)
        return dispatch(plan)

    llm.engine.runner.dispatch = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
    errors = run_threads([lambda: llm.generate(PROMPT, params, use_tqdm=False)] * 4)  # type: ignore[list-item]
    assert not errors, errors
    assert len(num_rows) < 200, "four requests of 100 steps each, together"
    assert num_rows.count(4) > 50


def slow_steps(llm: LLM) -> None:
    """Each step releases the interpreter to other threads for a while, as a model does."""
    dispatch = llm.engine.runner.dispatch

    def slow(plan: StepPlan) -> object:
        time.sleep(0.0005)
        return dispatch(plan)

    llm.engine.runner.dispatch = slow  # type: ignore[method-assign]


def test_no_thread_starves() -> None:
    """A long call steps the engine in a loop; concurrent short calls must make progress."""
    llm = content_llm(num_blocks=2000, block_size=4, max_num_seqs=4)
    slow_steps(llm)
    is_done = threading.Event()
    params = SamplingParams(max_tokens=1000, seed=1, ignore_eos=True)

    def long_call() -> None:
        llm.generate(PROMPT, params, use_tqdm=False)
        is_done.set()

    num_served = [0, 0]

    def short_calls(i: int) -> None:
        while not is_done.is_set():
            llm.generate(PROMPT, SHORT, use_tqdm=False)
            num_served[i] += 1

    errors = run_threads([long_call, lambda: short_calls(0), lambda: short_calls(1)])
    assert not errors, errors
    assert min(num_served) > 80, "of some 250 that fit beside it"


def test_streams_of_several_threads_get_each_token_when_it_is_there() -> None:
    """If each thread ran its own step before reading, it would read only every eighth token in
    time."""
    llm = content_llm(num_blocks=2000, block_size=4, max_num_seqs=8)
    slow_steps(llm)
    params = SamplingParams(max_tokens=120, seed=1, ignore_eos=True)
    num_pieces: list[int] = []

    def stream() -> None:
        num_pieces.append(len(list(llm.stream(PROMPT, params))))

    errors = run_threads([stream] * 8)
    assert not errors, errors
    assert sum(num_pieces) > 8 * 30


def test_an_interrupt_in_one_thread_ends_the_calls_of_others_with_an_error() -> None:
    llm = content_llm(num_blocks=2000, block_size=4, max_num_seqs=4)
    params = SamplingParams(max_tokens=4000, seed=1, ignore_eos=True)
    dispatch = llm.engine.runner.dispatch
    num_steps = [0]

    def interrupted(plan: StepPlan) -> object:
        num_steps[0] += len(plan) == 3
        if num_steps[0] == 20:
            num_steps[0] += 1
            raise KeyboardInterrupt
        return dispatch(plan)

    llm.engine.runner.dispatch = interrupted  # type: ignore[method-assign]
    errors = run_threads([lambda: llm.generate(PROMPT, params, use_tqdm=False)] * 3)  # type: ignore[list-item]
    kinds = sorted(type(error).__name__ for error in errors)
    assert kinds == ["EngineError", "EngineError", "KeyboardInterrupt"]
    output = llm.generate(PROMPT, SHORT, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == answer_alone(llm, PROMPT, SHORT)
    check_state(llm.engine.scheduler)
