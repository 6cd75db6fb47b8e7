"""The process group of the ranks, and their communicator."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidInputError
from ..kernels.collectives.communicator import Communicator
from ..kernels.collectives.library import GatherCommunicator
from .channel import Cell

# Ranks read weights at different speeds before they first meet.
_TIMEOUT = timedelta(minutes=30)
_HOST = "127.0.0.1"
_LOCAL_RANK = "LOCAL_RANK"  # selects the GPU in transformers


def make_store(num_ranks: int) -> dist.TCPStore:
    """Create the rendezvous of the ranks, at a free port of this host. For rank 0.

    Raises:
        InvalidInputError: this process belongs to another group.
    """
    if dist.is_initialized():
        raise InvalidInputError(
            "tensor_parallel_size",
            num_ranks,
            "torch.distributed is in use in this process, by another engine or by your code",
        )
    return dist.TCPStore(_HOST, 0, num_ranks, is_master=True, wait_for_workers=False)


def join_store(port: int, num_ranks: int) -> dist.TCPStore:
    """The store of rank 0."""
    return dist.TCPStore(_HOST, port, num_ranks, is_master=False)


def join_group(store: dist.Store, rank: int, num_ranks: int, device: torch.device) -> None:
    """Join the group. transformers also reads slices of weights through it."""
    is_cuda = device.type == "cuda"
    os.environ[_LOCAL_RANK] = str(rank)
    hook = sys.excepthook
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=_TIMEOUT,
            device_id=device if is_cuda else None,
        )
    finally:
        # torch wraps the hook for each group, to prefix every later traceback with "[rank0]: ", and
        # never restores it.
        sys.excepthook = hook


def leave_group() -> None:
    """Undo :func:`join_group`."""
    os.environ.pop(_LOCAL_RANK, None)
    if dist.is_initialized():
        dist.destroy_process_group()


def make_communicator(
    device: torch.device, cell: Cell, *, transparent: bool, has_peer_access: bool
) -> Communicator:
    """The communicator of this rank, in its group.

    Args:
        has_peer_access: GPUs can access each other's memory. Sums then always have one order,
            because that is also the fastest.
    """
    is_cpu = device.type == "cpu"
    if is_cpu or not has_peer_access:
        return CountingCommunicator(cell, transparent=transparent, is_connected=is_cpu)
    from ..kernels.collectives.symmetric import PeerCommunicator

    inner = GatherCommunicator(transparent=transparent, is_connected=is_cpu)
    return PeerCommunicator(inner, device)


class CountingCommunicator(GatherCommunicator):
    """Counts collectives in the cell of this rank. :class:`.workers.Watch` reads this progress.

    Args:
        cell: the cell of this rank.
    """

    def __init__(self, cell: Cell, *, transparent: bool, is_connected: bool) -> None:
        super().__init__(transparent=transparent, is_connected=is_connected)
        self._cell = cell

    def all_reduce(self, partial: Tensor) -> Tensor:
        self._cell.num_collectives += 1
        return super().all_reduce(partial)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        self._cell.num_collectives += 1
        return super().all_gather(part, sizes)

    def least(self, number: int) -> int:
        self._cell.num_collectives += 1
        return super().least(number)
