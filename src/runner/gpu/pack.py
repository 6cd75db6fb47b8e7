"""Packs a plan into integers and copies them to the device, where kernels unpack them."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...compile.step_fields import FORMS
from ...compile.step_inputs import MIN_SIZE
from ...engine.plan import LastTwoBatches, StepPlan
from ..block_tables import BlockTableStore
from ..layout import LAYOUT, Layout, PlanArrays, StepShape
from ..logprob_rows import prompt_fields
from ..pinned import IntArray, PinnedRing
from ..row_params import RowParams
from .device_buffers import StepBuffers
from .logprobs import pad_positions
from .unpack_kernels import update_tables

_NONE = np.empty(0, np.int32)
_Sent = TypeVar("_Sent", Tensor, IntArray)


class StagedStep(NamedTuple):
    """The integers that the host sends for a step. They are, in this order: ``num_step`` that the
    kernels unpack; ``num_truncated`` for rows that use top_k, top_p or min_p; ``num_logprobs`` for
    sampled rows and ``num_prompt_logprobs`` for prompt positions with requested log-probabilities
    (:mod:`...engine.logprobs`); and two for each of ``num_writes`` to the table store and of
    ``num_copies`` of blocks.

    Attributes:
        shape: shape of the step. is_captured: whether there is a graph of that shape.
        result_row: destination of its tokens. num_sampled: number of tokens.
        is_edited: whether rows may be sampled from edited logits. Then all ranks gather the logits.
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

    def logprob_fields(self, sent: _Sent) -> tuple[_Sent, _Sent]:
        """Log-probability fields of sampled rows and of prompt positions, in the step as sent."""
        middle = self.num_step + self.num_truncated + self.num_logprobs
        return sent[middle - self.num_logprobs : middle], sent[middle : self.num_before_writes]

    def to_array(self) -> IntArray:
        """All of it as an array, for another process."""
        return np.array([*self.shape[:3], FORMS.index(self.shape.form), *self[1:]], np.int32)

    @classmethod
    def from_array(cls, array: IntArray) -> StagedStep:
        """The inverse of :meth:`to_array`."""
        num_tokens, num_rows, num_samples, form, *rest = array.tolist()
        return cls(StepShape(num_tokens, num_rows, num_samples, FORMS[form]), *rest)


class GpuStepPacker:
    """Tracks the tables on the device, and packs their changes.

    Args:
        num_rows: most requests per step. width: most blocks per request.
        state_width, null_state_slot: see :class:`.BlockTableStore`.
        layout: the layout of the steps.
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
        """A step failed: invalidate everything cached about the tables on the device."""
        self._tables = BlockTableStore(*self._size)

    @property
    def store_rows(self) -> list[int]:
        """Rows of the table store for the rows of the plan packed last."""
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
        """Write a plan into ``array``, padded to ``shape``, or to the smallest possible sizes.

        Returns:
            The staged step, and its array: ``array``, or a longer one if it did not fit.
        """
        self._tables.place(plan)
        num_rows, is_decode_only = len(plan.requests), plan.is_decode_only
        packed_shape = shape or StepShape.mixed(
            max(plan.total_num_tokens, MIN_SIZE), max(num_rows, plan.num_sampled, MIN_SIZE)
        )
        # Blocks for draft tokens are behind the row's position: they are written like those of a
        # mixed step.
        is_growing = packed_shape.is_decode and bool(plan.new_blocks) and not plan.wanted_drafts
        new_blocks = np.full(num_rows, -1, np.int32) if is_growing else None
        where, ids = self._tables.pending_writes(plan, new_blocks)
        step = PlanArrays(
            plan,
            self._tables.row_array,
            -1 if new_blocks is None else new_blocks,
            result_row,
            packed_shape.num_rows - num_rows,
        )
        step.params = params = self._row_params(step)
        num_step = self._layout.pack(step, packed_shape, array)
        # A decode-only step has no prompt positions.
        prompt = _NONE if is_decode_only else pad_positions(prompt_fields(plan)).reshape(-1)
        truncated, logprobs, copies = params.truncated.reshape(-1), params.logprobs, plan.copies
        staged = StagedStep(
            packed_shape,
            shape is not None,
            result_row,
            step.counts["sample"],
            num_step,
            len(truncated),
            len(where),
            len(copies),
            len(logprobs),
            len(prompt),
            is_edited,
        )
        if staged.num_elements == num_step:
            return staged, array
        if staged.num_elements > len(array):  # many requests with long prefix hits at once
            array = np.concatenate([array, np.empty(staged.num_elements - len(array), np.int32)])
        end = num_step
        moved = np.array(copies, np.int32).T.ravel() if copies else ()
        for part in (truncated, logprobs, prompt, where, ids, moved):
            if len(part):
                begin, end = end, end + len(part)
                array[begin:end] = part
        return staged, array

    def _row_params(self, step: PlanArrays) -> RowParams:
        plan, requests = step.plan, step.plan.requests
        if not (plan.is_decode_only or plan.has_drafts):
            return RowParams.of(step.sampled_requests)
        params = self._params.get(requests) or self._params.put(requests, RowParams.of(requests))
        return params if plan.is_decode_only else params.of_samples(step.rows.sampled_rows)


def send(
    b: StepBuffers, staged: StagedStep, ring: PinnedRing, index: int, array: IntArray
) -> tuple[Tensor, Tensor]:
    """Send a step to the device from buffer ``index`` of a ring, and apply its writes to the store.

    Args:
        array: the step; either that buffer, or a separate longer array.

    Returns:
        Tensors on the device, valid until the next step is sent: the fields of the rows that use
        top_k, top_p or min_p, int32 ``[TRUNCATED_FIELDS * n]``; and the blocks to copy, sources,
        then destinations, int32 ``[2 * n]``.
    """
    begin, end = staged.num_step, staged.num_before_writes
    pinned = ring.tensor[index]
    if staged.num_elements <= pinned.numel():
        b.staged[: staged.num_elements].copy_(pinned[: staged.num_elements], non_blocking=True)
        writes = b.staged[end : staged.num_elements]
    else:
        # Writes and copies are sent from pageable memory.
        pinned[:end].copy_(torch.from_numpy(array[:end]))
        b.staged[:end].copy_(pinned[:end], non_blocking=True)
        writes = torch.from_numpy(array[end : staged.num_elements]).to(b.staged.device)
    ring.release(index)
    update_tables(writes, b.stored_tables, staged.num_writes)
    truncated = b.staged[begin : begin + staged.num_truncated]
    return truncated, writes[2 * staged.num_writes :]
