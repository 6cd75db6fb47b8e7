"""Batch-invariant matmul of FP8 rows and an FP8 weight with float32 scales, in Triton.

``out[m, n] = sum over groups g of 128 inputs, in order, of
x_scale[m, g] * w_scale[n, g] * (sum over k in g of x[m, k] * weight[n, k])``

A group is one ``tl.dot`` that begins from zero. Its result, times both scales, is added to a
float32 accumulator, group by group, with one rounding. If a weight has one scale for all inputs,
the whole sum is multiplied by that scale instead. No tile splits K, and groups do not depend on the
number of rows, so few rows and many have the same order of summation. The hardware determines the
order within a group. So every tile uses the warpgroup instruction (wgmma), which has at least 64
rows on its left. With ``swap_ab`` those are outputs.

The method is that of DeepSeek-V3 (arXiv 2412.19437, section 3.3). Float32 sums over groups of 128
compensate for the lower precision of the matrix unit's FP8 accumulation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...device import overlap_options
from ...fused.e4m3_groups import GROUP, QuantizedRows
from ...fused.rounding import EMULATE
from ..matmul import Tile, load_tile, place_of_tile

_GROUP = tl.constexpr(GROUP)


@triton.jit
def _operand(loaded):  # type: ignore[no-untyped-def]
    """An e4m3 operand of tl.dot. The interpreter cannot multiply FP8, so there the bits are
    converted first."""
    if EMULATE:
        loaded = loaded.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return loaded


@triton.jit(do_not_specialize=["num_rows"])
def fp8_kernel(  # type: ignore[no-untyped-def]
    x,  # e4m3 [num_rows, K]
    weight,  # e4m3 [N, K]
    x_tiles,  # descriptors of the two, or None
    weight_tiles,
    x_scales,  # float32 [ceil(K / 128), num_rows]
    w_scales,  # float32 [ceil(N / SHARED), ceil(K / 128) or 1]
    bias,  # [N], or None
    out,  # [num_rows, N]
    num_rows,
    N: tl.constexpr, K: tl.constexpr,
    W_GROUPS: tl.constexpr,  # columns of w_scales
    SHARED: tl.constexpr,  # outputs that share a row of w_scales
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: one program per tile of BLOCK_M rows by BLOCK_N outputs. Each sums over all groups in
    order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin_m, begin_n = place_of_tile(num_rows, BLOCK_M, BLOCK_N, x_tiles is not None)
    m = begin_m + tl.arange(0, BLOCK_M)
    n = begin_n + tl.arange(0, BLOCK_N)
    is_row, is_output = m < num_rows, n < N
    k = tl.arange(0, _GROUP)
    x_at = x + m.to(tl.int64)[:, None] * K + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    # If all outputs of a tile share their scales, one scale is loaded.
    IS_ONE: tl.constexpr = SHARED % BLOCK_N == 0
    if IS_ONE:
        w_scales_at = w_scales + begin_n // SHARED * W_GROUPS
    else:
        w_scales_at = w_scales + tl.minimum(n, N - 1) // SHARED * W_GROUPS
    side: tl.constexpr = 1 if SWAP else 0  # the other dimension than that of x's rows
    ROWS: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    COLUMNS: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, K, _GROUP):
        in_k = (begin + k < K)[None, :]
        rows = load_tile(x_tiles, begin_m, begin, x_at, is_row[:, None] & in_k, True)
        w_mask = is_output[:, None] & in_k
        weights = load_tile(weight_tiles, begin_n, begin, w_at, w_mask, True)
        if SWAP:
            part = tl.dot(_operand(weights), tl.trans(_operand(rows)), out_dtype=tl.float32)
        else:
            part = tl.dot(_operand(rows), tl.trans(_operand(weights)), out_dtype=tl.float32)
        group = begin // _GROUP
        scales = tl.load(x_scales + group * num_rows + m, mask=is_row, other=0.0)
        if W_GROUPS == 1:
            scales = tl.expand_dims(scales, 1 - side)
        elif IS_ONE:
            scales = tl.expand_dims(scales * tl.load(w_scales_at + group), 1 - side)
        else:
            of_outputs = tl.load(w_scales_at + group)
            scales = tl.expand_dims(scales, 1 - side) * tl.expand_dims(of_outputs, side)
        total = tl.fma(part, tl.broadcast_to(scales, (ROWS, COLUMNS)), total)
    if W_GROUPS == 1:
        of_outputs = tl.load(w_scales + tl.minimum(n, N - 1) // SHARED)
        total *= tl.expand_dims(of_outputs, side)
    if bias is not None:
        addend = tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
        total += tl.expand_dims(addend, side)
    m_out, n_out = tl.expand_dims(m, 1 - side), tl.expand_dims(n, side)
    target = out + m_out.to(tl.int64) * N + n_out
    tl.store(target, total.to(out.dtype.element_ty), mask=(m_out < num_rows) & (n_out < N))


def matmul(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    shared: int,
    tile: Tile,
) -> Tensor:
    """``x @ weight.T + bias``, rounded to ``dtype``; one launch, any number of rows.

    Args:
        x: quantised rows ``[M, K]``.
        weight: e4m3 ``[N, K]``, contiguous, of the same type as x.
        scales: float32 ``[ceil(N / shared), ceil(K / 128)]``, or ``[ceil(N / shared), 1]``.
        bias: ``[N]`` or None; added before rounding.
        shared: outputs that share a row of ``scales``.
        tile: tile sizes; ``block_k`` must be 128.

    Returns:
        ``[M, N]``, contiguous.
    """
    num_rows, width = x.values.shape
    num_outs = len(weight)
    out = torch.empty(num_rows, num_outs, dtype=dtype, device=weight.device)
    if num_rows == 0:
        return out
    x_tiles = weight_tiles = None
    if width % 16 == 0 and weight.data_ptr() % 16 == 0:
        x_tiles = TensorDescriptor.from_tensor(x.values, [tile.block_m, GROUP])
        weight_tiles = TensorDescriptor.from_tensor(weight, [tile.block_n, GROUP])
    grid = (triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outs, tile.block_n),)
    fp8_kernel[grid](
        x.values, weight, x_tiles, weight_tiles, x.scales, scales, bias, out, num_rows,
        N=num_outs, K=width, W_GROUPS=scales.shape[1], SHARED=shared,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SWAP=tile.swap_ab,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        enable_fp_fusion=False,  # the code above states where one rounding is meant
        **overlap_options(weight.device),
    )  # fmt: skip
    return out
