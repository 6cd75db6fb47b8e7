"""An engine of two rank processes that tests share, and checks of its state after a fault."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagespec import LLM, EngineError, SamplingParams
from pagespec.engine.plan import StepPlan
from spec import replay
from tests.golden.harness import GoldenRow, Watcher
from tests.support.models import VOCAB_SIZE

HOSTILE: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 34,
    "max_model_len": 128,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "overlap": True,
    "check_invariants": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BOUND_S = 30.0
"""The time within which a fault must be reported and all processes must end."""


class Group:
    """An engine of two ranks for all tests; after a test has ended it, a new one starts."""

    def __init__(self, folder: Path, traces: Path) -> None:
        self._folder, self._traces = folder, traces
        self._llm: LLM | None = None
        self.pids: list[int] = []
        self.watcher = Watcher(GoldenRow("qwen3", "2 ranks", 0))
        self.before_logits: Callable[[StepPlan], None] = lambda _: None

    @property
    def trace(self) -> Path:
        return self._traces / f"{id(self._llm)}.jsonl"

    @property
    def llm(self) -> LLM:
        if self._llm is None:
            trace = self._traces / "new.jsonl"
            self._llm = LLM(
                self._folder,
                device="cpu",
                tensor_parallel_size=2,
                trace=trace,
                on_logits=self._on_logits,
                **HOSTILE,
            )
            trace.rename(self.trace)
            self.pids = self._llm._runner._workers.pids
        return self._llm

    def _on_logits(self, plan: StepPlan, logits: torch.Tensor) -> None:
        assert logits.shape[-1] == VOCAB_SIZE
        self.before_logits(plan)
        self.watcher(plan, logits)

    def watch(self) -> Watcher:
        """From here on."""
        self.watcher = Watcher(GoldenRow("qwen3", "2 ranks", 0))
        return self.watcher

    def tokens(self, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
        results = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    def drop(self) -> None:
        """Delete the engine as a user does."""
        self._llm = None
        gc.collect()


def assert_gone(pids: list[int]) -> None:
    """All processes must end within the time that a killed process needs."""
    end = time.monotonic() + BOUND_S
    for pid in pids:
        while is_there(pid):
            assert time.monotonic() < end, f"process {pid} is left"
            time.sleep(0.02)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"  # a zombie, whose parent has not waited for it yet, has ended


def check_trace(group: Group) -> replay.Verdict:
    verdict = replay.check(group.trace.read_text().splitlines())
    assert not verdict.property_id, verdict
    return verdict


def lose(group: Group, what: str, fault: Callable[[], None], at: int = 5) -> str:
    """Cause a fault while a step is computed. The engine must report it in time and at each later
    call, and no process may remain."""
    llm, num_steps = group.llm, 0

    def on_step(_plan: StepPlan) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == at:
            fault()

    group.before_logits = on_step
    begin = time.monotonic()
    with pytest.raises(EngineError, match=what) as caught:
        group.tokens([[2, 3, 4, 5]] * 4, SamplingParams(max_tokens=60, ignore_eos=True))
    assert num_steps >= at
    with pytest.raises(EngineError, match="make a new engine"):
        group.tokens([[2, 3, 4]])
    group.before_logits = lambda _: None
    assert time.monotonic() - begin < BOUND_S
    assert_gone(group.pids)
    check_trace(group)
    del llm
    group.drop()
    return str(caught.value)
