"""Packs a plan into pinned memory and copies it to the device, where kernels unpack it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..compile.step_inputs import MIN_SIZE
from ..engine.plan import StepPlan
from ..engine.request import RequestInfo
from ..engine.sampling_params import SamplingParams
from .block_tables import BlockTableStore
from .device_buffers import DECODE_FIELDS, StepBuffers, decode_size
from .pinned_ring import IntArray, PinnedRing
from .step_shapes import StepShape
from .unpack_kernels import update_tables


class GpuStepPacker:
    """Sends plans to the device; of block tables, which stay there, only what changed.

    Args:
        buffers: where it goes.
        num_steps_in_flight: most steps queued at a time.
    """

    def __init__(self, buffers: StepBuffers, num_steps_in_flight: int) -> None:
        self._buffers = buffers
        self._ring = PinnedRing(num_steps_in_flight + 1, len(buffers.staged), torch.int32)
        self._params: tuple[tuple[RequestInfo, ...], RowParams] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the block tables on the device, as after a failed step."""
        self._tables = BlockTableStore(len(self._buffers.table_store), self._buffers.width)

    def pack_decode(self, plan: StepPlan, bucket: int, result_row: int) -> Tensor:
        """Send a decode-only plan, padded to ``bucket`` rows; its tokens are to go to
        ``result_row``.

        Returns:
            On the device, the fields of the rows that use top_k, top_p or min_p, int32
            ``[TRUNCATED_FIELDS * n]``; valid until the next step is packed.
        """
        self._tables.place(plan)
        index, pinned, array = self._ring.take()
        num_rows = len(plan)
        size = decode_size(bucket)
        fields = array[: DECODE_FIELDS * bucket].reshape(DECODE_FIELDS, bucket)
        fields[:, num_rows:] = 0
        fields[2, num_rows:] = -1
        fields[3] = -1
        fields[0, :num_rows] = _as_array(plan.token_ids)
        fields[1, :num_rows] = plan.starts
        fields[2, :num_rows] = self._tables.rows
        where, ids = self._tables.pending_writes(plan, fields[3])
        params = self._row_params(plan.requests)
        fields[4:6, :num_rows] = params.seeds
        fields[6, :num_rows] = params.temperature_bits
        array[fields.size : size] = num_rows, result_row
        return self._send(index, pinned, array, size, params.truncated, where, ids)

    def pack_mixed(
        self, plan: StepPlan, shape: StepShape | None, result_row: int
    ) -> tuple[Tensor, StepShape]:
        """Send any plan, padded to ``shape``, or to the smallest sizes there can be; its tokens are
        to go to ``result_row``.

        Returns:
            What :meth:`pack_decode` returns, and the shape.
        """
        self._tables.place(plan)
        index, pinned, array = self._ring.take()
        num_rows, num_sampled = len(plan), plan.num_sampled
        lengths = np.array(plan.num_tokens, np.int32)
        starts = np.array(plan.starts, np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        num_tokens = int(ends[-1])
        if shape is None:
            shape = StepShape(max(num_tokens, MIN_SIZE), max(num_rows, MIN_SIZE), False)
        padded_tokens, padded_rows = shape.num_tokens, shape.num_rows

        tokens = array[: 3 * padded_tokens].reshape(3, padded_tokens)
        tokens[:, num_tokens:] = 0
        tokens[2, num_tokens:] = -1
        tokens[0, :num_tokens] = _as_array(plan.token_ids)
        tokens[1, :num_tokens] = np.arange(num_tokens) - np.repeat(ends - lengths - starts, lengths)
        store_rows = np.array(self._tables.rows, np.int32)
        tokens[2, :num_tokens] = np.repeat(store_rows, lengths)
        where, ids = self._tables.pending_writes(plan)
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
        sampled_rows = np.flatnonzero(np.array(plan.sampled, bool))
        kept = array[at : at + 4 * padded_rows].reshape(4, padded_rows)
        kept[:] = 0
        params = RowParams.of([plan.requests[row] for row in sampled_rows])
        kept[0, :num_sampled] = ends[sampled_rows] - 1
        kept[1:3, :num_sampled] = params.seeds
        kept[3, :num_sampled] = params.temperature_bits
        at += 4 * padded_rows
        array[at] = result_row
        at += 1
        return self._send(index, pinned, array, at, params.truncated, where, ids), shape

    def _row_params(self, requests: tuple[RequestInfo, ...]) -> RowParams:
        if self._params is None or self._params[0] != requests:
            self._params = (requests, RowParams.of(requests))
        return self._params[1]

    def _send(
        self,
        index: int,
        pinned: Tensor,
        array: IntArray,
        size: int,
        truncated: IntArray,
        where: list[int],
        ids: list[int],
    ) -> Tensor:
        """Copy the first ``size`` staged elements and behind them ``truncated`` to the device, and
        apply the table updates. Returns what ``truncated`` is there, flat."""
        b = self._buffers
        begin, size = size, size + truncated.size
        array[begin:size] = truncated.reshape(-1)
        end = size + 2 * len(where)
        if end <= len(array):
            array[size : size + len(where)] = where
            array[size + len(where) : end] = ids
            b.staged[:end].copy_(pinned[:end], non_blocking=True)
            self._ring.release(index)
            update_tables(b.staged[size:end], b.table_store, len(where))
            return b.staged[begin:size]
        # Many requests with long prefix hits at once: sent by themselves, from pageable memory.
        b.staged[:size].copy_(pinned[:size], non_blocking=True)
        self._ring.release(index)
        many = torch.tensor(where + ids, dtype=torch.int32).to(b.staged.device)
        update_tables(many, b.table_store, len(where))
        return b.staged[begin:size]


def _as_array(token_ids: Sequence[int]) -> Sequence[int] | IntArray:
    """The range of a step that feeds all its rows as an array, which is quicker to copy."""
    if isinstance(token_ids, range):
        return np.arange(token_ids.start, token_ids.stop, token_ids.step, dtype=np.int32)
    return token_ids


_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of the sampled rows of a plan, in the form they are sent.

    Attributes:
        seeds: uint32 words as int32, ``[2, S]``, low words first. temperature_bits: int32 ``[S]``.
        truncated: int32 ``[4, n]``, of the n rows that use top_k, top_p or min_p: what
            ``TRUNCATED_FIELDS`` in :mod:`.top_k_top_p` lists.
    """

    seeds: IntArray
    temperature_bits: IntArray
    truncated: IntArray

    @classmethod
    def of(cls, requests: Sequence[RequestInfo]) -> RowParams:
        params = [request.sampling_params for request in requests]
        seeds = np.array([request.seed & (1 << 64) - 1 for request in requests], np.uint64)
        return cls(
            np.stack([seeds & 0xFFFFFFFF, seeds >> 32]).astype(np.uint32).view(np.int32),
            np.array([p.temperature for p in params], np.float32).view(np.int32),
            truncated_fields(params),
        )


def truncated_fields(params: Sequence[SamplingParams]) -> IntArray:
    """What :attr:`RowParams.truncated` says, of rows with these parameters."""
    rows = [
        (place, p)
        for place, p in enumerate(params)
        if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
    ]
    top_p = np.array([p.top_p for _, p in rows], np.float32)
    min_p_distance = np.array([_min_p_distance(p.min_p) for _, p in rows], np.float32)
    return np.stack(
        [
            np.array([place for place, _ in rows], np.int32),
            np.array([min(p.top_k, _MAX_INT32) for _, p in rows], np.int32),
            top_p.view(np.int32),
            min_p_distance.view(np.int32),
        ]
    )


def _min_p_distance(min_p: float) -> float:
    """-log of the float32 ``min_p``, infinite at 0. One by one: the bits of a logarithm of an
    array may depend on the place in it."""
    rounded = float(np.float32(min_p)) if min_p else 0.0
    return -math.log(rounded) if rounded > 0 else math.inf
