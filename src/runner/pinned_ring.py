"""Host side of a step on a GPU: what to send, written into pinned memory that is used in turn.

Block tables live on the device (the *table store*, a row per running request); a step sends what
its plan says of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine.plan import Blocks, StepPlan
from ..engine.request import RequestInfo
from ..engine.sampling_params import SamplingParams

_MAX_INT32 = 2**31 - 1
IntArray = NDArray[np.int32]


class PinnedRing:
    """Pinned host buffers, each free again once the copy that last read or wrote it is done.

    Args:
        num_buffers: at least one more than the steps that can be in flight.
        num_elements: of each buffer.

    Attributes:
        tensor: all of them, ``[num_buffers, num_elements]``.
    """

    def __init__(self, num_buffers: int, num_elements: int, dtype: torch.dtype) -> None:
        self.tensor = torch.zeros(
            num_buffers, num_elements, dtype=dtype, pin_memory=torch.cuda.is_available()
        )
        self._tensors = list(self.tensor)
        self._arrays = [tensor.numpy() for tensor in self._tensors]
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers
        self._next = 0

    def take(self) -> tuple[int, Tensor, NDArray[Any]]:
        """(number, tensor, the same memory as an array) of the next buffer, waited for."""
        index = self._next
        self._next = (index + 1) % len(self._tensors)
        event = self._events[index]
        if event is not None:
            event.synchronize()
        return index, self._tensors[index], self._arrays[index]

    def release(self, index: int) -> torch.cuda.Event:
        """The work queued so far is the last to use buffer ``index``; returns its event."""
        event = self._events[index]
        if event is None:
            event = self._events[index] = torch.cuda.Event()
        event.record()
        return event


class TableStore:
    """Which row of the device's table store holds which running request's block table.

    Args:
        num_rows: rows of the store; at least the requests that can run at a time.
        width: blocks a row holds.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self._width = width
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_blocks = [0] * num_rows  # that each row of the store holds
        self._last_requests: tuple[RequestInfo, ...] = ()
        self.rows: list[int] = []

    def place(self, plan: StepPlan) -> None:
        """Find the store row of each of the plan's rows; ``rows`` is the list of them."""
        rows_of = self._rows
        for request_id in plan.released:
            store_row = rows_of.pop(request_id, None)
            if store_row is not None:  # else admitted before a step that failed
                self._free_rows.append(store_row)
        for row in plan.tables:
            rows_of[plan.requests[row].request_id] = self._free_rows.pop()
        if plan.tables or plan.requests != self._last_requests:
            self.rows = [rows_of[request.request_id] for request in plan.requests]
            self._last_requests = plan.requests

    def updates(
        self, plan: StepPlan, new_blocks: IntArray | None = None
    ) -> tuple[list[int], list[int]]:
        """Flat store indices and block ids to send for the plan placed last.

        Args:
            new_blocks: of a decode-only plan, where the block a row grew by is noted instead,
                ``[>= rows]``: its kernel stores it at the block of the row's position.
        """
        where: list[int] = []
        ids: list[int] = []
        num_blocks = self._num_blocks
        for row, blocks in plan.tables.items():
            num_blocks[self.rows[row]] = 0
            self._append(row, blocks, where, ids)
        for row, blocks in plan.new_blocks.items():
            if new_blocks is None:
                self._append(row, blocks, where, ids)
            else:
                (new_blocks[row],) = blocks
                num_blocks[self.rows[row]] += 1
        return where, ids

    def _append(self, row: int, blocks: Blocks, where: list[int], ids: list[int]) -> None:
        store_row = self.rows[row]
        begin = store_row * self._width + self._num_blocks[store_row]
        where += range(begin, begin + len(blocks))
        ids += blocks
        self._num_blocks[store_row] += len(blocks)


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
    furthest = np.array([_furthest(p.min_p) for _, p in rows], np.float32)
    return np.stack(
        [
            np.array([place for place, _ in rows], np.int32),
            np.array([min(p.top_k, _MAX_INT32) for _, p in rows], np.int32),
            top_p.view(np.int32),
            furthest.view(np.int32),
        ]
    )


def _furthest(min_p: float) -> float:
    """-log of the float32 ``min_p``, infinite at 0. One by one: the bits of a logarithm of an
    array may depend on the place in it."""
    rounded = float(np.float32(min_p)) if min_p else 0.0
    return -math.log(rounded) if rounded > 0 else math.inf
