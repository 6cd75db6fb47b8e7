"""Matmul of FP8 rows and an FP8 weight on a Hopper GPU: one of two kernels, by the tile.

Both have the bits of :mod:`.matmul_fp8`. They take weights whose outputs share their scales by
whole blocks of 128, or have one scale for all inputs each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device import Gpu, triggers_dependents_late
from ..fused.e4m3_groups import QuantizedRows
from ..linear.matmul_sm90 import stages_ahead
from .matmul_fp8_sm90_few import few_rows_kernel
from .matmul_fp8_sm90_many import many_rows_kernel
from .quantized_weight import BLOCK
from .tiles_fp8 import FewTile, ManyTile


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch worked out, for a GPU or for a compiler alone."""

    x_box: list[int]
    weight_box: list[int]
    num_programs: int
    num_warps: int
    constants: dict[str, object]

    def describe_x(self, x: Tensor) -> TensorDescriptor:
        return self._describe(x, self.x_box)

    def describe_weight(self, weight: Tensor) -> TensorDescriptor:
        return self._describe(weight, self.weight_box)

    def _describe(self, matrix: Tensor, box: list[int]) -> TensorDescriptor:
        """``[R, K]``, or as ``[K / 128, R, 128]`` for a box of that many dimensions."""
        num_rows, k_size = matrix.shape
        layout = gl.NVMMASharedLayout(128, 8, len(box))
        if len(box) == 2:
            return TensorDescriptor(matrix, [num_rows, k_size], [k_size, 1], box, layout)
        shape, strides = [k_size // BLOCK, num_rows, BLOCK], [BLOCK, k_size, 1]
        return TensorDescriptor(matrix, shape, strides, box, layout)


def plan_launch(
    num_rows: int,
    num_outs: int,
    k_size: int,
    num_w_groups: int,
    shared: int,
    tile: FewTile | ManyTile,
    overlap: bool,
    num_sms: int,
) -> Launch:
    """Raises ValueError if the tile does not fit the shape."""
    if not tile.fits(num_outs, k_size):
        raise ValueError(f"{tile} does not fit {num_rows} x {k_size} by {num_outs} x {k_size}")
    constants: dict[str, object] = {
        "N": num_outs,
        "K": k_size,
        "PART": tile.part,
        "STAGES": tile.stages,
        "W_GROUPS": num_w_groups,
        "SHARED": shared,
        "PDL": overlap,
    }
    if isinstance(tile, ManyTile):
        return Launch(
            [64, BLOCK],
            [tile.part, BLOCK],
            min(num_outs // tile.part * -(-num_rows // tile.x_rows), num_sms),
            4,  # of the first warpgroup; the others are its workers
            constants | {"X_ROWS": tile.x_rows},
        )
    x_rows = 8 if num_rows <= 8 else tile.x_rows
    return Launch(
        [tile.atoms, x_rows, BLOCK],
        [tile.atoms, tile.part, BLOCK],
        num_outs // tile.part * -(-num_rows // x_rows),
        4 if tile.part <= 64 else 8,
        constants
        | {
            "X_ROWS": x_rows,
            "ATOMS": tile.atoms,
            "PREFETCH_STAGES": stages_ahead(num_rows, num_outs, k_size, tile.atoms, tile.stages),
            "GROUPS": triton.next_power_of_2(k_size // BLOCK),
            "LATE_TRIGGER": triggers_dependents_late(num_rows),
        },
    )


def matmul(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    *,
    shared: int,
    tile: FewTile | ManyTile,
    overlap: bool = True,
) -> Tensor:
    """``x @ weight.T``, rounded to bfloat16; one launch.

    Args:
        x: of ``[M, K]``, on a Hopper GPU.
        weight: e4m3 ``[N, K]``, contiguous. Not written by the kernels before, as far as they have
            not ended when the last one begins.
        scales: float32 ``[N / 128, K / 128]`` with ``shared`` 128, or ``[ceil(N / shared), 1]``.
        tile: one that fits the shape. overlap: whether to start before the kernel before has ended.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: the tile does not fit.
    """
    num_rows, k_size = x.values.shape
    num_outs = len(weight)
    out = torch.empty(num_rows, num_outs, dtype=torch.bfloat16, device=weight.device)
    if num_rows == 0:
        return out
    num_sms = Gpu.of(weight.device).num_sms
    launch = plan_launch(
        num_rows, num_outs, k_size, scales.shape[1], shared, tile, overlap, num_sms
    )
    kernel = few_rows_kernel if isinstance(tile, FewTile) else many_rows_kernel
    kernel[(launch.num_programs,)](
        launch.describe_x(x.values), launch.describe_weight(weight), x.scales, scales, out,
        num_rows, **launch.constants,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )  # fmt: skip
    return out
