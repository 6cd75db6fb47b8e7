"""Host side of a step on a GPU: what to send, written into pinned memory that is used in turn.

Block tables live on the device (the *table store*, one row a request); a step sends the ids that
were added. Tokens that an earlier step sampled are named by their place in that step's result.
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

from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.sampling_params import SamplingParams

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


@dataclass(slots=True)
class _Entry:
    request: Request
    row: int
    num_blocks: int = 0


class TableStore:
    """Which row of the device's table store holds which request, and what must be sent to it.

    Relies on ``StepPlan.new_blocks``: a table changes only by appending those ids, unless they
    are the whole table.

    Args:
        num_rows: rows of the store; at least the rows a plan can have.
        width: blocks a row holds.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self._width = width
        self._entries: dict[int, _Entry] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._last_requests: tuple[Request, ...] = ()
        self._last: list[_Entry] = []

    def place(self, plan: StepPlan) -> bool:
        """Find a row for each of the plan's requests, taking rows from those not in the plan.

        Returns:
            Whether the plan's rows are those of the plan before, in the same order.
        """
        entries = self._entries
        for request in plan.preempted:
            self._drop(id(request))
        if plan.requests == self._last_requests:
            return True
        missing = [r for r in plan.requests if id(r) not in entries]
        if len(missing) > len(self._free_rows):
            current = {id(request) for request in plan.requests}
            for key in [key for key in entries if key not in current]:
                self._drop(key)
        for request in missing:
            # The entry holds the request, so its id cannot be reused while the entry lives.
            entries[id(request)] = _Entry(request, self._free_rows.pop())
        self._last_requests = plan.requests
        self._last = [entries[id(request)] for request in plan.requests]
        return False

    @property
    def rows(self) -> list[int]:
        """The store row of each of the requests placed last."""
        return [entry.row for entry in self._last]

    def _drop(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._free_rows.append(entry.row)
            self._last_requests = ()

    def updates(
        self, plan: StepPlan, is_same: bool, new_blocks: IntArray | None
    ) -> tuple[list[int], list[int]]:
        """Flat store indices and block ids to send for the plan placed last.

        Args:
            is_same: what :meth:`place` returned.
            new_blocks: where one new block a row at the end of its table may be noted instead,
                ``[>= rows]``; None if there is no such place.
        """
        where: list[int] = []
        ids: list[int] = []
        added = plan.new_blocks
        for row in added if is_same else range(len(plan)):
            num_new = len(added[row]) if row in added else 0
            entry = self._last[row]
            table = entry.request.block_table
            num_blocks = len(table)
            if num_new == 0 and entry.num_blocks == num_blocks:
                continue
            known = entry.num_blocks if entry.num_blocks + num_new == num_blocks else 0
            if new_blocks is not None and num_blocks - known == 1 and known:
                new_blocks[row] = table[known]
            else:
                begin = entry.row * self._width
                where.extend(range(begin + known, begin + num_blocks))
                ids.extend(table[known:])
            entry.num_blocks = num_blocks
        return where, ids


class TokenSource:
    """Token ids of a plan's rows: known ones as they are, others as ``-(j + 1)``, the j-th token
    the previous step sampled."""

    def __init__(self) -> None:
        self._plan: StepPlan | None = None
        self._places: dict[int, int] | None = None

    def note(self, plan: StepPlan | None) -> None:
        """``plan`` was dispatched; None forgets the previous step."""
        self._plan, self._places = plan, None

    def follows(self, plan: StepPlan) -> bool:
        """Does every row of ``plan`` compute the token its row sampled in the step before?"""
        last = self._plan
        return (
            last is not None
            and last.is_decode_only
            and plan.requests == last.requests
            and all(
                start == before + 1 for start, before in zip(plan.starts, last.starts, strict=True)
            )
        )

    def place(self, request: Request) -> int:
        """Where the previous step put the request's token.

        Raises:
            ValueError: it sampled none for it.
        """
        if self._places is None:
            last = self._plan
            sampled = (
                []
                if last is None
                else [request for request, _, _, is_sampled in last.rows() if is_sampled]
            )
            self._places = {id(request): place for place, request in enumerate(sampled)}
        place = self._places.get(id(request))
        if place is None:
            raise ValueError(f"{request!r}: its last token is neither known nor being sampled")
        return place

    def decode_ids(self, plan: StepPlan) -> Sequence[int] | IntArray:
        """One id a row of a decode-only plan."""
        if self.follows(plan):
            return np.arange(-1, -len(plan) - 1, -1, dtype=np.int32)
        return [
            request.token_ids[start] if start < len(request.token_ids) else -1 - self.place(request)
            for request, start in zip(plan.requests, plan.starts, strict=True)
        ]

    def all_ids(self, plan: StepPlan) -> list[int]:
        """The ids of all tokens of a plan."""
        ids: list[int] = []
        for request, start, n, _ in plan.rows():
            if n == 1 and start >= len(request.token_ids):
                ids.append(-1 - self.place(request))
            else:
                ids.extend(request.token_ids[start : start + n])
        return ids


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of the sampled rows of a plan, in the form they are sent.

    Attributes:
        seeds: uint32 words as int32, ``[2, S]``, low words first. temperature_bits: int32 ``[S]``.
        truncated: int32 ``[4, n]``, of the n rows that use top_k, top_p or min_p: what
            ``TRUNCATED_FIELDS`` in :mod:`pagespec.kernels.triton_truncate` lists.
    """

    seeds: IntArray
    temperature_bits: IntArray
    truncated: IntArray

    @classmethod
    def of(cls, requests: Sequence[Request]) -> RowParams:
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
