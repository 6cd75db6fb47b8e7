"""Packs a plan into integers and copies them to the device, where kernels unpack them."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..compile.step_inputs import MIN_SIZE
from ..engine.batches import LastTwoBatches
from ..engine.plan import StepPlan
from .block_tables import BlockTableStore
from .device_buffers import StepBuffers
from .gpu_logprobs import pad_positions
from .layout import LAYOUT, Layout, PlanArrays, Sizes
from .logprob_fields import prompt_fields
from .pinned_ring import IntArray, PinnedRing
from .row_params import RowParams
from .step_shapes import StepShape
from .unpack_kernels import update_tables


@dataclass(frozen=True, slots=True)
class StagedStep:
    """What the host sends of a step, as integers: in this order ``num_step`` that the kernels
    unpack, ``num_truncated`` of rows that use top_k, top_p or min_p, ``num_logprobs`` of sampled
    rows and ``num_prompt_logprobs`` of prompt positions whose log-probabilities are asked for
    (:mod:`.logprob_fields`), and two for each of ``num_writes`` to the table store and of
    ``num_copies`` of blocks.

    Attributes:
        shape: of the step. is_captured: whether there is a graph of that shape.
        result_row: where its tokens go. num_sampled: how many.
        is_edited: whether rows may be sampled from edited logits: then all ranks gather them.
    """

    shape: StepShape
    is_captured: bool
    result_row: int
    num_sampled: int
    num_step: int
    num_truncated: int
    num_writes: int
    num_copies: int
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    is_edited: bool = False

    @property
    def num_elements(self) -> int:
        return self.num_before_writes + 2 * (self.num_writes + self.num_copies)

    @property
    def num_before_writes(self) -> int:
        return self.num_step + self.num_truncated + self.num_logprobs + self.num_prompt_logprobs

    def logprob_fields(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Those of sampled rows and of prompt positions, in the step as it was sent."""
        middle = self.num_step + self.num_truncated + self.num_logprobs
        return sent[middle - self.num_logprobs : middle], sent[middle : self.num_before_writes]

    def to_array(self) -> IntArray:
        """All of it, for another process."""
        rest = [getattr(self, f.name) for f in fields(self)[1:]]
        return np.array([*astuple(self.shape), *rest], np.int32)

    @classmethod
    def from_array(cls, array: IntArray) -> StagedStep:
        """What :meth:`to_array` gave."""
        num_tokens, num_rows, is_decode, *rest = array.tolist()
        values: list[Any] = [
            bool(value) if f.type == "bool" else value
            for f, value in zip(fields(cls)[1:], rest, strict=True)
        ]
        return cls(StepShape(num_tokens, num_rows, bool(is_decode)), *values)


class GpuStepPacker:
    """Knows what the device knows already, and packs the rest.

    Args:
        num_rows: most requests of a step. width: most blocks of a request.
        state_width, null_state_slot: as of :class:`.BlockTableStore`.
        layout: of the steps.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        state_width: int = 0,
        null_state_slot: int = 0,
        layout: Layout = LAYOUT,
    ) -> None:
        self._size, self._layout = (num_rows, width, state_width, null_state_slot), layout
        self._params = LastTwoBatches[RowParams]()
        self.reset()

    def reset(self) -> None:
        """A step failed: nothing is known of what the device holds."""
        self._tables = BlockTableStore(*self._size)

    @property
    def store_rows(self) -> list[int]:
        """Rows of the table store of the rows of the plan packed last."""
        return self._tables.rows

    def pack(
        self,
        plan: StepPlan,
        shape: StepShape | None,
        result_row: int,
        array: IntArray,
        *,
        is_edited: bool = False,
    ) -> tuple[StagedStep, IntArray]:
        """Write a plan into ``array``, padded to ``shape``, or to the smallest sizes there can be.

        Returns:
            What was written, and where: ``array``, or a longer one that did not fit.
        """
        self._tables.place(plan)
        num_rows = len(plan)
        packed_shape = shape or StepShape(
            max(plan.total_num_tokens, MIN_SIZE), max(num_rows, MIN_SIZE), False
        )
        is_growing = packed_shape.is_decode and bool(plan.new_blocks)
        new_blocks = np.full(num_rows, -1, np.int32) if is_growing else None
        writes = self._tables.pending_writes(plan, new_blocks)
        step = PlanArrays(
            plan,
            table_rows=self._tables.row_array,
            new_blocks=-1 if new_blocks is None else new_blocks,
            result_row=result_row,
            num_padding_rows=packed_shape.num_rows - num_rows,
        )
        step.params = params = self._row_params(step)
        num_step = self._layout.pack(step, Sizes.of(packed_shape), array)
        # No position of a decode step lies in front of a token of a prompt.
        prompt = () if plan.is_decode_only else pad_positions(prompt_fields(plan)).reshape(-1)
        copies = np.array(plan.copies, np.int32).T.ravel() if plan.copies else ()
        parts = (params.truncated.reshape(-1), params.logprobs, prompt, *writes, copies)
        staged = StagedStep(
            packed_shape,
            shape is not None,
            result_row,
            step.counts["sample"],
            num_step,
            num_truncated=len(parts[0]),
            num_writes=len(writes[0]),
            num_copies=len(plan.copies),
            num_logprobs=len(params.logprobs),
            num_prompt_logprobs=len(prompt),
            is_edited=is_edited,
        )
        if staged.num_elements > len(array):  # many requests with long prefix hits at once
            array = np.concatenate([array, np.empty(staged.num_elements - len(array), np.int32)])
        end = num_step
        for part in parts:
            if len(part):
                begin, end = end, end + len(part)
                array[begin:end] = part
        return staged, array

    def _row_params(self, step: PlanArrays) -> RowParams:
        requests = step.plan.requests
        if not step.plan.is_decode_only:
            return RowParams.of([requests[row] for row in step.sampled_rows])
        return self._params.get(requests) or self._params.put(requests, RowParams.of(requests))


def send(
    b: StepBuffers, staged: StagedStep, ring: PinnedRing, index: int, array: IntArray
) -> tuple[Tensor, Tensor]:
    """Copy a step to the device from buffer ``index`` of a ring, and do its writes to the store.

    Args:
        array: the step; that buffer, or one of its own that is longer.

    Returns:
        On the device, valid until the next step is sent: the fields of the rows that use top_k,
        top_p or min_p, int32 ``[TRUNCATED_FIELDS * n]``, and the blocks to be copied, sources, then
        destinations, int32 ``[2 * n]``.
    """
    begin, end = staged.num_step, staged.num_before_writes
    pinned = ring.tensor[index]
    if staged.num_elements <= pinned.numel():
        b.staged[: staged.num_elements].copy_(pinned[: staged.num_elements], non_blocking=True)
        writes = b.staged[end : staged.num_elements]
    else:
        # The writes and copies from pageable memory.
        pinned[:end].copy_(torch.from_numpy(array[:end]))
        b.staged[:end].copy_(pinned[:end], non_blocking=True)
        writes = torch.from_numpy(array[end : staged.num_elements]).to(b.staged.device)
    ring.release(index)
    update_tables(writes, b.stored_tables, staged.num_writes)
    truncated = b.staged[begin : begin + staged.num_truncated]
    return truncated, writes[2 * staged.num_writes :]
