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
    """

    chunk_bytes: int = 4096
    num_warps: int = 4
    norm_warps: int | None = None
    few_rows: int = 256
    few_row_bytes: int = 16384


@dataclass(frozen=True, slots=True)
class Boxes:
    """The memory that the ranks push into.

    Attributes:
        max_chunks: the most chunks of a call.
        boxes, flags: addresses, per rank, that this device may write to. They are launch arguments:
            loading them first would take the latency of a load, which adds to the time after the
            push.
        row_boxes: the same, for few rows.
        numbers, row_numbers: int32 ``[max_chunks]`` and ``[few_rows]``, zeros.
        own_rows, own_flags, ended: parts of ``memory``: uint8, its box for few rows; int32, its
            flags; and the word that ends all waiting for few rows.
        memory: this rank's own memory, which lives as long as this object: its box, the box for few
            rows, its flags, and ``ended``.
    """

    max_chunks: int
    boxes: tuple[int, ...]
    flags: tuple[int, ...]
    row_boxes: tuple[int, ...]
    numbers: Tensor
    row_numbers: Tensor
    own_rows: Tensor
    own_flags: Tensor
    ended: Tensor
    memory: Tensor

    @staticmethod
    def num_bytes(max_chunks: int, shape: LaunchShape, num_ranks: int) -> tuple[int, ...]:
        """Sizes of the parts of a rank's memory, in order."""
        return (
            2 * num_ranks * max_chunks * shape.chunk_bytes,
            2 * num_ranks * shape.few_rows * shape.few_row_bytes,
            4 * num_ranks * max_chunks,
            16,
        )

    @classmethod
    def over(
        cls, memory: Tensor, addresses: Sequence[int], max_chunks: int, shape: LaunchShape
    ) -> Boxes:
        """Boxes in ``memory``, uint8, of :meth:`num_bytes`. Each rank has its memory at one of
        ``addresses``."""
        sizes = cls.num_bytes(max_chunks, shape, len(addresses))
        begins = [sum(sizes[:part]) for part in range(3)]
        boxes, row_boxes, flags = (tuple(at + begin for at in addresses) for begin in begins)
        _, own_rows, own_flags, ended = memory.view(-1)[: sum(sizes)].split(sizes)
        counts = torch.zeros(max_chunks + shape.few_rows, dtype=torch.int32, device=memory.device)
        return cls(
            max_chunks,
            boxes,
            flags,
            row_boxes,
            counts[:max_chunks],
            counts[max_chunks:],
            own_rows,
            own_flags.view(torch.int32),
            ended.view(torch.int32),
            memory,
        )

    def clear(self) -> None:
        """Initialise this rank's memory. No peer may have pushed before."""
        self.own_rows.fill_(0xFF)
        self.own_flags.zero_()
        self.ended.zero_()


_has_met = threading.Event()


def has_met() -> bool:
    """Whether this process was in a group with boxes before. torch then keeps that group's store
    and counters. New processes lack these, so the ranks would never meet."""
    return _has_met.is_set()


def make_boxes(max_chunks: int, shape: LaunchShape, num_ranks: int, device: torch.device) -> Boxes:
    """Create boxes in symmetric memory. All ranks call it at the same time, once per process."""
    import torch.distributed._symmetric_memory as symmetric

    _has_met.set()
    num_bytes = sum(Boxes.num_bytes(max_chunks, shape, num_ranks))
    memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, dist.distributed_c10d._get_default_group())
    boxes = Boxes.over(memory, handle.buffer_ptrs, max_chunks, shape)
    boxes.clear()
    torch.cuda.synchronize(device)
    handle.barrier()  # no rank writes memory that another has yet to clear
    return boxes
