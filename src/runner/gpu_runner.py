"""The model runner on a GPU, asynchronous: nothing but ``collect`` waits for the device.

A step is one copy of staged integers to the device and the replay of a CUDA graph (the next larger
one of those captured), whose last kernel stores the sampled tokens in the host's memory. With
overlap the next step is planned, packed and queued while this one computes; the tokens it needs
are on the device, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..compile.captured_model import CapturedModel
from ..compile.kv_cache import allocate_kv_caches, kv_dtype
from ..compile.recurrent_state import allocate_states, check_interval
from ..compile.step_inputs import MIN_SIZE, StepInputs, StepOutputs
from ..engine.plan import StepPlan, StepResult
from ..kernels.jit.compile_pool import current_compilers
from ..kernels.jit.parallel_build import parallel_build
from ..kernels.linear.cublas import fp32_accumulation
from ..kernels.sampling.gumbel import Results, sample_simple
from ..kernels.sampling.logprob_rows import LOGPROB_FIELDS
from ..kernels.sampling.top_k_top_p import TRUNCATED_FIELDS, sample_truncated
from ..structured.grammars import Grammars
from ..structured.matchers import ConstrainedRows, Masks, Matchers
from .block_copies import BlockCopier
from .cpu_runner import OnLogits
from .cuda_graphs import StepGraphs
from .device_buffers import StepBuffers
from .gpu_edits import GpuEdits
from .gpu_logprobs import GpuLogprobs, max_logprob_rows, read_logprobs
from .gpu_pack import GpuStepPacker, StagedStep, send
from .pinned_ring import IntArray, PinnedRing
from .step_shapes import StepShape
from .unpack_kernels import unpack, update_tables

_POLL_S = 20e-6


@dataclass(slots=True, eq=False)
class GpuStepHandle:
    """A step queued on the device; ``token_ids`` is filled once ``event`` has passed, and so are
    ``logprobs``, the first of which are of ``num_logprobs`` sampled rows.

    Attributes:
        constrained: rows that are sampled when their masks are made; until then there is no
            ``event``, and no ``logprobs``.
    """

    token_ids: Tensor
    constrained: ConstrainedRows | None = None
    event: torch.cuda.Event | None = None
    logprobs: Tensor | None = None
    num_logprobs: int = 0


class _Unfinished(NamedTuple):
    """A step whose constrained rows are still to be sampled, with the arguments of ``_finish``."""

    handle: GpuStepHandle
    staged: StagedStep
    constrained: ConstrainedRows
    logits: Tensor
    hidden: tuple[Tensor, ...] | None
    truncated: Tensor


class GpuRunner:
    """Implements :class:`.engine.runner.Runner` on a GPU, with CUDA graphs once captured.

    Args:
        captured: the model.
        block_size: tokens a KV block. num_blocks: blocks besides the null block.
        max_num_tokens: most tokens of a step. max_num_rows: most requests of a step.
        max_num_blocks: most blocks of a request.
        kv_cache_dtype: "fp8" for caches of planes (:mod:`.kernels.e4m3`).
        num_state_slots, state_interval: of a model with recurrent layers, as for
            :class:`.cpu_runner.ModelRunner`; such a one takes requests of at most
            ``max_num_blocks * block_size`` tokens.
        transparent: keep float32 sums in matmuls.
        overlap: plan and queue a step before the tokens of the one before are known.
        processed_logprobs, on_logits: as for :class:`.cpu_runner.ModelRunner`.

    Raises:
        InvalidInputError: an interval shorter than what a convolution keeps.
    """

    def __init__(
        self,
        captured: CapturedModel,
        *,
        block_size: int,
        num_blocks: int,
        max_num_tokens: int,
        max_num_rows: int,
        max_num_blocks: int,
        kv_cache_dtype: str = "auto",
        num_state_slots: int = 0,
        state_interval: int = 0,
        overlap: bool = True,
        transparent: bool = True,
        processed_logprobs: bool = False,
        on_logits: OnLogits | None = None,
    ) -> None:
        loaded = captured.loaded
        self.pipeline_depth = int(overlap)
        self.captured = captured
        self.block_size, self.num_blocks = block_size, num_blocks
        self.kv_caches = allocate_kv_caches(
            captured.specs,
            num_blocks,
            block_size,
            kv_dtype(loaded, kv_cache_dtype),
            loaded.device,
        )
        self.num_state_slots, self.state_interval = num_state_slots, state_interval
        check_interval(loaded.recurrent, state_interval)
        self.states = allocate_states(
            loaded.recurrent, num_state_slots, state_interval, loaded.device
        )
        self._forward: Callable[[StepInputs], StepOutputs] = captured.bind(
            self.kv_caches, self.states
        )
        self._copier = BlockCopier(self.kv_caches)
        self._on_logits = on_logits
        self._device, self._transparent = loaded.device, transparent
        num_staged = StepBuffers.elements_to_stage(max_num_tokens, max_num_rows)
        # Ids of new blocks follow in the same buffer if there is room, as there nearly always is,
        # and those of copied ones.
        num_staged += 2 * (max_num_tokens // block_size + 3 * max_num_rows)
        self.buffers = StepBuffers(
            max_num_tokens=max_num_tokens,
            max_num_rows=max_num_rows,
            max_num_blocks=max_num_blocks,
            max_num_intervals=-(-max_num_blocks * block_size // state_interval)
            if num_state_slots
            else 0,
            staging_elements=num_staged,
            device=loaded.device,
        )
        depth = self.pipeline_depth
        b = self.buffers
        self._packer = GpuStepPacker(len(b.table_store), b.width, b.state_width, num_state_slots)
        self._staging = PinnedRing(depth + 2, num_staged, torch.int32)
        self._ring = PinnedRing(depth + 2, max(max_num_rows, MIN_SIZE), torch.int64)
        self._results = Results(self._ring.tensor, self.buffers.result_row)
        self._logprobs = GpuLogprobs(
            captured,
            depth + 2,
            max_logprob_rows(max_num_tokens, max(max_num_rows, MIN_SIZE)),
            self.buffers.temperatures if processed_logprobs else None,
        )
        self._blank_hidden: tuple[Tensor, ...] | None = None
        self._edits = GpuEdits(
            self.buffers, self._results, self.buffers.width * block_size, processed_logprobs
        )
        self._graphs: StepGraphs | None = None
        self.grammars = Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
        self._matchers = Matchers(self.grammars, self._edits.masks.make_space)
        self._unfinished: _Unfinished | None = None
        self.pack_s = self.mask_s = self.wait_s = 0.0

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """The context of every step: inference mode, float32 sums, the runner's device."""
        precision = fp32_accumulation() if self._transparent else nullcontext()
        # Triton launches on the current device, whatever its tensors say.
        device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with torch.inference_mode(), precision, device:
            yield

    # Warm-up ----------------------------------------------------------------------------------

    def build_kernels(self, shapes: Sequence[StepShape]) -> None:
        """Compile side by side what the largest step and steps of these shapes launch."""
        decode, mixed = (sorted(s for s in shapes if s.is_decode == kind) for kind in (True, False))
        others = current_compilers()
        if others is not None and others.is_running:
            # They begin with what is asked for, and are at it while more is found to be missing.
            first = [*decode, *mixed]
        else:
            # These have nearly all that takes long. Of the others little is missing then, which
            # counts: a launch that is left out takes ten times as long as one that is not.
            some = [decode[i * (len(decode) - 1) // 3] for i in range(4) if decode]
            first = [*dict.fromkeys(some), *mixed[:1], *mixed[-1:]]
        with self._scope():
            with parallel_build(self._device) as built:
                self.run_worst_case()
                for shape in first:
                    self._run_blank(shape)
            if not built.num_compiled or len(first) == len(shapes):
                return  # such a start has been here before: the others come from the disk, too
            with parallel_build(self._device):
                for shape in shapes:
                    self._run_blank(shape)

    def _run_blank(self, shape: StepShape) -> None:
        """Run an empty step, of which any kernel may be missing: no other may then find positions
        and lengths of another shape in the inputs."""
        b = self.buffers
        for tensor in (
            *(b.input_ids, b.position_ids, b.slot_mapping, b.logit_rows),
            *(b.query_starts, b.context_lens, b.block_tables),
        ):
            tensor.zero_()
        self.run_staged(shape)

    def capture_graphs(self, shapes: Sequence[StepShape]) -> None:
        """Capture steps of these shapes; those that fit none run uncaptured."""
        with self._scope():
            self._graphs = StepGraphs(self.run_staged, shapes)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs) if self._graphs is not None else 0

    def run_worst_case(self) -> None:
        """Compute a step of as many tokens and rows as there can be, all padding, and sample."""
        b = self.buffers
        num_tokens, num_rows = len(b.input_ids), len(b.context_lens)
        with self._scope():
            for tensor in (b.input_ids, b.position_ids, b.logit_rows, b.temperatures):
                tensor.zero_()
            b.slot_mapping.fill_(self.num_blocks * self.block_size)
            self._copier.copy(b.staged[:2].fill_(self.num_blocks))
            update_tables(b.staged[:2].zero_(), b.stored_tables, 1)
            # Every row has tokens, so that each attention kernel has its work space; but not more
            # than a request can have. What is left over belongs to no row, like padding.
            length = min(num_tokens // num_rows, b.width * self.block_size)
            b.query_starts.copy_(torch.arange(num_rows + 1, device=b.staged.device) * length)
            b.context_lens.fill_(length)
            b.block_tables.fill_(self.num_blocks)
            if b.state_tables is not None:
                b.state_tables.fill_(self.num_state_slots)
            logits, hidden = self._forward(b.mixed_inputs(num_tokens, num_rows))
            self._sample(logits)
            # So that no step waits for the compiler.
            logits = self.captured.whole_logits(logits)
            truncated = b.staged[:TRUNCATED_FIELDS].zero_()
            self._sample_truncated(logits, truncated)
            fields = b.staged[: LOGPROB_FIELDS * len(logits)].zero_()
            self._logprobs.queue(0, logits, b.sampled, truncated, fields, b.staged[:0], None)
            head = self.captured.head
            self._blank_hidden = None if head is None or hidden is None else head.blank(hidden)
            self._run_prompt_chunk()
            self._edits.run_worst_case(StepShape(num_tokens, num_rows, False), logits)
            self._take_rank_0_tokens(num_rows)
            torch.cuda.synchronize()

    def run_prompt_chunk(self) -> None:
        """Compute log-probabilities of a chunk of prompt positions, after a worst case. Captured
        steps have their memory in the graphs' pool, these have theirs beside it."""
        with self._scope():
            self._run_prompt_chunk()
            torch.cuda.synchronize()

    def _run_prompt_chunk(self) -> None:
        if self._blank_hidden is not None:
            self._logprobs.run_chunk(self._blank_hidden, self.buffers.sampled)

    # Steps ------------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> GpuStepHandle:
        """Queue the step. If it raises, ``reset`` makes the runner usable again."""
        self._sample_constrained()
        begin = time.perf_counter()
        with self._scope():
            index, _, array = self._staging.take()
            staged, array = self._pack(plan, array)
            handle = self._launch(staged, index, array, plan)
        self.pack_s += time.perf_counter() - begin
        return handle

    def _pack(self, plan: StepPlan, array: IntArray) -> tuple[StagedStep, IntArray]:
        shape = None
        if self._graphs is not None:
            shape = self._graphs.shape_of(plan.total_num_tokens, len(plan), plan.is_decode_only)
        is_edited = self._edits.look(plan)
        result_row = self._ring.take()[0]
        return self._packer.pack(plan, shape, result_row, array, is_edited=is_edited)

    def _launch(
        self, staged: StagedStep, index: int, array: IntArray, plan: StepPlan | None
    ) -> GpuStepHandle:
        truncated, copies = send(self.buffers, staged, self._staging, index, array)
        self._copier.copy(copies)
        if staged.is_captured and self._graphs is not None:
            logits, hidden = self._graphs.replay(staged.shape)
        else:
            logits, hidden = self.run_staged(staged.shape)
        has_logprobs = bool(staged.num_logprobs or staged.num_prompt_logprobs)
        is_whole = has_logprobs or staged.is_edited or self._on_logits is not None
        if len(truncated) or is_whole:
            logits = self.captured.whole_logits(logits)
        if len(truncated):
            self._sample_truncated(logits, truncated)
        if plan is not None:
            self._edits.keep_history(plan, staged.shape, self._packer.store_rows)
        constrained = None if plan is None else self._matchers.take(plan)
        token_ids = self._ring.tensor[staged.result_row, : staged.num_sampled]
        handle = GpuStepHandle(token_ids, constrained)
        if constrained is None:
            self._finish(handle, staged, plan, logits, hidden, truncated)
        else:
            self._unfinished = _Unfinished(handle, staged, constrained, logits, hidden, truncated)
        if self._on_logits is not None and plan is not None:
            self._on_logits(plan, logits[: staged.num_sampled])
        return handle

    def _finish(
        self,
        handle: GpuStepHandle,
        staged: StagedStep,
        plan: StepPlan | None,
        logits: Tensor,
        hidden: tuple[Tensor, ...] | None,
        truncated: Tensor,
        masks: Masks | None = None,
    ) -> None:
        """Queue what is left to do of a step behind its graph: the last of its work. All that it
        reads stays as it is until the next step is sent."""
        # Other ranks have no plan, and nothing to edit.
        if plan is not None and (staged.is_edited or masks):
            rows = self._packer.store_rows
            self._edits.sample(plan, logits[: staged.num_sampled], rows, masks)
        if staged.is_edited:
            self._take_rank_0_tokens(len(logits))
        if staged.num_logprobs or staged.num_prompt_logprobs:
            b = self.buffers
            fields = staged.logprob_fields(b.staged)
            handle.logprobs = self._logprobs.queue(
                staged.result_row,
                *(logits, b.sampled, truncated, *fields, hidden),
                self._edits.logprobs,
            )
            handle.num_logprobs = staged.num_logprobs // LOGPROB_FIELDS
        handle.event = self._ring.release(staged.result_row)

    def _sample_constrained(self) -> None:
        """Finish the step queued last, if it has constrained rows.

        A thread makes their masks since their last tokens were collected. This is called at the
        beginning of the next ``dispatch``, while the step computes, or when it is itself collected:
        no sooner, as one who is early waits. What is queued later finds their tokens on the device.
        """
        step = self._unfinished
        if step is None:
            return
        begin = time.perf_counter()
        masks = self._matchers.masks(step.constrained)
        self.mask_s += time.perf_counter() - begin
        handle, staged, constrained, logits, hidden, truncated = step
        with self._scope():
            plan = constrained.plan
            self._finish(handle, staged, plan, logits, hidden, truncated, masks)
        self._unfinished = None

    # Over several ranks: rank 0 stages, all launch --------------------------------------------

    @property
    def max_staged_bytes(self) -> int:
        """Most bytes of a step: with whole block tables of all rows."""
        tables = 2 * self.buffers.table_store.numel()
        return 4 * (len(self.buffers.staged) + tables) + 4096

    def stage(self, plan: StepPlan) -> list[IntArray]:
        """The step as arrays, for :meth:`launch` on every rank."""
        begin = time.perf_counter()
        staged, array = self._pack(plan, np.empty(len(self.buffers.staged), np.int32))
        self.pack_s += time.perf_counter() - begin
        return [staged.to_array(), array[: staged.num_elements]]

    def launch(self, arrays: Sequence[IntArray], plan: StepPlan | None = None) -> GpuStepHandle:
        """Queue a staged step. Rank 0 gives its plan, for edited rows and ``on_logits``."""
        staged, array = StagedStep.from_array(arrays[0]), arrays[1]
        with self._scope():
            if plan is None:
                self._ring.wait_for(staged.result_row)
            index, _, pinned = self._staging.take()
            fitting = min(len(array), len(pinned))
            pinned[:fitting] = array[:fitting]
            return self._launch(staged, index, array, plan)

    def is_computed(self, handle: GpuStepHandle, wait_s: float) -> bool:
        """Whether a launched step has been computed, after at most ``wait_s`` seconds."""
        end = time.perf_counter() + wait_s
        while handle.event is None or not handle.event.query():
            if time.perf_counter() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """NCCL's communicator does not end before the graphs that call it."""
        self._graphs = None

    def collect(self, handle: object) -> StepResult:
        """The results of a dispatched step; waits for it."""
        if not isinstance(handle, GpuStepHandle):
            raise TypeError(f"not a handle of this runner: {handle!r}")
        if self._unfinished is not None and self._unfinished.handle is handle:
            self._sample_constrained()
        if handle.event is None:
            raise RuntimeError("the step of this handle was forgotten by a reset")
        begin = time.perf_counter()
        handle.event.synchronize()
        self.wait_s += time.perf_counter() - begin
        found = handle.logprobs
        logprobs = None if found is None else read_logprobs(found, handle.num_logprobs)
        tokens = handle.token_ids.tolist()
        if handle.constrained is None:
            return StepResult(tokens, logprobs)
        return StepResult(tokens, logprobs, self._matchers.settle(handle.constrained, tokens))

    def reset(self) -> None:
        """Wait for all that is queued, and take nothing for known on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._packer.reset()
        self._matchers.reset()
        self._unfinished = None

    def run_staged(self, shape: StepShape) -> StepOutputs:
        """Queue the step that is staged in this shape, zeros at first; returns its results, of
        ``num_rows`` rows. This is what a graph captures."""
        null_slot = self.num_blocks * self.block_size
        with torch.inference_mode():
            inputs = unpack(self.buffers, shape, self.block_size, null_slot, self.state_interval)
            logits, hidden = self._forward(inputs)
            self._sample(logits)
        if hidden is None or shape.is_decode:  # of prompts a decode step has no more than the ends
            return StepOutputs(logits, None)
        return StepOutputs(logits, tuple(map(Tensor.contiguous, hidden)))

    def _sample(self, logits: Tensor) -> None:
        b = self.buffers
        sample_simple(
            logits,
            b.temperatures,
            b.seeds,
            b.sample_positions,
            b.sampled,
            self._results,
            self.captured.vocab_shard,
        )

    def _sample_truncated(self, logits: Tensor, truncated: Tensor) -> None:
        """Sample rows that use top_k, top_p or min_p anew; ``truncated`` as staged."""
        b = self.buffers
        sample_truncated(
            logits, truncated, b.temperatures, b.seeds, b.sample_positions, b.sampled, self._results
        )

    def _take_rank_0_tokens(self, num_rows: int) -> None:
        """Over several ranks, the tokens of rows that rank 0 has edited; it alone has the plan."""
        communicator, sampled = self.captured.communicator, self.buffers.sampled[:num_rows]
        if communicator.num_ranks > 1:
            own = sampled.to(torch.int32).unsqueeze(1)
            tokens = communicator.all_gather(own, [1] * communicator.num_ranks)[:, 0]
            # If a rank was lost they may be any number, and the next step embeds them.
            sampled.copy_(tokens.clamp(0, self.captured.loaded.vocab_size - 1))
