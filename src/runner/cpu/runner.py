"""The model runner on a CPU: packs a plan, runs the graph and samples, all in ``dispatch``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...compile.captured_model import CapturedModel
from ...compile.step_inputs import StepOutputs
from ...engine.logprobs import StepLogprobs
from ...engine.plan import StepPlan, StepResult
from ...kernels.sampling.logprob_rows import LOGPROB_FIELDS
from ...kernels.sampling.sampler import processed_scores, sample
from ...structured.matchers import ConstrainedRows, Masks
from ..bases import LocalRunner
from ..constrained import LateMatchers
from ..draft_model import DraftModel
from ..layout import StepShape
from ..logprob_rows import MAX_ROWS_PER_SAMPLE, step_logprobs
from .drafting import CpuDrafting
from .edits import CpuEdits
from .pack import CpuStepPacker, PackedStep
from .threads import StepThreads

LONG_TOKENS = 256  # the form of the graph for long steps takes a fraction of a second to make


@dataclass(slots=True, eq=False)
class StepHandle:
    """A dispatched step. ``token_ids``: int64 ``[num_sampled]`` on the device. ``constrained``:
    rows whose tokens wait for :meth:`ModelRunner._finish`, as ``logprobs`` do. ``failures``,
    ``failed_samples``, ``drafts``: see :class:`.StepResult`."""

    token_ids: Tensor
    constrained: ConstrainedRows | None
    logprobs: StepLogprobs | None = None
    failures: dict[str, str] = field(default_factory=dict)
    failed_samples: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)


class _Step(NamedTuple):
    """A step whose graph has run."""

    handle: StepHandle
    plan: StepPlan | None
    packed: PackedStep
    logits: Tensor
    outputs: StepOutputs


class ModelRunner(LocalRunner):
    """The runner on a CPU. ``overlap`` has no effect on speed here.

    Args:
        threads: number of threads for its steps; None keeps torch's number.
        draft_model: drafts tokens behind the rows of plans that want some; None: no plan does.
        long_tokens: see :class:`.CpuStepPacker`.
        settings: see :class:`.LocalRunner`.
    """

    def __init__(
        self,
        captured: CapturedModel,
        *,
        threads: StepThreads | None = None,
        draft_model: DraftModel | None = None,
        long_tokens: int = LONG_TOKENS,
        **settings: Any,
    ) -> None:
        super().__init__(captured, **settings)
        self._packer = CpuStepPacker(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            device=captured.loaded.device,
            num_state_slots=self.num_state_slots if captured.loaded.recurrent else 0,
            state_interval=self.state_interval,
            layout=self._layout,
            # A drafter reads the hidden states of all tokens.
            long_tokens=long_tokens if draft_model is None else sys.maxsize,
        )
        self._edits = CpuEdits(keeps_rows=self._has_processed_logprobs)
        self._matchers = LateMatchers(self.grammars)
        self._threads = threads
        self.drafting: CpuDrafting | None = None
        self.has_drafter = draft_model is not None
        if draft_model is not None:
            self.drafting = CpuDrafting(
                draft_model, num_blocks=self.num_blocks, block_size=self.block_size
            )

    def dispatch(self, plan: StepPlan) -> StepHandle:
        self._sample_constrained()
        return self._compute(self._pack(plan), plan)

    def _pack(self, plan: StepPlan) -> PackedStep:
        begin = time.perf_counter()
        with torch.inference_mode():
            packed = self._packer.pack(plan)
        self.pack_s += time.perf_counter() - begin
        return packed

    def _compute(self, packed: PackedStep, plan: StepPlan | None) -> StepHandle:
        if self._threads is None:
            return self._forwarded(packed, plan)
        self._threads.apply()
        begin = time.perf_counter()
        handle = self._forwarded(packed, plan)
        self._threads.add(time.perf_counter() - begin)
        return handle

    def seconds_of(self, plan: StepPlan) -> tuple[float, float]:
        """CPU time of a step without its packing: the load of other processes hardly changes it, as
        it changes the duration. No host time is overlapped here, with or without draft tokens."""
        try:
            return self._timed(self._pack(plan), time.process_time), 0.0
        finally:
            self.reset()
            self.pack_s = 0.0

    def draft_seconds_of(self, plan: StepPlan) -> float:
        """CPU time of a drafter's passes behind a step; 0 without a drafter."""
        if self.drafting is None:
            return 0.0
        try:
            return self._timed(self._pack(plan), time.process_time, plan)
        finally:
            self.reset()
            self.pack_s = 0.0

    def _timed(
        self, packed: PackedStep, clock: Callable[[], float], plan: StepPlan | None = None
    ) -> float:
        """Time of a step; with its plan, that of the drafter's passes behind it."""
        if plan is None:
            begin = clock()
            self._compute(packed, None)
            return clock() - begin
        assert self.drafting is not None, "there is a drafter"
        with torch.inference_mode():
            outputs = self._run(packed)
            self.captured.whole_logits(outputs.logits)  # as the other ranks do
            tokens = np.zeros(packed.num_sampled, np.int64)
            begin = clock()
            self.drafting.draft(plan, packed, tokens, outputs.for_drafter)
            return clock() - begin

    def _forwarded(self, packed: PackedStep, plan: StepPlan | None) -> StepHandle:
        with torch.inference_mode():
            for caches in self.kv_caches if packed.copies else ():
                for cache in caches:
                    for source, destination in packed.copies:
                        cache[destination] = cache[source]
            if self.drafting is not None:
                self.drafting.copy_blocks(packed.copies)
            outputs = self._run(packed)
            logits = self.captured.whole_logits(outputs.logits)[: packed.num_sampled]
            if self._on_logits is not None and plan is not None:
                self._on_logits(plan, logits)
            if packed.num_sampled == 0:
                tokens = torch.empty(0, dtype=torch.int64)
            else:
                tokens = sample(logits, packed.sampling)
            constrained = None if plan is None else self._matchers.take(plan)
            step = _Step(StepHandle(tokens, constrained), plan, packed, logits, outputs)
            self._matchers.begin(step, self._finish)
            return step.handle

    def _run(self, packed: PackedStep) -> StepOutputs:
        forward = self._forward_long if packed.is_long else None
        return (forward or self._forward)(packed.inputs)

    def _finish(self, step: _Step, masks: Masks | None = None) -> None:
        """Sample the edited rows of a step, then compute its log-probabilities."""
        handle, plan, packed, logits, outputs = step
        tokens = handle.token_ids
        if plan is not None:
            ids, sampling = packed.inputs.input_ids, packed.sampling
            handle.failures, handle.failed_samples = self._edits.apply(
                plan, ids, sampling, logits, tokens, masks
            )
        self._packer.remember(tokens.cpu().numpy())
        if self.drafting is not None and plan is not None:
            states = outputs.for_drafter
            handle.drafts = self.drafting.draft(plan, packed, tokens.numpy(), states)

        def sampled_logits(places: Tensor) -> Tensor:
            if self._has_processed_logprobs:
                return processed_scores(self._edits.replaced(logits), packed.sampling, places)
            return logits[places]

        handle.logprobs = step_logprobs(
            packed.logprobs, self.captured, sampled_logits, tokens, outputs.hidden
        )

    def _sample_constrained(self, handle: StepHandle | None = None) -> None:
        """Finish the step dispatched last if it has constrained rows (and belongs to ``handle``, if
        given). A runner on a GPU does this at the same time."""
        if self._matchers.is_waiting(handle):
            with torch.inference_mode():
                self._matchers.finish(self._finish)

    # Over several ranks: rank 0 stages, all launch --------------------------------------------

    @property
    def max_staged_bytes(self) -> int:
        num_tokens, num_rows = self._max_num_tokens, self._max_num_rows
        num_samples = min(num_tokens, num_rows * (1 + self.max_draft_tokens))
        inputs = self._layout.num_input_bytes(StepShape(num_tokens, num_rows, num_samples, "host"))
        sampling = num_samples * 6 * 8
        logprobs = (num_tokens + num_samples * MAX_ROWS_PER_SAMPLE) * LOGPROB_FIELDS * 4
        tables = num_rows * self._max_num_blocks * 4
        return inputs + sampling + logprobs + tables + 4096

    def stage(self, plan: StepPlan) -> list[NDArray[Any]]:
        return self._pack(plan).to_arrays()

    def launch(self, arrays: Sequence[NDArray[Any]], plan: StepPlan | None = None) -> StepHandle:
        return self._compute(PackedStep.from_arrays(arrays, self._layout), plan)

    def replay(self, arrays: Sequence[NDArray[Any]], plan: StepPlan | None = None) -> float:
        packed = PackedStep.from_arrays(arrays, self._layout)
        return self._timed(packed, time.perf_counter, plan)

    def close(self) -> None:
        """There is no process group to release."""

    def collect(self, handle: object) -> StepResult:
        if not isinstance(handle, StepHandle):
            raise TypeError(f"not a handle of this runner: {handle!r}")
        self._sample_constrained(handle)
        result = self._matchers.result(handle, handle.logprobs)
        return replace(result, drafts=handle.drafts) if handle.drafts else result

    def reset(self) -> None:
        """There is no queue: a step is computed in its dispatch."""
        self._packer.reset()
        self._edits.reset()
        self._matchers.reset()
