"""The model runner on a GPU. It is asynchronous: only ``collect`` waits for the device.

A step is one copy of staged integers to the device, and the replay of a CUDA graph (of the next
larger captured shape), whose last kernel stores the sampled tokens in host memory. With overlap the
next step is planned, packed and queued while this one computes; the tokens that it needs are also
on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from ...compile.captured_model import CapturedModel
from ...compile.kv_cache import check_interval
from ...compile.step_inputs import StepOutputs
from ...engine.plan import StepPlan, StepResult
from ...kernels.matmul.cublas import fp32_accumulation
from ..bases import LocalRunner
from ..block_copies import BlockCopier
from ..draft_model import GpuDraftModel
from ..layout import Layout, StepShape
from ..logprob_rows import has_prompt_rows
from ..pinned import IntArray, PinnedRing
from .cuda_graphs import StepGraphs
from .device_buffers import StepBuffers
from .drafting import DRAFT_FIELDS, GpuDrafting
from .logprobs import WideRows
from .pack import GpuStepPacker, StagedStep, send
from .sampler import GpuStep, GpuStepHandle, GpuStepSampler
from .unpack_kernels import unpack, update_tables

_NUM_REPLAYS = 4  # of a step whose duration is measured


class GpuRunner(LocalRunner):
    """The runner on a GPU, with CUDA graphs once captured.

    Args:
        transparent: whether matmuls keep float32 accumulators.
        draft_model: drafts tokens behind the rows of plans that want some; None: no plan does, or
            another rank has it.
        has_draft_fields: whether steps have the fields of a drafter, which are sent to all ranks.
        settings: see :class:`.LocalRunner`, all sizes. With recurrent layers, requests have at most
            ``max_num_blocks * block_size`` tokens.

    Raises:
        InvalidInputError: an interval is shorter than the window of a convolution, or see
            :class:`.LocalRunner`.
    """

    def __init__(
        self,
        captured: CapturedModel,
        *,
        overlap: bool = True,
        transparent: bool = True,
        draft_model: GpuDraftModel | None = None,
        has_draft_fields: bool = False,
        **settings: Any,
    ) -> None:
        check_interval(captured.loaded.recurrent, settings.get("state_interval", 0))
        super().__init__(captured, overlap=overlap, **settings)
        self.max_num_samples = self._max_num_rows
        self.has_drafter = draft_model is not None
        if draft_model is not None or has_draft_fields:
            self._layout = Layout((*captured.fields, *DRAFT_FIELDS))
        self._device, self._transparent = captured.loaded.device, transparent
        num_tokens, num_rows = self._max_num_tokens, self._max_num_rows
        num_staged = StepBuffers.elements_to_stage(num_tokens, num_rows, self._layout)
        # Ids of new and copied blocks follow in the same buffer, which nearly always has space for
        # them.
        num_staged += 2 * (num_tokens // self.block_size + 3 * num_rows)
        max_length = self._max_num_blocks * self.block_size
        self.buffers = b = StepBuffers(
            max_num_tokens=num_tokens,
            max_num_rows=num_rows,
            max_num_blocks=self._max_num_blocks,
            max_num_intervals=-(-max_length // self.state_interval) if self.num_state_slots else 0,
            staging_elements=num_staged,
            device=self._device,
            layout=self._layout,
        )
        self._packer = GpuStepPacker(
            len(b.table_store), b.width, b.state_width, self.num_state_slots, self._layout
        )
        num_steps = self.pipeline_depth + 2
        self._staging = PinnedRing(num_steps, num_staged, torch.int32)
        self._graphs: StepGraphs | None = None
        self.drafting: GpuDrafting | None = None
        if draft_model is not None:
            self.drafting = GpuDrafting(
                draft_model,
                b,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                num_results=num_steps,
            )
        own_caches = () if self.drafting is None else self.drafting.kv_caches
        self._copier = BlockCopier([*self.kv_caches, *own_caches])
        self._sampler = GpuStepSampler(
            captured,
            b,
            self.grammars,
            num_results=num_steps,
            max_model_len=b.width * self.block_size,
            processed_logprobs=self._has_processed_logprobs,
            on_logits=self._on_logits,
            drafting=self.drafting,
        )
        self._matchers = self._sampler.matchers

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """The context of every step: inference mode, float32 accumulators, the runner's device."""
        precision = fp32_accumulation() if self._transparent else nullcontext()
        # Triton launches on the current device, whatever the device of its tensors.
        device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with torch.inference_mode(), precision, device:
            yield

    # Steps ------------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> GpuStepHandle:
        self._sample_constrained()
        begin = time.perf_counter()
        with self.step_context():
            _, handle = self._queue(plan, plan)
        self.pack_s += time.perf_counter() - begin
        return handle

    def seconds_of(self, plan: StepPlan) -> tuple[float, float]:
        """The mean duration of replays of a step, and how much longer the host takes to pack,
        launch and collect it. Scheduling and settling it are not included."""
        try:
            with self.step_context():
                begin = time.perf_counter()
                staged, handle = self._queue(plan, None)
                self._synchronize()
                self._sampler.results(handle)
                host_s = time.perf_counter() - begin
                seconds = self._mean_seconds(partial(self._run, staged))
            return seconds, max(0.0, host_s - seconds)
        finally:
            self.reset()
            self.pack_s = 0.0

    def draft_seconds_of(self, plan: StepPlan) -> float:
        """The mean duration of a drafter's calls behind a step; 0 without a drafter."""
        if self.drafting is None:
            return 0.0
        try:
            with self.step_context():
                staged, _ = self._queue(plan, None)
                return self._mean_seconds(partial(self.drafting.queue, plan, staged.shape, 0))
        finally:
            self.reset()
            self.pack_s = 0.0

    def _mean_seconds(self, queue: Callable[[], object]) -> float:
        """The mean duration of work that a call queues."""
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(_NUM_REPLAYS):
            queue()
        self._synchronize()
        return (time.perf_counter() - begin) / _NUM_REPLAYS

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _pack(self, plan: StepPlan, array: IntArray) -> tuple[StagedStep, IntArray]:
        shape = None
        if self._graphs is not None:
            num_rows, is_decode = len(plan), plan.is_decode_only
            if plan.has_drafts:
                num_rows = max(num_rows, plan.num_sampled)
            shape = self._graphs.shape_of(plan.total_num_tokens, num_rows, is_decode)
            if shape is not None and shape.is_long and has_prompt_rows(plan):
                shape = shape._replace(form="mixed")
        result_row, is_edited = self._sampler.begin(plan)
        return self._packer.pack(plan, shape, result_row, array, is_edited=is_edited)

    def _queue(
        self, plan: StepPlan, of_sampler: StepPlan | None
    ) -> tuple[StagedStep, GpuStepHandle]:
        """Pack a plan and queue its step. ``of_sampler``: the plan, for its edited and constrained
        rows and its draft tokens; None leaves them out."""
        index, _, array = self._staging.take()
        staged, array = self._pack(plan, array)
        return staged, self._launch(staged, index, array, of_sampler)

    def _launch(
        self, staged: StagedStep, index: int, array: IntArray, plan: StepPlan | None
    ) -> GpuStepHandle:
        truncated, copies = send(self.buffers, staged, self._staging, index, array)
        self._copier.copy(copies)
        outputs = self._run(staged)
        wide = None if plan is None else WideRows.of(*staged.logprob_fields(array))
        step = GpuStep(plan, staged, outputs, truncated, self._packer.store_rows, wide)
        return self._sampler.sample_behind(step)

    def _run(self, staged: StagedStep) -> StepOutputs:
        """Queue the step that was sent last."""
        if staged.is_captured and self._graphs is not None:
            return self._graphs.replay(staged.shape)
        return self.run_staged(staged.shape)

    def run_staged(self, shape: StepShape) -> StepOutputs:
        """Queue the step that is staged in this shape (initially zeros), and return its results for
        ``num_rows`` rows. A graph captures this call."""
        null_slot = self.num_blocks * self.block_size
        with torch.inference_mode():
            inputs = unpack(self.buffers, shape, self.block_size, null_slot)
            forward = self._forward_long if shape.is_long else self._forward
            assert forward is not None, "shapes have forms that the model has"
            logits, hidden, _ = outputs = forward(inputs)
            self._sampler.sample(logits)
            if self.drafting is not None:
                self.drafting.keep_states(outputs)
        return StepOutputs(logits, None if hidden is None else hidden.contiguous())

    def _sample_constrained(self, handle: GpuStepHandle | None = None) -> None:
        """Finish the step queued last if it has constrained rows (and belongs to ``handle``, if
        given)."""
        if self._matchers.is_waiting(handle):
            with self.step_context():
                self._matchers.finish(self._sampler.finish)

    def collect(self, handle: object) -> StepResult:
        if not isinstance(handle, GpuStepHandle):
            raise TypeError(f"not a handle of this runner: {handle!r}")
        self._sample_constrained(handle)
        if handle.event is None:
            raise RuntimeError("a reset discarded the step of this handle")
        begin = time.perf_counter()
        handle.event.synchronize()
        self.wait_s += time.perf_counter() - begin
        return self._sampler.results(handle)

    def reset(self) -> None:
        self._synchronize()
        self._packer.reset()
        self._matchers.reset()

    # Over several ranks: rank 0 stages, all launch --------------------------------------------

    @property
    def max_staged_bytes(self) -> int:
        # With whole block tables of all rows.
        tables = 2 * self.buffers.table_store.numel()
        return 4 * (len(self.buffers.staged) + tables) + 4096

    def stage(self, plan: StepPlan) -> list[IntArray]:
        begin = time.perf_counter()
        staged, array = self._pack(plan, np.empty(len(self.buffers.staged), np.int32))
        self.pack_s += time.perf_counter() - begin
        return [staged.to_array(), array[: staged.num_elements]]

    def launch(self, arrays: Sequence[IntArray], plan: StepPlan | None = None) -> GpuStepHandle:
        staged, array = StagedStep.from_array(arrays[0]), arrays[1]
        with self.step_context():
            if plan is None:
                self._sampler.wait_for(staged.result_row)
            index, _, pinned = self._staging.take()
            fitting = min(len(array), len(pinned))
            pinned[:fitting] = array[:fitting]
            return self._launch(staged, index, array, plan)

    def replay(self, arrays: Sequence[IntArray], plan: StepPlan | None = None) -> float:
        """See :meth:`.LocalRunner.replay`. The step is replayed several times."""
        self.launch(arrays)
        staged = StagedStep.from_array(arrays[0])
        with self.step_context():
            seconds = self._mean_seconds(partial(self._run, staged))
            if plan is None:
                return seconds
            assert self.drafting is not None, "there is a drafter"
            return self._mean_seconds(partial(self.drafting.queue, plan, staged.shape, 0))

    def is_computed(self, handle: GpuStepHandle, wait_s: float) -> bool:
        return handle.is_computed(wait_s)

    def close(self) -> None:
        """NCCL's communicator does not end before the graphs that call it."""
        self._graphs = None
        if self.drafting is not None:
            self.drafting.close()

    # Warm-up ----------------------------------------------------------------------------------

    def run_blank(self, shape: StepShape) -> None:
        """Run an empty step, some of whose kernels may be missing. The inputs are zeroed first, so
        that no kernel reads positions and lengths of another shape."""
        b = self.buffers
        b.staged.zero_()
        b.stored_tables.zero_()
        for name, tensor in b.derived.items():
            if name != "logits_to_keep":
                tensor.zero_()
        self.run_staged(shape)
        if self.drafting is not None:
            with torch.inference_mode():
                self.drafting.run_blank(shape)

    def capture_graphs(self, shapes: Sequence[StepShape]) -> None:
        """Capture steps of these shapes. Steps that fit none of them run uncaptured."""
        with self.step_context():
            self._graphs = StepGraphs(self.run_staged, shapes)
            if self.drafting is not None:
                self.drafting.capture(shapes, self._graphs.pool)

    @property
    def num_graphs(self) -> int:
        num_drafting = 0 if self.drafting is None else self.drafting.num_graphs
        return num_drafting + (len(self._graphs) if self._graphs is not None else 0)

    def run_worst_case(self) -> None:
        """Compute a step with the most tokens and rows, all padding, and sample."""
        b = self.buffers
        num_tokens, num_rows = b.num_tokens, b.num_rows
        shape = StepShape.mixed(num_tokens, num_rows)
        with self.step_context():
            self._copier.copy(b.staged[:2].fill_(self.num_blocks))
            update_tables(b.staged[:2].zero_(), b.stored_tables, 1)
            b.staged.zero_()
            for tensor in (b.derived["input_ids"], b.derived["position_ids"], b.temperatures):
                tensor.zero_()
            inputs = b.inputs(shape)
            inputs.slot_mapping.fill_(self.num_blocks * self.block_size)
            # Every row has tokens, so that each attention kernel has its work space, but at most as
            # many as a request can have. The remaining tokens belong to no row, like padding.
            length = min(num_tokens // num_rows, b.width * self.block_size)
            inputs.query_starts.copy_(torch.arange(num_rows + 1, device=b.staged.device) * length)
            inputs.context_lens.fill_(length)
            b.table_store.fill_(self.num_blocks)
            if b.state_store is not None:
                b.state_store.fill_(self.num_state_slots)
            outputs = self._forward(inputs)
            if self.drafting is not None:
                self.drafting.keep_states(outputs)
                self.drafting.run_worst_case(shape)
            b.staged.zero_()
            self._sampler.run_worst_case(outputs, shape)
            torch.cuda.synchronize()

    def run_prompt_chunk(self) -> None:
        """Compute log-probabilities of a chunk of prompt positions, after a worst case. The memory
        of captured steps is in the graphs' pool; this memory is separate."""
        with self.step_context():
            self._sampler.run_prompt_chunk()
            torch.cuda.synchronize()
