"""The collectives a sharded model calls, and which communicator a process calls them on.

The order of a sum is part of its bits. Libraries choose an algorithm by the size of the message, so
that a row's sum depends on how many rows it travels with. Here each element is
``((x_0 + x_1) + x_2) + ...`` in float32, over the ranks in their order, at every size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from ..fused import dispatch as fused
from ..fused.dispatch import NormForm


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Where a matmul of few rows may push what it computes, in place of the all-reduce after it.

    Attributes:
        row_boxes, row_numbers: as in :class:`.boxes.Boxes`.
        constants: RANK, NUM_RANKS, MAX_ROWS and ROW_BYTES of a kernel.
        is_connected: False allows no launch, only compilation.
        all_reduce_norm: :meth:`Communicator.all_reduce_norm` of what was pushed; it reads its first
            argument's shape alone.
    """

    row_boxes: tuple[int, ...]
    row_numbers: Tensor
    constants: dict[str, int]
    is_connected: bool
    all_reduce_norm: Callable[..., tuple[Tensor, Tensor]]


class Communicator(ABC):
    """One rank's end of a group. All ranks call the same operations in the same order.

    Attributes:
        rank: of this process. num_ranks: of the group.
        is_connected: whether the ranks compute together.
    """

    def __init__(self, rank: int, num_ranks: int, *, is_connected: bool = False) -> None:
        self.rank, self.num_ranks, self.is_connected = rank, num_ranks, is_connected

    def reserve(self, *calls: tuple[int, int]) -> None:  # noqa: B027 - few need memory
        """Take the memory for calls of so many rows, each of so many bytes."""

    def connect(self) -> None:
        """From here on the ranks compute together; before, each may do so by itself."""
        self.is_connected = True

    @abstractmethod
    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' ``partial``, of its dtype, in memory of its own."""

    def all_reduce_norm(
        self, partial: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: NormForm
    ) -> tuple[Tensor, Tensor]:
        """(RMSNorm of h, h), h being the sum, added to ``residual`` if there is one: the bits of
        these two calls. Without a residual only the first result has a meaning."""
        total = self.all_reduce(partial)
        if residual is None:
            normed = fused.rms_norm(total, weight, eps, form)
            return normed, normed
        return fused.add_rms_norm(total, residual, weight, eps, form)

    def push_target(
        self, num_rows: int, width: int, dtype: torch.dtype,  # noqa: ARG002 - of others
    ) -> PushTarget | None:  # fmt: skip
        """Where a matmul with such results may push them; None: nowhere."""
        return None

    @abstractmethod
    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """The ranks' parts side by side along the last dimension, rank r's of ``sizes[r]``."""

    @abstractmethod
    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""

    def end(self) -> None:  # noqa: B027 - few have kernels that wait
        """A rank is lost: what waits for it on this rank's device stops waiting."""


class LoneRank(Communicator):
    """A communicator without a group, with results of the right shapes.

    For what a rank finds out by itself, at its own pace, and whatever the others find in their
    caches: the probe, traces, and kernels that are compiled.
    """

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial.clone(memory_format=torch.contiguous_format)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        repeats = -(-max(sizes) // part.shape[-1])
        repeated = torch.cat([part] * repeats, -1)
        return torch.cat([repeated[..., :size] for size in sizes], -1)

    def least(self, number: int) -> int:
        return number


_CURRENT: ContextVar[Communicator | None] = ContextVar("communicator", default=None)


@contextmanager
def communicator_scope(communicator: Communicator) -> Iterator[None]:
    """Within the block, the custom ops of this thread call ``communicator``."""
    token = _CURRENT.set(communicator)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_communicator() -> Communicator:
    """The communicator of the scope.

    Raises:
        RuntimeError: outside of any: a sharded model was called by hand.
    """
    communicator = _CURRENT.get()
    if communicator is None:
        raise RuntimeError("a sharded model computes only inside communicator_scope")
    return communicator
