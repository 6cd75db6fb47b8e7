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
from ..kernels.collectives.communicator import Communicator, PushTarget
from ..kernels.collectives.library import GatherCommunicator
from ..kernels.fused.dispatch import NormForm
from .channel import Cell

# Ranks read weights at their own pace before they first meet.
_TIMEOUT = timedelta(minutes=30)
_HOST = "127.0.0.1"
_LOCAL_RANK = "LOCAL_RANK"  # by which transformers takes a GPU


def make_store(num_ranks: int) -> dist.TCPStore:
    """Where the ranks find each other: on this host, at a free port. For rank 0.

    Raises:
        InvalidInputError: this process belongs to another group.
    """
    if dist.is_initialized():
        raise InvalidInputError(
            "tensor_parallel_size",
            num_ranks,
            "torch.distributed is in use in this process, by another engine or by yourself",
        )
    return dist.TCPStore(_HOST, 0, num_ranks, is_master=True, wait_for_workers=False)


def join_store(port: int, num_ranks: int) -> dist.TCPStore:
    """The store of rank 0."""
    return dist.TCPStore(_HOST, port, num_ranks, is_master=False)


def join_group(store: dist.Store, rank: int, num_ranks: int, device: torch.device) -> None:
    """Meet the other ranks. transformers reads slices of weights over this group, too."""
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
        # torch wraps it once more for each group, to put "[rank0]: " before every line of every
        # later traceback of the process; it never takes that back.
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
        has_peer_access: GPUs reach each other's memory. Sums then have one order in any case: that
            is the quickest way as well.
    """
    is_cpu = device.type == "cpu"
    inner = GatherCommunicator(transparent=transparent, is_connected=is_cpu)
    if is_cpu or not has_peer_access:
        return CountingCommunicator(inner, cell)
    from ..kernels.collectives.symmetric import PeerCommunicator

    return PeerCommunicator(inner, device)


class CountingCommunicator:
    """Meets :class:`.communicator.Communicator` with another; tells how far this rank has come.

    Args:
        cell: of this rank.
    """

    def __init__(self, inner: Communicator, cell: Cell) -> None:
        self._inner, self._cell = inner, cell
        self.rank, self.num_ranks = inner.rank, inner.num_ranks

    def reserve(self, *calls: tuple[int, int]) -> None:
        self._inner.reserve(*calls)

    def connect(self) -> None:
        self._inner.connect()

    def all_reduce(self, partial: Tensor) -> Tensor:
        self._count()
        return self._inner.all_reduce(partial)

    def all_reduce_norm(
        self, partial: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: NormForm
    ) -> tuple[Tensor, Tensor]:
        self._count()
        return self._inner.all_reduce_norm(partial, residual, weight, eps, form)

    def push_target(self, num_rows: int, width: int, dtype: torch.dtype) -> PushTarget | None:
        return self._inner.push_target(num_rows, width, dtype)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        self._count()
        return self._inner.all_gather(part, sizes)

    def least(self, number: int) -> int:
        self._count()
        return self._inner.least(number)

    def end(self) -> None:
        self._inner.end()

    def _count(self) -> None:
        self._cell.num_collectives += 1
