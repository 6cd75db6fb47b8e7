"""The communicator of GPUs that reach each other's memory (NVLink): kernels of :mod:`.peer_memory`.

The boxes are symmetric memory of torch, by plain peer-to-peer addresses; NVLink multicast is not
used. Everything runs inside CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import LoneRank
from .gloo import GatherCommunicator


class Boxes:
    """The memory that the ranks push into.

    Attributes:
        boxes, flags: int64 ``[num_ranks]``, addresses on this device.
        numbers: int32 ``[max_chunks]``.
    """

    def __init__(self, max_chunks: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        from .peer_memory import CHUNK_BYTES

        num_ranks = dist.get_world_size()
        num_box_bytes = 2 * num_ranks * max_chunks * CHUNK_BYTES
        num_flag_bytes = 4 * num_ranks * max_chunks
        self.max_chunks = max_chunks
        self._memory = symmetric.empty(
            num_box_bytes + num_flag_bytes, dtype=torch.uint8, device=device
        )
        self._memory[num_box_bytes:].zero_()
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(self._memory, dist.group.WORLD)
        handle.barrier()
        addresses = list(handle.buffer_ptrs)
        self.boxes = torch.tensor(addresses, device=device)
        self.flags = self.boxes + num_box_bytes
        self.numbers = torch.zeros(max_chunks, dtype=torch.int32, device=device)


class PeerCommunicator:
    """Meets :class:`.communicator.Communicator`.

    Until it is connected it computes by itself, as :class:`.communicator.LoneRank`: ranks warm up at
    their own pace.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._device = device
        self._alone = LoneRank(self.rank, self.num_ranks)
        self._host = GatherCommunicator()
        self._boxes: Boxes | None = None
        self._is_connected = False
        self._begins: dict[tuple[int, ...], Tensor] = {}

    def reserve(self, *calls: tuple[int, int]) -> None:
        """Make boxes. All ranks do it at a time."""
        from .peer_memory import CHUNK_BYTES

        most = max(num_rows * -(-num_bytes // CHUNK_BYTES) for num_rows, num_bytes in calls)
        self._boxes = Boxes(most, self._device)

    def connect(self) -> None:
        self._is_connected = True

    def all_reduce(self, partial: Tensor) -> Tensor:
        if not self._is_connected or self._boxes is None:
            return self._alone.all_reduce(partial)
        from .peer_memory import CHUNK_BYTES, all_reduce_kernel

        rows = partial.view(-1, partial.shape[-1])
        out = torch.empty(partial.shape, dtype=partial.dtype, device=partial.device)
        num_rows, num_columns = rows.shape
        chunk = CHUNK_BYTES // partial.element_size()
        grid = num_rows, -(-num_columns // chunk)
        self._check_room(grid)
        b = self._boxes
        all_reduce_kernel[grid](
            rows,
            out,
            b.boxes,
            b.flags,
            b.numbers,
            num_columns,
            rows.stride(0),
            RANK=self.rank,
            NUM_RANKS=self.num_ranks,
            MAX_CHUNKS=b.max_chunks,
            CHUNK=chunk,
        )
        return out

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        if not self._is_connected or self._boxes is None:
            return self._alone.all_gather(part, sizes)
        from .peer_memory import CHUNK_BYTES, all_gather_kernel

        rows = part.reshape(-1, part.shape[-1])
        num_all = sum(sizes)
        out = torch.empty(*part.shape[:-1], num_all, dtype=part.dtype, device=part.device)
        chunk = CHUNK_BYTES // part.element_size()
        grid = rows.shape[0], -(-max(sizes) // chunk)
        self._check_room(grid)
        b = self._boxes
        all_gather_kernel[grid](
            rows,
            out,
            b.boxes,
            b.flags,
            b.numbers,
            self._begins_of(tuple(sizes)),
            rows.stride(0),
            num_all,
            RANK=self.rank,
            NUM_RANKS=self.num_ranks,
            MAX_CHUNKS=b.max_chunks,
            CHUNK=chunk,
        )
        return out

    def least(self, number: int) -> int:
        return self._host.least(number)

    def _begins_of(self, sizes: tuple[int, ...]) -> Tensor:
        if sizes not in self._begins:
            begins = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
            self._begins[sizes] = torch.tensor(begins, dtype=torch.int32, device=self._device)
        return self._begins[sizes]

    def _check_room(self, grid: tuple[int, int]) -> None:
        assert self._boxes is not None
        if grid[0] * grid[1] > self._boxes.max_chunks:
            raise ValueError(f"{grid[0]} rows of {grid[1]} chunks for {self._boxes.max_chunks}")
