"""Draft tokens over two rank processes on a CPU: durations of steps are those of the group."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, EngineError, SamplingParams
from pagespec.distributed import launch
from pagespec.engine.drafting.costs import DEFAULT_COSTS
from pagespec.runner.step_costs import _plan
from tests.distributed.rank_group import BOUND_S, HOSTILE, assert_gone

PARAMS = [
    SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True, repetition_penalty=1.2)
    for t in (0.0, 0.8, 1.2)
]
PROMPTS = [[5, 6, 7], [8, 9] * 10, [1] * 9]
STOPPED_S = 0.6


def make_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, device="cpu", tensor_parallel_size=2, **HOSTILE | settings)


def drafts_of(folder: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is stopped for the first part of the block."""
    os.kill(pid, signal.SIGSTOP)
    resume = threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT))
    resume.start()
    try:
        yield
    finally:
        resume.join()


def seconds(measure: Callable[[], float]) -> tuple[float, float]:
    """What a measurement found, and how long it took."""
    begin = time.perf_counter()
    found = measure()
    return found, time.perf_counter() - begin


def test_all_ranks_compute_the_measured_steps(folder: Path) -> None:
    calls: list[object] = []
    llm = make_llm(
        folder,
        speculative_config=drafts_of(folder),
        on_logits=lambda *given: calls.append(given),
    )
    assert llm.step_costs is not DEFAULT_COSTS
    assert [size for size, _ in llm.step_costs.measured] == [1, 2, 4, 8, 16]
    assert llm.step_costs.draft_s(1) > 0
    runner: Any = llm._runner
    own, other = ((cell.num_finished, cell.digest) for cell in runner._channel.cells)
    assert own == other
    assert own[0] > 40
    assert calls == []

    plan, (pid,) = _plan(4, 2, runner, num_wanted=2), runner._workers.pids
    with stopped(pid):
        found, taken = seconds(partial(runner._replay, plan, runner.local.replay))
    assert taken > found > STOPPED_S / 2  # rank 0 waits for rank 1
    with stopped(pid):
        found, taken = seconds(partial(runner.draft_seconds_of, plan))
    assert taken > STOPPED_S / 2 > found > 0  # rank 1 has no part in it
    runner.reset()
    answers = tokens(llm)
    del llm, runner
    assert answers == tokens(make_llm(folder))


@pytest.mark.nightly
def test_a_rank_that_is_lost_meanwhile_ends_the_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    own = launch.measure_costs

    def measure_costs(runner: Any, *settings: Any) -> Any:
        pids.extend(runner._workers.pids)
        os.kill(pids[0], signal.SIGKILL)
        return own(runner, *settings)

    monkeypatch.setattr(launch, "measure_costs", measure_costs)
    begin = time.monotonic()
    with pytest.raises(EngineError, match="rank 1"):
        make_llm(folder, speculative_config={"method": "ngram"})
    assert time.monotonic() - begin < 2 * BOUND_S
    assert_gone(pids)
    monkeypatch.undo()
    assert tokens(make_llm(folder, speculative_config={"method": "ngram"}))
