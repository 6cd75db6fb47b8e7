"""The communicator of GPUs that reach each other's memory (NVLink): kernels of :mod:`.peer_memory`.

The boxes are symmetric memory of torch, by plain peer-to-peer addresses; NVLink multicast is not
used. Everything runs inside CUDA graphs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..device import as_rows, has_dependent_launch
from ..fused.dispatch import NormForm
from .communicator import Communicator, LoneRank

_FAR_AHEAD = 1 << 30


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a call is cut into programs.

    Attributes:
        chunk_bytes: of a program's part of a row: of bytes, so that calls of several dtypes share
            boxes.
        num_warps: of a program.
        norm_warps: of one with a norm; None as the norm alone, whose bits it then has.
    """

    chunk_bytes: int = 4096
    num_warps: int = 4
    norm_warps: int | None = None


@dataclass(frozen=True, slots=True)
class Boxes:
    """The memory that the ranks push into.

    Attributes:
        max_chunks: of a call.
        boxes, flags: of each rank, addresses that this device may write to. Arguments of a launch:
            to load them first would take the time of a load, once more behind what is pushed.
        numbers: int32 ``[max_chunks]``, zeros.
        memory: this rank's own, which lives as long as this: its box, then its flags.
    """

    max_chunks: int
    boxes: tuple[int, ...]
    flags: tuple[int, ...]
    numbers: Tensor
    memory: Tensor

    @staticmethod
    def num_bytes(max_chunks: int, chunk_bytes: int, num_ranks: int) -> tuple[int, int]:
        """Of a rank's box, and of its flags."""
        return 2 * num_ranks * max_chunks * chunk_bytes, 4 * num_ranks * max_chunks


_has_met = threading.Event()


def has_met() -> bool:
    """Whether this process was in a group with boxes before. torch then keeps that group's store
    and counts on, which processes that have just begun do not: they would never meet."""
    return _has_met.is_set()


def make_boxes(max_chunks: int, chunk_bytes: int, num_ranks: int, device: torch.device) -> Boxes:
    """Boxes in symmetric memory. All ranks make theirs at a time, and once in a process."""
    import torch.distributed._symmetric_memory as symmetric

    _has_met.set()

    num_box_bytes, num_flag_bytes = Boxes.num_bytes(max_chunks, chunk_bytes, num_ranks)
    memory = symmetric.empty(num_box_bytes + num_flag_bytes, dtype=torch.uint8, device=device)
    memory[num_box_bytes:].zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(memory, dist.distributed_c10d._get_default_group())
    handle.barrier()  # no rank writes flags that another has still to clear
    boxes = tuple(handle.buffer_ptrs)
    flags = tuple(box + num_box_bytes for box in boxes)
    numbers = torch.zeros(max_chunks, dtype=torch.int32, device=device)
    return Boxes(max_chunks, boxes, flags, numbers, memory)


_SHAPE = LaunchShape()


class PeerCommunicator:
    """Meets :class:`.communicator.Communicator`.

    Until it is connected it computes by itself, as :class:`.communicator.LoneRank`, so that ranks
    warm up at their own pace. Given boxes it compiles meanwhile what it will launch.

    Args:
        host: the same ranks, for numbers of the host.
        device: of this rank.
        make: makes the boxes.
        shape: the same for all ranks.
    """

    def __init__(
        self,
        host: Communicator,
        device: torch.device,
        make: Callable[[int, int, int, torch.device], Boxes] = make_boxes,
        shape: LaunchShape = _SHAPE,
    ) -> None:
        self.rank, self.num_ranks = host.rank, host.num_ranks
        self._device, self._make, self._shape = device, make, shape
        self._alone = LoneRank(self.rank, self.num_ranks)
        self._host = host
        self._boxes: Boxes | None = None
        self._is_connected = False
        self._begins: dict[tuple[int, ...], Tensor] = {}

    def reserve(self, *calls: tuple[int, int]) -> None:
        """Make boxes. All ranks do it at a time."""
        size = self._shape.chunk_bytes
        most = max(num_rows * -(-num_bytes // size) for num_rows, num_bytes in calls)
        self._boxes = self._make(most, size, self.num_ranks, self._device)

    def connect(self) -> None:
        self._is_connected = True

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self._boxes is None:
            return self._alone.all_reduce(partial)
        from .peer_memory import all_reduce_kernel

        rows = partial.reshape(-1, partial.shape[-1])
        out = torch.empty(partial.shape, dtype=partial.dtype, device=partial.device)
        num_columns = rows.shape[1]
        self._launch(
            all_reduce_kernel, self._boxes, rows, out, num_columns, num_columns, rows.stride(0)
        )
        if self._is_connected:
            return out
        del out  # memory is measured meanwhile, too
        return self._alone.all_reduce(partial)

    def all_reduce_norm(
        self, partial: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: NormForm
    ) -> tuple[Tensor, Tensor]:
        if self._boxes is None:
            return self._alone.all_reduce_norm(partial, residual, weight, eps, form)
        import triton

        from ..fused.rms_norm import num_warps
        from .peer_memory import all_reduce_norm_kernel

        rows = as_rows(partial)
        residual_rows = rows if residual is None else as_rows(residual)
        out = torch.empty(partial.shape, dtype=partial.dtype, device=partial.device)
        hidden = out if residual is None else torch.empty_like(out)
        width = rows.shape[1]
        block = triton.next_power_of_2(width)
        self._launch(
            all_reduce_norm_kernel,
            self._boxes,
            rows,
            out,
            width,
            residual_rows,
            hidden,
            weight,
            eps,
            rows.stride(0),
            residual_rows.stride(0),
            whole_rows=True,
            N=width,
            BLOCK=block,
            FORM=form,
            HAS_RESIDUAL=residual is not None,
            num_warps=self._shape.norm_warps or num_warps(block),
            enable_fp_fusion=False,
        )
        if self._is_connected:
            return out, hidden
        del out, hidden
        return self._alone.all_reduce_norm(partial, residual, weight, eps, form)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        if self._boxes is None:
            return self._alone.all_gather(part, sizes)
        from .peer_memory import all_gather_kernel

        rows = part.reshape(part.shape[:-1].numel(), part.shape[-1])
        out = torch.empty(*part.shape[:-1], sum(sizes), dtype=part.dtype, device=part.device)
        begins = self._begins_of(tuple(sizes))
        self._launch(
            all_gather_kernel,
            self._boxes,
            rows,
            out,
            max(sizes),
            begins,
            rows.stride(0),
            sum(sizes),
        )
        if self._is_connected:
            return out
        del out
        return self._alone.all_gather(part, sizes)

    def _launch(
        self,
        kernel: Any,
        b: Boxes,
        rows: Tensor,
        out: Tensor,
        num_columns: int,
        *arguments: Any,
        whole_rows: bool = False,
        **constants: Any,
    ) -> None:
        """Launch a kernel over chunks of ``num_columns`` of each row, a program each, or one for
        all of a row; until connected, only compile it.

        Raises:
            ValueError: there are more of them than room was made for.
        """
        chunk = self._shape.chunk_bytes // rows.element_size()
        num_rows, num_chunks = rows.shape[0], -(-num_columns // chunk)
        if num_rows * num_chunks > b.max_chunks:
            raise ValueError(f"{num_rows} rows of {num_chunks} chunks for {b.max_chunks}")
        overlap = has_dependent_launch(self._device)
        grid = num_rows, 1 if whole_rows else num_chunks
        (kernel[grid] if self._is_connected else functools.partial(kernel.warmup, grid=grid))(
            rows,
            out,
            b.boxes,
            b.flags,
            b.numbers,
            *arguments,
            RANK=self.rank,
            NUM_RANKS=self.num_ranks,
            MAX_CHUNKS=b.max_chunks,
            CHUNK=chunk,
            PDL=overlap,
            launch_pdl=overlap,
            **{"num_warps": self._shape.num_warps, **constants},
        )

    def least(self, number: int) -> int:
        return self._host.least(number)

    def end(self) -> None:
        """Set this rank's flags far ahead, by copies alone: kernels that wait may leave no room for
        another."""
        if self._boxes is None:
            return
        b = self._boxes
        flags = b.memory.view(-1)[-4 * self.num_ranks * b.max_chunks :].view(torch.int32)
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with torch.cuda.stream(stream):  # of None: as it is
            ahead = b.numbers.cpu() + _FAR_AHEAD
            flags.copy_(ahead.repeat(self.num_ranks))

    def _begins_of(self, sizes: tuple[int, ...]) -> Tensor:
        if sizes not in self._begins:
            begins = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
            self._begins[sizes] = torch.tensor(begins, dtype=torch.int32, device=self._device)
        return self._begins[sizes]
