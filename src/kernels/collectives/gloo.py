"""Collectives over ``torch.distributed``: parts are gathered, and summed here in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..fused.dispatch import NormForm
from .communicator import sum_then_norm


class GatherCommunicator:
    """Meets :class:`.communicator.Communicator` with one library call, which moves bytes alone: the
    library's own sum has an order that follows the size of the message.

    Args:
        transparent: False takes the library's sum, for an engine that is not transparent either.
    """

    def __init__(self, *, transparent: bool = True) -> None:
        self._transparent = transparent
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def reserve(self, *_: tuple[int, int]) -> None:
        """The library has its own memory."""

    def connect(self) -> None:
        """The group has met."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        if not self._transparent:
            out = partial.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(out)
            return out
        parts = self._gather(partial.contiguous())
        total = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(partial.dtype)

    def all_reduce_norm(
        self, partial: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: NormForm
    ) -> tuple[Tensor, Tensor]:
        return sum_then_norm(self, partial, residual, weight, eps, form)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        # The library takes parts of one size.
        padded = torch.nn.functional.pad(part, (0, max(sizes) - part.shape[-1]))
        parts = self._gather(padded.contiguous())
        return torch.cat([whole[..., :n] for whole, n in zip(parts, sizes, strict=True)], -1)

    def least(self, number: int) -> int:
        value = torch.tensor([number])
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)

    def _gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.num_ranks)]
        dist.all_gather(parts, part)
        return parts
