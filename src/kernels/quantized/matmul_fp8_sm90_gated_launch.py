"""Launch of the Hopper FP8 matmul with a gate that quantises: descriptors, grid, constants."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device import count_sms
from ..fused.e4m3_groups import GROUP, QuantizedRows, empty_rows
from .matmul_fp8_sm90_gated import gated_rows_kernel
from .matmul_fp8_sm90_launch import ManyTile

NUM_WARPS = 4  # of the first warpgroup; the others are its workers
X_BOX = [64, GROUP]  # of a warpgroup
WEIGHT_BOX = [2, 64, GROUP]
OUT_BOX = [64, GROUP]  # of a warpgroup


def layout_of(box: list[int]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, 8, len(box))


def constants_of(num_outs: int, k_size: int, tile: ManyTile, overlap: bool) -> dict[str, object]:
    """Nothing in them depends on the number of rows.

    Raises:
        ValueError: the shape does not suit the kernel.
    """
    if num_outs % GROUP or tile.part != GROUP or not tile.fits(num_outs, k_size):
        raise ValueError(f"a weight of {2 * num_outs} x {k_size} does not suit {tile}")
    return {
        "N": num_outs,
        "K": k_size,
        "X_ROWS": tile.x_rows,
        "STAGES": tile.stages,
        "PDL": overlap,
    }


def gated_matmul(
    x: QuantizedRows, weight: Tensor, scales: Tensor, *, tile: ManyTile, overlap: bool = True
) -> QuantizedRows:
    """``silu(gate) * up`` of the halves of ``x @ weight.T``, every operation rounded to bfloat16,
    quantised; one launch.

    Args:
        x: of ``[M, K]``, on a Hopper GPU.
        weight: e4m3 ``[2 N, K]`` (gate, then up), contiguous.
        scales: float32 ``[2 N / 128, K / 128]``.
        tile: of 128 outputs, that fits the shape.
        overlap: whether to start before the kernel before has ended, and wait for it there.

    Returns:
        Of ``[M, N]``: the bits of :func:`..fused.quantize_rows.act_mul_quantize`.

    Raises:
        ValueError: the tile does not fit.
    """
    (num_rows, k_size), num_outs = x.values.shape, len(weight) // 2
    constants = constants_of(num_outs, k_size, tile, overlap)
    out = empty_rows(num_rows, num_outs, weight.device)
    if num_rows == 0:
        return out
    x_desc = TensorDescriptor(x.values, [num_rows, k_size], [k_size, 1], X_BOX, layout_of(X_BOX))
    w_desc = TensorDescriptor(
        weight, [2, num_outs, k_size], [num_outs * k_size, k_size, 1],
        WEIGHT_BOX, layout_of(WEIGHT_BOX),
    )  # fmt: skip
    out_desc = TensorDescriptor(
        out.values, [num_rows, num_outs], [num_outs, 1], OUT_BOX, layout_of(OUT_BOX)
    )
    num_tiles = -(-num_rows // tile.x_rows) * (num_outs // GROUP)
    gated_rows_kernel[(min(num_tiles, count_sms(weight.device)),)](
        x_desc, w_desc, out_desc, x.scales, scales, out.scales, num_rows,
        **constants,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )  # fmt: skip
    return out
