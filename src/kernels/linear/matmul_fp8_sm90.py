"""Matmul of FP8 rows and an FP8 weight on a Hopper GPU: one of three kernels, by the tile.

All have the bits of :mod:`.matmul_fp8`. They take weights whose outputs share their scales by
whole blocks of 128, or have one scale for all inputs each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import Gpu
from ..fused.quantize_rows import QuantizedRows
from .matmul_fp8_sm90_few import few_rows_kernel
from .matmul_fp8_sm90_launch import FewTile, ManyTile, RoundingTile, plan_launch
from .matmul_fp8_sm90_many import many_rows_kernel
from .matmul_fp8_sm90_rounding import MAX_ROWS, rounding_kernel


def matmul(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    *,
    shared: int,
    tile: FewTile | ManyTile,
    has_gate: bool = False,
    overlap: bool = True,
) -> Tensor:
    """``x @ weight.T``, rounded to bfloat16; one launch.

    Args:
        x: of ``[M, K]``, on a Hopper GPU.
        weight: e4m3 ``[N, K]``, or ``[2 N, K]`` (gate, then up) with a gate; contiguous. Not
            written by the kernels before, as far as they have not ended when the last one begins.
        scales: float32 ``[N / 128, K / 128]`` with ``shared`` 128, or ``[ceil(N / shared), 1]``.
        tile: one that fits the shape.
        has_gate: whether to return ``silu(gate) * up``, each operation rounded; of few rows.
        overlap: whether to start before the kernel before has ended.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: the tile does not fit.
    """
    num_rows, k_size = x.values.shape
    num_outs = len(weight) // (2 if has_gate else 1)
    out = torch.empty(num_rows, num_outs, dtype=torch.bfloat16, device=weight.device)
    if num_rows == 0:
        return out
    num_sms = Gpu.of(weight.device).num_sms
    launch = plan_launch(
        num_rows, num_outs, k_size, scales.shape[1], shared, tile, overlap, num_sms, has_gate
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


def round_matmul(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    *,
    shared: int,
    tile: RoundingTile,
    overlap: bool = True,
) -> Tensor:
    """:func:`matmul` of rows that are rounded in it; one launch.

    Args:
        x: bfloat16 ``[M, K]``, M at most :data:`.matmul_fp8_sm90_rounding.MAX_ROWS`; rows may be
            strided.

    Raises:
        ValueError: too many rows, or the tile does not fit.
    """
    num_rows, k_size = x.shape
    num_outs = len(weight)
    if not 0 < num_rows <= MAX_ROWS:
        raise ValueError(f"{num_rows} rows; must be from 1 to {MAX_ROWS}")
    launch = plan_launch(num_rows, num_outs, k_size, scales.shape[1], shared, tile, overlap, 1)
    out = torch.empty(num_rows, num_outs, dtype=torch.bfloat16, device=weight.device)
    rounding_kernel[(launch.num_programs,)](
        x, launch.describe_weight(weight), scales, out, num_rows, x.stride(0), **launch.constants,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )  # fmt: skip
    return out
