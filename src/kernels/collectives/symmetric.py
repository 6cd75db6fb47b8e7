"""The communicator of GPUs that can access each other's memory (NVLink), with the kernels of
:mod:`.peer_memory`.

The boxes are torch's symmetric memory, accessed by plain peer-to-peer addresses. NVLink multicast
is not used. Everything runs inside CUDA graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..device import as_rows, overlap_options, triggers_dependents_late
from ..fused.dispatch import NormForm
from ..fused.rms_norm import num_warps
from .boxes import Boxes, Capacity, LaunchShape, make_boxes
from .communicator import Communicator, LoneRank, PushTarget
from .peer_memory import (
    all_gather_kernel,
    all_reduce_kernel,
    all_reduce_norm_kernel,
    few_rows_norm_kernel,
)
from .two_shot import few_rows_two_shot_kernel, two_shot_kernel

_FAR_AHEAD = 1 << 30
_SHAPE = LaunchShape()


class PeerCommunicator(Communicator):
    """Pushes into the memory of the other ranks.

    Until it is connected it computes by itself, as :class:`.communicator.LoneRank`, so that ranks
    warm up at their own pace. With boxes it meanwhile compiles the kernels that it will launch.

    Args:
        host: the same ranks, for values of the host.
        device: of this rank.
        make: creates the boxes.
        shape: equal on all ranks.
    """

    def __init__(
        self,
        host: Communicator,
        device: torch.device,
        make: Callable[[Capacity, LaunchShape, int, torch.device], Boxes] = make_boxes,
        shape: LaunchShape = _SHAPE,
    ) -> None:
        super().__init__(host.rank, host.num_ranks)
        self._device, self._make, self._shape = device, make, shape
        self._alone = LoneRank(self.rank, self.num_ranks)
        self._host = host
        self._boxes: Boxes | None = None
        self._begins: dict[tuple[int, ...], Tensor] = {}

    def reserve(self, sums: tuple[int, int], gathers: Sequence[tuple[int, int]] = ()) -> None:
        """Create boxes. All ranks call it at the same time."""
        capacity = Capacity.of(sums, gathers, self._shape, self.num_ranks)
        self._boxes = self._make(capacity, self._shape, self.num_ranks, self._device)

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self._boxes is None:
            return self._alone.all_reduce(partial)
        rows = partial.reshape(-1, partial.shape[-1])
        out = torch.empty(partial.shape, dtype=partial.dtype, device=partial.device)
        width = rows.shape[1]
        if self._is_two_shot(self._boxes, rows):
            strides = rows.stride(0), 0
            constants: dict[str, Any] = {"N": width, "FORM": None, "HAS_RESIDUAL": False}
            self._launch_two_shot(
                self._boxes, rows, out, rows, out, rows, 0.0, *strides, **constants
            )
        else:
            self._launch(all_reduce_kernel, self._boxes, rows, out, width, width, rows.stride(0))
        if self.is_connected:
            return out
        del out  # memory is measured meanwhile, too
        return self._alone.all_reduce(partial)

    def push_target(self, num_rows: int, width: int, dtype: torch.dtype) -> PushTarget | None:
        if self._boxes is None or not triggers_dependents_late(num_rows):
            return None
        if not self._are_few(num_rows, width * dtype.itemsize):
            return None
        sizes = self._few_rows_sizes()
        constants = {"RANK": self.rank, "NUM_RANKS": self.num_ranks, **sizes}
        all_reduce_norm = functools.partial(self.all_reduce_norm, is_pushed=True)
        boxes, numbers = self._boxes.row_boxes, self._boxes.row_numbers
        return PushTarget(boxes, numbers, constants, self.is_connected, all_reduce_norm)

    def all_reduce_norm(
        self,
        partial: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        form: NormForm,
        is_pushed: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if self._boxes is None:
            return self._alone.all_reduce_norm(partial, residual, weight, eps, form)
        rows = as_rows(partial)
        residual_rows = rows if residual is None else as_rows(residual)
        out = torch.empty(partial.shape, dtype=partial.dtype, device=partial.device)
        hidden = out if residual is None else torch.empty_like(out)
        width = rows.shape[1]
        block = triton.next_power_of_2(width)
        tensors = residual_rows, hidden, weight, eps, rows.stride(0), residual_rows.stride(0)
        constants = {
            "N": width,
            "BLOCK": block,
            "FORM": form,
            "HAS_RESIDUAL": residual is not None,
            "num_warps": self._shape.norm_warps or num_warps(block),
            "enable_fp_fusion": False,
        }
        b = self._boxes
        if not is_pushed and self._is_two_shot(b, rows):
            self._launch_two_shot(b, rows, out, *tensors, **constants)
        elif not is_pushed and self._are_few_two_shot(rows):
            self._run(
                few_rows_two_shot_kernel, (len(rows), 1),
                rows, out, b.row_boxes, b.ended, b.row_numbers, *tensors,
                **self._few_rows_sizes(),
                **constants,
            )  # fmt: skip
        elif self._are_few(len(rows), width * rows.element_size()):
            self._run(
                few_rows_norm_kernel, (len(rows), 1),
                rows, out, b.row_boxes, b.ended, b.row_numbers, *tensors,
                LATE_TRIGGER=triggers_dependents_late(len(rows)),
                IS_PUSHED=is_pushed,
                **self._few_rows_sizes(),
                **constants,
            )  # fmt: skip
        else:
            kernel = all_reduce_norm_kernel
            self._launch(kernel, b, rows, out, width, *tensors, whole_rows=True, **constants)
        if self.is_connected:
            return out, hidden
        del out, hidden
        return self._alone.all_reduce_norm(partial, residual, weight, eps, form)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        if self._boxes is None:
            return self._alone.all_gather(part, sizes)
        rows = part.reshape(part.shape[:-1].numel(), part.shape[-1])
        out = torch.empty(*part.shape[:-1], sum(sizes), dtype=part.dtype, device=part.device)
        self._launch(
            all_gather_kernel, self._boxes, rows, out, max(sizes), self._begins_of(tuple(sizes)),
            rows.stride(0), sum(sizes),
        )  # fmt: skip
        if self.is_connected:
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
        """Launch a kernel over chunks of ``num_columns`` of each row, with one program per chunk,
        or one per row. Until connected, only compile it.

        Raises:
            ValueError: there are more chunks than memory was allocated for.
        """
        chunk = self._shape.chunk_bytes // rows.element_size()
        num_rows, num_chunks = rows.shape[0], -(-num_columns // chunk)
        max_chunks = b.capacity.max_chunks
        if num_rows * num_chunks > max_chunks:
            raise ValueError(f"{num_rows} rows of {num_chunks} chunks for {max_chunks}")
        self._run(
            kernel, (num_rows, 1 if whole_rows else num_chunks),
            rows, out, b.boxes, b.flags, b.numbers, *arguments,
            MAX_CHUNKS=max_chunks,
            CHUNK=chunk,
            **{"num_warps": self._shape.num_warps, **constants},
        )  # fmt: skip

    def _is_two_shot(self, b: Boxes, rows: Tensor) -> bool:
        num_rows, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
        if not b.capacity.holds(num_rows, row_bytes):
            return False
        return num_rows * row_bytes >= self._shape.min_two_shot_bytes(self.num_ranks)

    def _launch_two_shot(
        self, b: Boxes, rows: Tensor, out: Tensor, *arguments: Any, N: int, **constants: Any
    ) -> None:
        block, block_rows = triton.next_power_of_2(N), self._shape.block_rows
        num_units = -(-rows.shape[0] // (self.num_ranks * block_rows))
        lag = min(self._shape.lag, num_units // 4)
        num_tasks = (num_units + 2 * lag) * (self.num_ranks - 1 + self.num_ranks * block_rows)
        num_programs = min(num_tasks, self._shape.max_programs or num_tasks)
        constants = {"BLOCK": block, "num_warps": num_warps(block), **constants}
        if self._shape.max_registers is not None:
            constants["maxnreg"] = self._shape.max_registers
        self._run(
            two_shot_kernel, (num_programs, 1),
            rows, out, b.sum_boxes, b.sum_flags, b.sum_numbers, *arguments, rows.shape[0], lag,
            num_tasks,
            IS_PERSISTENT=num_programs < num_tasks,
            N=N,
            ROWS=block_rows,
            MAX_ROWS=b.capacity.max_rows,
            SENDER_BYTES=b.capacity.sender_bytes(self._shape, self.num_ranks),
            **constants,
        )  # fmt: skip

    def _are_few(self, num_rows: int, row_bytes: int) -> bool:
        """Whether ``few_rows_norm_kernel`` supports these rows."""
        return num_rows <= self._shape.few_rows and row_bytes <= self._shape.few_row_bytes

    def _are_few_two_shot(self, rows: Tensor) -> bool:
        num_rows, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
        least = self._shape.min_two_shot_bytes(self.num_ranks, has_flags=False)
        return num_rows * row_bytes >= least and self._are_few(num_rows, row_bytes)

    def _few_rows_sizes(self) -> dict[str, int]:
        return {"MAX_ROWS": self._shape.few_rows, "ROW_BYTES": self._shape.few_row_bytes}

    def _run(self, kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
        """Launch a kernel; until connected, only compile it."""
        constants |= {"RANK": self.rank, "NUM_RANKS": self.num_ranks}
        constants |= overlap_options(self._device)
        if self.is_connected:
            kernel[grid](*arguments, **constants)
        else:
            kernel.warmup(*arguments, grid=grid, **constants)

    def least(self, number: int) -> int:
        return self._host.least(number)

    def end(self) -> None:
        """Advance this rank's flags far, using only copies: waiting kernels may leave no
        multiprocessor for another kernel."""
        if self._boxes is None:
            return
        b = self._boxes
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with torch.cuda.stream(stream):  # of None: as it is
            b.ended.copy_(torch.ones_like(b.ended, device="cpu"))
            for numbers, own_flags in (
                (b.numbers, b.own_flags),
                (b.sum_numbers, b.own_sum_flags),
            ):
                own_flags.copy_((numbers.cpu() + _FAR_AHEAD).repeat(self.num_ranks))

    def _begins_of(self, sizes: tuple[int, ...]) -> Tensor:
        if sizes not in self._begins:
            begins = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
            self._begins[sizes] = torch.tensor(begins, dtype=torch.int32, device=self._device)
        return self._begins[sizes]
