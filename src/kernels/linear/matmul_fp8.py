"""Batch-invariant matmul of FP8 rows and an FP8 weight with float32 scales, in Triton.

``out[m, n] = sum over groups g of 128 inputs, in order, of
x_scale[m, g] * w_scale[n, g] * (sum over k in g of x[m, k] * weight[n, k])``

Rows are quantised by :func:`quantize_rows` first: e4m3, a scale for each token and 128 channels,
computed from those alone. A group is one ``tl.dot``, which begins from zero; its result, times both
scales, is added to a float32 accumulator, group after group. No tile splits K, and a group is a
group for any number of rows, so few rows and many have one order of summation. What is left to the
hardware is the order within a group: it has to be compared on each GPU, between the tiles in use,
as :func:`.plan.sweep` does for 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fused.rounding import EMULATE
from .fp8 import BLOCK, Fp8Weight
from .matmul import Tile

_LARGEST = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
GROUP = tl.constexpr(BLOCK)
FEW_ROWS = Tile(block_m=16, block_n=64, block_k=BLOCK, num_stages=4, num_warps=4, swap_ab=True)
MANY_ROWS = Tile(block_m=128, block_n=128, block_k=BLOCK, num_stages=4, num_warps=8)


@triton.jit
def _nearest_e4m3(x):  # type: ignore[no-untyped-def]
    """Bits, uint8, of the nearest e4m3 to float32 ``x`` of up to 448, ties to even.

    The interpreter, which cuts off, gets it by hand: added to ``x``, a power of two 20 bits above
    the last digit that stays rounds all others away.
    """
    if EMULATE:
        size = tl.abs(x)
        exponent = tl.maximum((size.to(tl.uint32, bitcast=True) >> 23).to(tl.int32), 121)
        digit = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
        size = (size + digit) - digit
        bits = size.to(tl.uint32, bitcast=True).to(tl.int32)
        normal = (bits >> 20) - (120 << 3)
        tiny = (size * 512.0).to(tl.int32)
        found = tl.where(size < 0.015625, tiny, normal)
        return (found | tl.where(x < 0, 128, 0)).to(tl.uint8)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_rows, K]
    values,  # uint8 [num_rows, K]
    scales,  # float32 [num_rows, groups]
    x_stride,
    K: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid: rows by groups."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = group * GROUP + tl.arange(0, GROUP)
    is_in = k < K
    numbers = tl.load(x + row * x_stride + k, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(numbers)), _LARGEST), _SMALLEST_SCALE)
    tl.store(scales + row * GROUPS + group, scale)
    bits = _nearest_e4m3(tl.div_rn(numbers, scale + tl.zeros_like(numbers)))
    tl.store(values + row * K + k, bits, mask=is_in)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 bits, uint8 ``[M, K]``, and scales, float32 ``[M, ceil(K / 128)]``, of ``x [M, K]``,
    whose rows may be strided."""
    num_rows, width = x.shape
    groups = triton.cdiv(width, BLOCK)
    values = torch.empty(num_rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, groups, dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    if num_rows:
        _quantize_rows_kernel[(num_rows, groups)](
            x, values, scales, x.stride(0), K=width, GROUPS=groups, num_warps=1
        )
    return values, scales


@triton.jit
def _loaded(at, mask):  # type: ignore[no-untyped-def]
    """e4m3 numbers; zeros where not in ``mask``. The interpreter multiplies no FP8."""
    numbers = tl.load(at, mask=mask, other=0).to(tl.float8e4nv, bitcast=True)
    if EMULATE:
        numbers = numbers.to(tl.float32)
    return numbers


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_kernel(  # type: ignore[no-untyped-def]
    x,  # uint8 [num_rows, K]
    x_scales,  # float32 [num_rows, ceil(K / 128)]
    weight,  # uint8 [N, K]
    w_scales,  # float32 [N, ceil(K / 128)] or [N, 1]
    bias,  # [N], or None
    out,  # [num_rows, N]
    num_rows,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, W_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of BLOCK_M rows by BLOCK_N outputs; each sums over all groups in order."""
    num_tiles_m = tl.cdiv(num_rows, BLOCK_M)
    m = tl.program_id(0) % num_tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // num_tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = m < num_rows, n < N
    k = tl.arange(0, GROUP)
    x_at = x + m.to(tl.int64)[:, None] * K + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    side: tl.constexpr = 1 if SWAP else 0  # along which rows of x lie no longer
    ROWS: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    COLUMNS: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, K, GROUP):
        in_k = (begin + k < K)[None, :]
        rows = _loaded(x_at + begin, is_row[:, None] & in_k)
        weights = _loaded(w_at + begin, is_output[:, None] & in_k)
        if SWAP:
            part = tl.dot(weights, tl.trans(rows), out_dtype=tl.float32)
        else:
            part = tl.dot(rows, tl.trans(weights), out_dtype=tl.float32)
        of_rows = tl.load(x_scales + m * GROUPS + begin // GROUP, mask=is_row, other=0.0)
        of_outputs_at = w_scales + n * W_GROUPS
        if W_GROUPS > 1:
            of_outputs_at += begin // GROUP
        of_outputs = tl.load(of_outputs_at, mask=is_output, other=0.0)
        scales = tl.expand_dims(of_rows, 1 - side) * tl.expand_dims(of_outputs, side)
        total = tl.fma(part, scales, total)
    if bias is not None:
        addend = tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
        total += tl.expand_dims(addend, side)
    m_out, n_out = tl.expand_dims(m, 1 - side), tl.expand_dims(n, side)
    target = out + m_out.to(tl.int64) * N + n_out
    tl.store(target, total.to(out.dtype.element_ty), mask=(m_out < num_rows) & (n_out < N))


def matmul_fp8(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None = None, *, tile: Tile | None = None
) -> Tensor:
    """``x @ weight.T + bias`` of rows quantised here, rounded to the dtype of x.

    Args:
        x: ``[M, K]``. Rows may be strided. weight: of ``[N, K]``. bias: ``[N]`` or None.
        tile: block_k is 128 in any; None for one by the number of rows.

    Returns:
        ``[M, N]``, contiguous.
    """
    num_rows, width = x.shape
    num_outs = weight.values.shape[0]
    out = x.new_empty(num_rows, num_outs)
    if num_rows == 0:
        return out
    tile = tile or (FEW_ROWS if num_rows <= FEW_ROWS.block_m else MANY_ROWS)
    values, scales = quantize_rows(x)
    grid = (triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outs, tile.block_n),)
    _fp8_kernel[grid](
        values, scales, weight.values, weight.scales, bias, out, num_rows,
        N=num_outs,
        K=width,
        GROUPS=scales.shape[1],
        W_GROUPS=weight.scales.shape[1],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SWAP=tile.swap_ab,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return out
