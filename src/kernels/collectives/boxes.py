"""The memory that ranks push into, and the division of a call into programs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a call is divided into programs.

    Attributes:
        chunk_bytes: size of a program's part of a row. It is in bytes, so that calls of several
            dtypes share boxes.
        num_warps: warps of a program.
        norm_warps: warps of a program with a norm; None for the number of the separate norm, and so
            its bits.
        few_rows, few_row_bytes: with a norm, calls of up to this many rows, of up to this many
            bytes each, use no flags.
        few_two_shot_bytes: of the calls without flags, those of at least this many bytes are
            two-shot; None: as ``_TWO_SHOT_BYTES`` has it for more than two ranks.
        two_shot_bytes: all-reduces with flags of at least this many bytes are two-shot; None: the
            same.
        block_rows: rows of a block of a two-shot call, a power of 2.
        lag: units between the steps of a two-shot call (:mod:`.two_shot`).
        max_programs: of a two-shot call; None for one per task.
        max_registers: per thread of a two-shot call; None for the compiler's choice.
    """

    chunk_bytes: int = 4096
    num_warps: int = 4
    norm_warps: int | None = None
    few_rows: int = 256
    few_row_bytes: int = 16384
    few_two_shot_bytes: int | None = None
    two_shot_bytes: int | None = None
    block_rows: int = 4
    lag: int = 16
    max_programs: int | None = None
    max_registers: int | None = None

    def min_two_shot_bytes(self, num_ranks: int, *, has_flags: bool = True) -> int:
        """The size in bytes from which on an all-reduce is two-shot."""
        given = self.two_shot_bytes if has_flags else self.few_two_shot_bytes
        if given is not None:
            return given
        return _ONE_SHOT_ONLY if num_ranks <= _MAX_ONE_SHOT_RANKS else _TWO_SHOT_BYTES[has_flags]


_ONE_SHOT_ONLY = 1 << 62
_MAX_ONE_SHOT_RANKS = 2
"""Up to this many ranks, two-shot sends no fewer bytes than one-shot."""
_TWO_SHOT_BYTES = {True: 256 << 10, False: 512 << 10}
"""By whether the all-reduce uses flags."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest calls.

    Attributes:
        max_chunks: the most chunks of a one-shot call or an all-gather.
        max_rows, max_row_bytes: the most rows of a two-shot call, 0 for none, and their size.
    """

    max_chunks: int
    max_rows: int = 0
    max_row_bytes: int = 0

    @classmethod
    def of(
        cls,
        sums: tuple[int, int],
        gathers: Sequence[tuple[int, int]],
        shape: LaunchShape,
        num_ranks: int,
    ) -> Capacity:
        """For calls of up to this many rows, of up to this many bytes each."""
        num_rows, row_bytes = sums
        least = shape.min_two_shot_bytes(num_ranks)
        is_two_shot = num_rows * row_bytes >= least
        one_shot_rows = min(num_rows, -(-least // row_bytes))
        calls = [(one_shot_rows, row_bytes), *gathers]
        max_chunks = max(rows * -(-size // shape.chunk_bytes) for rows, size in calls)
        if not is_two_shot:
            return cls(max_chunks)
        return cls(max_chunks, num_rows, -(-row_bytes // 16) * 16)

    def sender_bytes(self, shape: LaunchShape, num_ranks: int) -> int:
        """Bytes for the parts of one sender in a two-shot call."""
        unit_rows = num_ranks * shape.block_rows
        return -(-self.max_rows // unit_rows) * shape.block_rows * self.max_row_bytes

    def holds(self, num_rows: int, row_bytes: int) -> bool:
        """Whether a two-shot call of these rows fits."""
        return num_rows <= self.max_rows and row_bytes <= self.max_row_bytes


@dataclass(frozen=True, slots=True)
class Boxes:
    """The memory that the ranks push into.

    Attributes:
        capacity: of this memory.
        boxes, flags: addresses, per rank, that this device may write to. They are launch arguments:
            loading them first would take the latency of a load, which adds to the time after the
            push.
        row_boxes: the same, for few rows.
        sum_boxes, sum_flags: the same, for two-shot calls.
        numbers, row_numbers, sum_numbers: int32 ``[max_chunks]``, ``[few_rows]`` and
            ``[max_rows]``, zeros.
        own_rows, own_flags, own_sum_flags, ended: parts of ``memory``: uint8, its box for few rows;
            int32, its flags; and the word that ends all waiting for few rows.
        memory: this rank's own memory, which lives as long as this object.
    """

    capacity: Capacity
    boxes: tuple[int, ...]
    flags: tuple[int, ...]
    row_boxes: tuple[int, ...]
    sum_boxes: tuple[int, ...]
    sum_flags: tuple[int, ...]
    numbers: Tensor
    row_numbers: Tensor
    sum_numbers: Tensor
    own_rows: Tensor
    own_flags: Tensor
    own_sum_flags: Tensor
    ended: Tensor
    memory: Tensor

    @staticmethod
    def num_bytes(capacity: Capacity, shape: LaunchShape, num_ranks: int) -> tuple[int, ...]:
        """Sizes of the parts of a rank's memory, in order."""
        sender_bytes = capacity.sender_bytes(shape, num_ranks)
        return (
            2 * num_ranks * capacity.max_chunks * shape.chunk_bytes,
            2 * num_ranks * shape.few_rows * shape.few_row_bytes,
            num_ranks * sender_bytes + capacity.max_rows * capacity.max_row_bytes,
            16,
            4 * num_ranks * capacity.max_rows,
            4 * num_ranks * capacity.max_chunks,
        )

    @classmethod
    def over(
        cls, memory: Tensor, addresses: Sequence[int], capacity: Capacity, shape: LaunchShape
    ) -> Boxes:
        """Boxes in ``memory``, uint8, of :meth:`num_bytes`. Each rank has its memory at one of
        ``addresses``."""
        sizes = cls.num_bytes(capacity, shape, len(addresses))
        begins = [sum(sizes[:part]) for part in range(len(sizes))]
        boxes, row_boxes, sum_boxes, _, sum_flags, flags = (
            tuple(at + begin for at in addresses) for begin in begins
        )
        parts = memory.view(-1)[: sum(sizes)].split(sizes)
        _, own_rows, _, ended, own_sum_flags, own_flags = parts
        counts = [capacity.max_chunks, shape.few_rows, capacity.max_rows]
        zeros = torch.zeros(sum(counts), dtype=torch.int32, device=memory.device)
        numbers, row_numbers, sum_numbers = zeros.split(counts)
        return cls(
            capacity,
            boxes,
            flags,
            row_boxes,
            sum_boxes,
            sum_flags,
            numbers,
            row_numbers,
            sum_numbers,
            own_rows,
            own_flags.view(torch.int32),
            own_sum_flags.view(torch.int32),
            ended.view(torch.int32),
            memory,
        )

    def clear(self) -> None:
        """Initialise this rank's memory. No peer may have pushed before."""
        self.own_rows.fill_(0xFF)
        for words in (self.own_flags, self.own_sum_flags, self.ended):
            words.zero_()


_has_met = threading.Event()


def has_met() -> bool:
    """Whether this process was in a group with boxes before. torch then keeps that group's store
    and counters. New processes lack these, so the ranks would never meet."""
    return _has_met.is_set()


def make_boxes(
    capacity: Capacity, shape: LaunchShape, num_ranks: int, device: torch.device
) -> Boxes:
    """Create boxes in symmetric memory. All ranks call it at the same time, once per process."""
    import torch.distributed._symmetric_memory as symmetric

    _has_met.set()
    num_bytes = sum(Boxes.num_bytes(capacity, shape, num_ranks))
    memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, dist.distributed_c10d._get_default_group())
    boxes = Boxes.over(memory, handle.buffer_ptrs, capacity, shape)
    boxes.clear()
    torch.cuda.synchronize(device)
    handle.barrier()  # no rank writes memory that another has yet to clear
    return boxes
