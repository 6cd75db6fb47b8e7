"""Matmul of FP8 rows and an FP8 weight on a Hopper GPU: one of two kernels, by the tile.

Both have the bits of :mod:`.matmul_fp8`. They take weights whose outputs share their scales by
whole blocks of 128, or have one scale for all inputs each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import Gpu
from ..fused.e4m3_groups import QuantizedRows
from .matmul_fp8_sm90_few import few_rows_kernel
from .matmul_fp8_sm90_launch import FewTile, ManyTile, plan_launch
from .matmul_fp8_sm90_many import many_rows_kernel


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
