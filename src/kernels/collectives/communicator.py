"""The collectives that a sharded model calls, and the communicator that a process calls them on.

The order of a sum determines its bits. Libraries choose an algorithm by message size, so a row's
sum depends on the number of rows in the message. Here each element is ``((x_0 + x_1) + x_2) + ...``
in float32, over the ranks in their order, at every size.
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
    """Where a matmul of few rows may push its results, which replaces the all-reduce after it.

    Attributes:
        row_boxes, row_numbers: see :class:`.boxes.Boxes`.
        constants: RANK, NUM_RANKS, MAX_ROWS and ROW_BYTES of a kernel.
        is_connected: False allows compilation, but no launch.
        all_reduce_norm: :meth:`Communicator.all_reduce_norm` of the pushed results. It reads only
            the shape of its first argument.
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

    def reserve(  # noqa: B027 - few need memory
        self, sums: tuple[int, int], gathers: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Allocate the memory for all-reduces and all-gathers of up to this many rows, of up to
        this many bytes each."""

    def connect(self) -> None:
        """From here on the ranks compute together. Before, each may compute by itself."""
        self.is_connected = True

    @abstractmethod
    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' ``partial``, in its dtype, in new memory."""

    def all_reduce_norm(
        self, partial: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: NormForm
    ) -> tuple[Tensor, Tensor]:
        """(RMSNorm of h, h), where h is the sum, added to ``residual`` if there is one: the bits of
        these two calls. Without a residual only the first result is defined."""
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
        """The ranks' parts concatenated along the last dimension; rank r's has ``sizes[r]``
        elements."""

    @abstractmethod
    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""

    def end(self) -> None:  # noqa: B027 - few have kernels that wait
        """A rank is lost: everything that waits for it on this rank's device stops waiting."""


class LoneRank(Communicator):
    """A communicator without a group, whose results have the right shapes.

    For work that each rank does at its own pace, whatever the other ranks find in their caches: the
    probe, traces, and the compilation of kernels.
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
        RuntimeError: called outside of any scope: a sharded model was called directly.
    """
    communicator = _CURRENT.get()
    if communicator is None:
        raise RuntimeError("a sharded model computes only inside communicator_scope")
    return communicator
