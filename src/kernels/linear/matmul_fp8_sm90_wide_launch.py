"""Launch of the Hopper FP8 matmul of wide tiles: descriptors, grid, constants."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device import count_sms
from ..fused.e4m3_groups import GROUP, QuantizedRows, empty_rows
from .matmul_fp8_sm90_wide import wide_rows_kernel

ROWS = 128
"""Of x, in a tile."""
WEIGHT_ROWS = 256
"""In a tile."""
NUM_WARPS = 4  # of the first warpgroup; the others are its workers


@dataclass(frozen=True, slots=True)
class WideTile:
    """How a matmul of many FP8 rows is cut: in 128 of them by 256 rows of the weight.

    Attributes:
        stages: of 128 summands, in shared memory at once.
        buffers: of 64 rows by 64 results, that a warpgroup stores through; with a gate one.
        band: tiles of rows whose weights are read together.
        lag: groups by which one warpgroup is ahead of the other.
    """

    stages: int = 4
    buffers: int = 2
    band: int = 16
    lag: int = 0

    def fits(self, num_outs: int, k_size: int, has_gate: bool = False) -> bool:
        """Whether a weight of so many results suits the kernel."""
        part = WEIGHT_ROWS // (2 if has_gate else 1)
        return k_size % GROUP == 0 and num_outs % part == 0


@dataclass(frozen=True, slots=True)
class WideLaunch:
    """A launch worked out, for a GPU or for a compiler alone. Nothing in it depends on the number
    of rows."""

    x_box: list[int]
    weight_box: list[int]
    out_box: list[int]
    x_layout: gl.NVMMASharedLayout
    weight_layout: gl.NVMMASharedLayout
    out_layout: gl.NVMMASharedLayout
    constants: dict[str, object]


def count_wide_tiles(num_rows: int, num_outs: int, has_gate: bool) -> int:
    return -(-num_rows // ROWS) * (num_outs * (2 if has_gate else 1) // WEIGHT_ROWS)


def plan_wide_launch(
    num_outs: int, k_size: int, has_gate: bool, overlap: bool, tile: WideTile
) -> WideLaunch:
    """Raises ValueError if the shape does not suit the kernel."""
    if not tile.fits(num_outs, k_size, has_gate):
        raise ValueError(f"a weight of {num_outs} x {k_size} does not suit the kernel")
    halves = 2 if has_gate else 1
    constants: dict[str, object] = {
        "N": num_outs,
        "K": k_size,
        "HALVES": halves,
        "STAGES": tile.stages,
        "BUFFERS": 1 if has_gate else tile.buffers,
        "BAND": tile.band,
        "LAG": tile.lag,
        "PDL": overlap,
    }
    return WideLaunch(
        [ROWS, GROUP],
        [halves, WEIGHT_ROWS // halves, GROUP],
        [64, 128 if has_gate else 64],
        gl.NVMMASharedLayout(128, 8, 2),
        gl.NVMMASharedLayout(128, 8, 3),
        gl.NVMMASharedLayout(128, 8 if has_gate else 16, 2),
        constants,
    )


def _launch(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    out: Tensor,
    out_scales: Tensor,
    has_gate: bool,
    overlap: bool,
    tile: WideTile,
) -> None:
    (num_rows, k_size), num_outs = x.values.shape, out.shape[1]
    launch = plan_wide_launch(num_outs, k_size, has_gate, overlap, tile)
    if num_rows == 0:
        return
    halves = 2 if has_gate else 1
    x_desc = TensorDescriptor(
        x.values, [num_rows, k_size], [k_size, 1], launch.x_box, launch.x_layout
    )
    w_desc = TensorDescriptor(
        weight, [halves, num_outs, k_size], [num_outs * k_size, k_size, 1],
        launch.weight_box, launch.weight_layout,
    )  # fmt: skip
    out_desc = TensorDescriptor(
        out, [num_rows, num_outs], [num_outs, 1], launch.out_box, launch.out_layout
    )
    num_tiles = count_wide_tiles(num_rows, num_outs, has_gate)
    wide_rows_kernel[(min(num_tiles, count_sms(weight.device)),)](
        x_desc, w_desc, x.scales, scales, out_desc, out_scales, num_rows,
        **launch.constants,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )  # fmt: skip


def matmul_wide(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    *,
    overlap: bool = True,
    tile: WideTile = WideTile(),
) -> Tensor:
    """``x @ weight.T``, rounded to bfloat16; one launch.

    Args:
        x: of ``[M, K]``, on a Hopper GPU.
        weight: e4m3 ``[N, K]``, contiguous.
        scales: float32 ``[N / 128, K / 128]``.
        overlap: whether to start before the kernel before has ended, and wait for it there.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: the shape does not suit the kernel.
    """
    out = torch.empty(len(x.values), len(weight), dtype=torch.bfloat16, device=weight.device)
    _launch(x, weight, scales, out, x.scales, False, overlap, tile)
    return out


def gated_matmul(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    *,
    overlap: bool = True,
    tile: WideTile = WideTile(),
) -> QuantizedRows:
    """:func:`..fused.quantize_rows.act_mul_quantize` of the halves of :func:`matmul_wide`, with
    silu, of a weight ``[2 N, K]`` (gate, then up); one launch."""
    out = empty_rows(len(x.values), len(weight) // 2, weight.device)
    _launch(x, weight, scales, out.values, out.scales, True, overlap, tile)
    return out
