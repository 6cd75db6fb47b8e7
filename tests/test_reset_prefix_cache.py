"""`LLM.reset_prefix_cache`: running requests continue, and no earlier KV block is reused."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pagespec import LLM, EngineError, RequestOutput, SamplingParams
from pagespec.engine.invariants import check_state
from pagespec.engine.request import Request
from spec import replay
from tests.support.content_llm import answer_alone, content_llm, text_alone
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner
from tests.support.models import tiny_model

PROMPT = [0, TOKEN_STRIDE, 0, 0, TOKEN_STRIDE, 0, 0]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)


def reset_for_new_weights(llm: LLM) -> None:
    runner = llm.engine.runner
    assert isinstance(runner, ContentRunner)
    assert llm.reset_prefix_cache() is True
    runner.change_weights()
    blocks = llm.engine.scheduler.blocks
    assert not blocks.index
    assert len(blocks.free) == blocks.num_blocks
    check_state(llm.engine.scheduler)


def num_hits(llm: LLM) -> int:
    output = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == answer_alone(llm, PROMPT, PARAMS)
    return output.metrics.num_cached_tokens


def test_there_are_hits_before_and_none_after() -> None:
    llm = content_llm()
    queues = llm.engine.scheduler.queues
    assert [num_hits(llm), num_hits(llm)] == [0, 6]
    assert (queues.num_queried_tokens, queues.num_hit_tokens) == (14, 6)
    reset_for_new_weights(llm)
    assert [num_hits(llm), num_hits(llm)] == [0, 6]
    assert (queues.num_queried_tokens, queues.num_hit_tokens) == (28, 12)
    assert queues.num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_streams_continue_with_unchanged_answers(depth: int, tmp_path: Path) -> None:
    """A running stream, one with pending siblings, and a waiting one all give unchanged answers."""
    path = tmp_path / "trace.jsonl"
    llm = content_llm(
        pipeline_depth=depth,
        max_num_seqs=2,
        max_num_batched_tokens=3,
        check_invariants=True,
        trace=path,
    )
    several = SamplingParams(max_tokens=9, ignore_eos=True, seed=3, n=3)
    streams = [llm.stream_all(PROMPT, PARAMS), llm.stream_all(PROMPT[::-1], several)]
    texts = [{0: ""}, {0: "", 1: "", 2: ""}]
    for number in range(24):
        for text, stream in zip(texts, streams, strict=True):
            for index, piece in (item for item in [next(stream, None)] if item is not None):
                text[index] += piece
        if number % 5 == 0:
            reset_for_new_weights(llm)
    for text, stream in zip(texts, streams, strict=True):
        for index, piece in stream:
            text[index] += piece
    assert texts[0][0] == text_alone(llm, PROMPT, PARAMS)
    for index in range(3):
        assert texts[1][index] == text_alone(llm, PROMPT[::-1], several, index)
    verdict = replay.check(path.read_text().splitlines())
    assert not verdict.property_id, verdict
    assert verdict.num_preemptions == llm.engine.scheduler.queues.num_preemptions > 2


@pytest.mark.parametrize("depth", [1, 2])
def test_what_ends_while_it_settles_ends_as_usual(depth: int) -> None:
    llm = content_llm(pipeline_depth=depth)
    ended: list[tuple[int, list[Request]]] = []
    settle_oldest = llm.engine._settle_oldest

    def watched() -> list:
        ended.append(settle_oldest())
        return ended[-1]

    llm.engine._settle_oldest = watched  # type: ignore[method-assign]
    short = SamplingParams(max_tokens=2, ignore_eos=True, seed=2)
    stream = llm.stream_all(PROMPT, short)
    text = next(stream)[1]
    reset_for_new_weights(llm)
    assert [len(finished) for _, finished in ended] == [0, 1], "in the reset"
    text += "".join(piece for _, piece in stream)
    assert text == text_alone(llm, PROMPT, short)
    assert not llm.engine.has_work
    assert not llm.engine._records


def test_settling_dispatches_nothing() -> None:
    llm = content_llm(pipeline_depth=1)
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    assert llm.engine.scheduler.in_flight
    num_steps = llm.engine.scheduler.num_steps
    assert llm.engine.settle() == []
    assert not llm.engine.scheduler.in_flight
    assert (llm.engine.settle(), llm.engine.scheduler.num_steps) == ([], num_steps)
    stream.close()


def test_a_step_that_fails_while_it_settles_fails_the_reset_and_what_was_served() -> None:
    llm = content_llm(pipeline_depth=1)
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    collect = llm.engine.runner.collect

    def fail(_handle: object) -> None:
        raise RuntimeError("the device is gone")

    llm.engine.runner.collect = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="a step failed: the device is gone"):
        llm.reset_prefix_cache()
    llm.engine.runner.collect = collect  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the device is gone"):
        list(stream)
    assert num_hits(llm) == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_one_thread_resets_while_others_generate(depth: int) -> None:
    llm = content_llm(num_blocks=40, pipeline_depth=depth, max_num_seqs=4, check_invariants=True)
    runner, scheduler = llm.engine.runner, llm.engine.scheduler
    reset = scheduler.reset_prefix_cache

    def reset_with_weights() -> None:
        reset()
        runner.change_weights()  # type: ignore[attr-defined]

    scheduler.reset_prefix_cache = reset_with_weights  # type: ignore[method-assign]
    answers: list[list[int]] = []

    def generate() -> None:
        for _ in range(8):
            answers.append(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids)

    threads = [threading.Thread(target=generate, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        llm.reset_prefix_cache()
    assert answers == [answer_alone(llm, PROMPT, PARAMS)] * 24


@pytest.mark.parametrize("overlap", [False, True])
def test_a_real_model_reads_nothing_of_what_the_cache_held(overlap: bool) -> None:
    llm = LLM(tiny_model("llama"), max_num_seqs=3, num_blocks=40, compile="eager", overlap=overlap)
    prompts = [[5, 6, 7] * 12, [9] * 33, [5, 6, 7] * 12, [9] * 33]
    items = [
        (prompt, SamplingParams(temperature=1.0, seed=3, max_tokens=length, ignore_eos=True, n=n))
        for prompt, length, n in zip(prompts, (4, 20, 9, 20), (1, 1, 2, 1), strict=True)
    ]

    def answers(result: object) -> list[list[int]]:
        assert isinstance(result, RequestOutput)
        return [answer.token_ids for answer in result.outputs]

    undisturbed = [answers(result) for result in llm.generate_iter(items)]
    results = llm.generate_iter(items)
    found = [answers(next(results))]
    queues = llm.engine.scheduler.queues
    assert queues.running
    assert queues.waiting
    assert llm.engine.scheduler.blocks.index
    llm.reset_prefix_cache()
    for caches in llm._runner.kv_caches:
        for cache in caches:
            cache.fill_(1e4)
    found += map(answers, results)
    assert found == undisturbed
