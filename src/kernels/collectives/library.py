"""Collectives over ``torch.distributed`` (gloo, NCCL): parts are gathered, and summed here in rank
order."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Communicator, LoneRank


class GatherCommunicator(Communicator):
    """Each operation makes one library call, which only moves bytes: the order of the library's own
    sum depends on the message size.

    Args:
        transparent: False uses the library's sum, for an engine that is not transparent either.
        is_connected: with False it computes by itself until it is connected, as
            :class:`.communicator.LoneRank`: ranks on GPUs warm up at their own pace.
    """

    def __init__(self, *, transparent: bool = True, is_connected: bool = True) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), is_connected=is_connected)
        self._transparent = transparent
        self._alone = LoneRank(self.rank, self.num_ranks)

    def all_reduce(self, partial: Tensor) -> Tensor:
        if not self.is_connected:
            return self._alone.all_reduce(partial)
        if not self._transparent:
            out = partial.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(out)
            return out
        parts = self._gather(partial.contiguous())
        total = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(partial.dtype)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        if not self.is_connected:
            return self._alone.all_gather(part, sizes)
        # The library requires parts of one size.
        padded = torch.nn.functional.pad(part, (0, max(sizes) - part.shape[-1]))
        parts = self._gather(padded.contiguous())
        return torch.cat([whole[..., :n] for whole, n in zip(parts, sizes, strict=True)], -1)

    def least(self, number: int) -> int:
        value = torch.tensor([number])
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)

    def end(self) -> None:
        """Abort NCCL. With gloo there is nothing to do: a closed connection is an error by itself.

        NCCL makes its kernels give up at once, but the call returns only when no CUDA graph uses it
        any more. The caller releases the graphs afterwards, so a separate thread makes the call."""
        if not dist.is_nccl_available():
            return
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
        if isinstance(backend, dist.ProcessGroupNCCL):
            threading.Thread(target=backend.abort, daemon=True).start()

    def _gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.num_ranks)]
        dist.all_gather(parts, part)
        return parts
