"""`SamplingParams(n=...)`: the same answers as n separate requests, whatever else runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, InvalidInputError, RequestOutput, SamplingParams
from spec import replay
from tests.support.content_llm import content_llm, text_alone
from tests.support.models import tiny_model

PROMPTS = [[5, 6, 7], [9] * 16, [3] * 37, [8] * 17]
N = 4


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("continuations") / "trace.jsonl"


@pytest.fixture(scope="module")
def llm(trace: Path) -> LLM:
    return LLM(
        tiny_model("llama"), max_num_seqs=8, num_blocks=40, check_invariants=True, trace=trace
    )


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | more)


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def test_continuations_are_those_of_separate_requests(llm: LLM, trace: Path) -> None:
    outputs = llm.generate(PROMPTS, params(n=N, seed=7), use_tqdm=False)
    assert [[o.index for o in output.outputs] for output in outputs] == [[*range(N)]] * 4
    assert all(output.finished for output in outputs)
    singles = [
        answers(llm.generate(prompt, params(seed=7 + i), use_tqdm=False))[0]
        for prompt in PROMPTS
        for i in range(N)
    ]
    assert answers(outputs) == singles
    assert len({tuple(answer) for answer in singles}) == len(singles), "all are different"
    lines = trace.read_text().splitlines()
    copies = [pair for line in lines for pair in json.loads(line).get("copies", [])]
    assert len(copies) > N, "of the request that still has the prompt when one of them is admitted"
    assert not replay.check(lines).property_id


def test_without_a_seed_they_are_the_next_requests(llm: LLM) -> None:
    def fresh() -> LLM:
        return content_llm(seed=3)

    prompt, one = [0, 256], SamplingParams(max_tokens=8, ignore_eos=True)
    several = fresh().generate(prompt, params(n=3, max_tokens=8), use_tqdm=False)
    assert answers(several) == answers(fresh().generate([prompt] * 3, one, use_tqdm=False))


def test_more_than_can_run_at_a_time_are_served(llm: LLM) -> None:
    several = params(n=19, seed=1, max_tokens=4)
    [output] = llm.generate([PROMPTS[2]], several, use_tqdm=False)
    assert len(output.outputs) == 19
    assert output.metrics.total_time_s is not None
    last = llm.generate(PROMPTS[2], params(seed=19, max_tokens=4), use_tqdm=False)
    assert output.outputs[18].token_ids == answers(last)[0]


def test_streams_of_all_answers() -> None:
    llm = content_llm()
    prompt = [0, 256, 0]
    for stop in (None, "cab"):
        several = SamplingParams(n=3, seed=2, max_tokens=9, stop=stop)
        texts = [""] * 3
        for index, piece in llm.stream_all(prompt, several):
            assert piece
            texts[index] += piece
        whole = llm.generate(prompt, several, use_tqdm=False)[0]
        assert texts == [answer.text for answer in whole.outputs]
        if stop is None:
            assert texts == [text_alone(llm, prompt, several, i) for i in range(3)]
    with pytest.raises(InvalidInputError, match=r"^n = 3: must be 1 here"):
        llm.stream(prompt, several)


def test_a_stream_that_is_closed_aborts_all() -> None:
    llm = content_llm()
    pieces = llm.stream_all([0, 256], SamplingParams(n=3, max_tokens=30, ignore_eos=True))
    next(pieces)
    assert len(llm.engine.scheduler.requests) == 3
    pieces.close()
    assert not llm.engine.scheduler.requests
    assert not llm.engine._records


def test_an_aborted_answer_leaves_the_others() -> None:
    llm = content_llm()
    several = SamplingParams(n=3, seed=0, max_tokens=9, ignore_eos=True)
    items = llm.generate_iter([([0], several), ([256], SamplingParams(max_tokens=1))], window=2)
    step = llm.engine.step

    def aborting_step():
        if "0" in llm.engine.scheduler.requests:
            llm.engine.abort("0")
        return step()

    llm.engine.step = aborting_step  # type: ignore[method-assign]
    results = list(items)
    assert [o.finish_reason for o in results[0].outputs] == ["abort", "length", "length"]
    assert [len(o.token_ids) for o in results[0].outputs] == [0, 9, 9]
