"""Packs a plan into integers and copies them to the device, where kernels unpack them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..compile.step_inputs import MIN_SIZE
from ..engine.batches import LastTwoBatches
from ..engine.plan import StepPlan
from ..engine.request import RequestInfo
from .block_tables import BlockTableStore
from .device_buffers import DECODE_FIELDS, StepBuffers, decode_size
from .gpu_logprobs import pad_positions
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
        shape = self.shape
        fields = (shape.num_tokens, shape.num_rows, shape.is_decode, self.is_captured)
        counts = (self.result_row, self.num_sampled, self.num_step, self.num_truncated)
        asked = (self.num_logprobs, self.num_prompt_logprobs, self.is_edited)
        return np.array([*fields, *counts, self.num_writes, self.num_copies, *asked], np.int32)

    @classmethod
    def from_array(cls, array: IntArray) -> StagedStep:
        """What :meth:`to_array` gave."""
        num_tokens, num_rows, is_decode, is_captured, *counts = array[:-1].tolist()
        shape = StepShape(num_tokens, num_rows, bool(is_decode))
        staged = cls(shape, bool(is_captured), *counts)
        return replace(staged, is_edited=bool(array[-1]))


class GpuStepPacker:
    """Knows what the device knows already, and packs the rest.

    Args:
        num_rows: most requests of a step. width: most blocks of a request.
        state_width, null_state_slot: as of :class:`.BlockTableStore`.
    """

    def __init__(
        self, num_rows: int, width: int, state_width: int = 0, null_state_slot: int = 0
    ) -> None:
        self._size = num_rows, width, state_width, null_state_slot
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
        if shape is not None and shape.is_decode:
            num_step, params, writes = self._pack_decode(plan, shape.num_rows, result_row, array)
            packed_shape = shape
        else:
            num_tokens, num_rows = plan.total_num_tokens, len(plan)
            packed_shape = shape or StepShape(
                max(num_tokens, MIN_SIZE), max(num_rows, MIN_SIZE), False
            )
            num_step, params, writes = self._pack_mixed(plan, packed_shape, result_row, array)
        truncated, logprobs = params.truncated.reshape(-1), params.logprobs
        # No position of a decode step lies in front of a token of a prompt.
        prompt = None if plan.is_decode_only else pad_positions(prompt_fields(plan))
        staged = StagedStep(
            packed_shape,
            shape is not None,
            result_row,
            plan.num_sampled,
            num_step,
            truncated.size,
            len(writes[0]),
            len(plan.copies),
            logprobs.size,
            0 if prompt is None else prompt.size,
            is_edited,
        )
        if staged.num_elements > len(array):  # many requests with long prefix hits at once
            array = np.concatenate([array, np.empty(staged.num_elements - len(array), np.int32)])
        end = staged.num_before_writes
        array[num_step : num_step + truncated.size] = truncated
        if logprobs.size:
            begin = num_step + truncated.size
            array[begin : begin + logprobs.size] = logprobs
        if staged.num_prompt_logprobs and prompt is not None:
            array[end - prompt.size : end] = prompt.reshape(-1)
        array[end : end + len(writes[0])] = writes[0]
        end += len(writes[0])
        array[end : end + len(writes[1])] = writes[1]
        if plan.copies:
            array[end + len(writes[1]) : staged.num_elements] = np.array(plan.copies).T.ravel()
        return staged, array

    def _pack_decode(
        self, plan: StepPlan, bucket: int, result_row: int, array: IntArray
    ) -> tuple[int, RowParams, tuple[list[int], list[int]]]:
        num_rows = len(plan)
        size = decode_size(bucket)
        fields = array[: DECODE_FIELDS * bucket].reshape(DECODE_FIELDS, bucket)
        fields[:, num_rows:] = 0
        fields[2, num_rows:] = -1
        fields[3] = -1
        fields[0, :num_rows] = _as_array(plan.token_ids)
        fields[1, :num_rows] = plan.starts
        fields[2, :num_rows] = self._tables.rows
        writes = self._tables.pending_writes(plan, fields[3])
        params = self._row_params(plan.requests)
        fields[4:6, :num_rows] = params.seeds
        fields[6, :num_rows] = params.temperature_bits
        array[fields.size : size] = num_rows, result_row
        return size, params, writes

    def _pack_mixed(
        self, plan: StepPlan, shape: StepShape, result_row: int, array: IntArray
    ) -> tuple[int, RowParams, tuple[list[int], list[int]]]:
        num_rows, num_sampled = len(plan), plan.num_sampled
        lengths = np.array(plan.num_tokens, np.int32)
        starts = np.array(plan.starts, np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        num_tokens = int(ends[-1])
        padded_tokens, padded_rows = shape.num_tokens, shape.num_rows

        tokens = array[: 3 * padded_tokens].reshape(3, padded_tokens)
        tokens[:, num_tokens:] = 0
        tokens[2, num_tokens:] = -1
        tokens[0, :num_tokens] = _as_array(plan.token_ids)
        tokens[1, :num_tokens] = np.arange(num_tokens) - np.repeat(ends - lengths - starts, lengths)
        store_rows = np.array(self._tables.rows, np.int32)
        tokens[2, :num_tokens] = np.repeat(store_rows, lengths)
        writes = self._tables.pending_writes(plan)
        at = 3 * padded_tokens
        array[at] = 0
        array[at + 1 : at + 1 + num_rows] = ends
        array[at + 1 + num_rows : at + 1 + padded_rows] = num_tokens
        at += padded_rows + 1
        rows = array[at : at + 2 * padded_rows].reshape(2, padded_rows)
        rows[:] = 0
        rows[0, :num_rows] = starts + lengths
        rows[1, :num_rows] = store_rows
        at += 2 * padded_rows
        sampled_rows = np.flatnonzero(np.array(plan.num_samples, bool))
        kept = array[at : at + 4 * padded_rows].reshape(4, padded_rows)
        kept[:] = 0
        params = RowParams.of([plan.requests[row] for row in sampled_rows])
        kept[0, :num_sampled] = ends[sampled_rows] - 1
        kept[1:3, :num_sampled] = params.seeds
        kept[3, :num_sampled] = params.temperature_bits
        at += 4 * padded_rows
        array[at] = result_row
        return at + 1, params, writes

    def _row_params(self, requests: tuple[RequestInfo, ...]) -> RowParams:
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


def _as_array(token_ids: Sequence[int]) -> Sequence[int] | IntArray:
    """The range of a step that feeds all its rows as an array, which is quicker to copy."""
    if isinstance(token_ids, range):
        return np.arange(token_ids.start, token_ids.stop, token_ids.step, dtype=np.int32)
    return token_ids
