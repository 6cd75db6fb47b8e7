"""Matmul ``x @ weight.T`` in Triton with a 4-bit or 8-bit weight that the kernel unpacks.

A weight has the values ``(q - zero) * scale`` or ``q * scale + minimum`` in float32, with groups of
32, 64 or 128 inputs, rounded once to the dtype of x. These are the values that :func:`dequantize`
stores, and that a model of that dtype would have. The matrix units multiply them as in
:mod:`..matmul`: one float32 accumulator per output runs over K from 0 to its end, whatever the tile
and the number of rows. So the bits are those of a plain matmul with the dequantised weight.

Values are stored in the order in which the matrix unit takes its right operand from registers
(:mod:`.int4_packing`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import overlap_options
from ...fused.rounding import EMULATE
from ..matmul import Tile, finished, place_of_tile
from .int4_packing import PackedWeight
from .int4_unpacking import load_chunk


@triton.jit(do_not_specialize=["num_rows"])
def int4_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_rows, K]
    words, numbers,  # of a PackedWeight
    bias,  # [N] or [2 N], or None
    out,  # [num_rows, N], contiguous
    num_rows,
    x_stride,
    N: tl.constexpr, K: tl.constexpr, K_WORDS: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, HAS_MINIMA: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T + bias``, with a gate ``silu(gate) * up`` of its two halves.

    Grid: one program per tile of BLOCK_M rows by BLOCK_N outputs. Each sums over K in order,
        without split-K.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    ALL: tl.constexpr = 2 * N if HAS_GATE else N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin_m, begin_n = place_of_tile(num_rows, BLOCK_M, BLOCK_N, False)
    m = begin_m + tl.arange(0, BLOCK_M)
    is_row = m[:, None] < num_rows
    CHUNK: tl.constexpr = 16 * 32 // BITS
    k = tl.arange(0, CHUNK)
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        for chunk in tl.static_range(BLOCK_K // CHUNK):
            begin = first + chunk * CHUNK
            x_mask = is_row & (begin + k < K)[None, :] if K % BLOCK_K else is_row
            rows = tl.load(x_at + begin, mask=x_mask, other=0.0)
            if EMULATE:
                rows = rows.to(tl.float32)
            weights = load_chunk(
                words, numbers, begin_n, begin, N, ALL, K_WORDS, BLOCK_N, BLOCK_K, GROUP, BITS,
                NUMBERS, HAS_MINIMA, DTYPE,
            )  # fmt: skip
            total = tl.dot(rows, weights, total)
            if HAS_GATE:
                ups = load_chunk(
                    words, numbers, begin_n + N, begin, N, ALL, K_WORDS, BLOCK_N, BLOCK_K, GROUP,
                    BITS, NUMBERS, HAS_MINIMA, DTYPE,
                )  # fmt: skip
                up_total = tl.dot(rows, ups, up_total)
    n = begin_n + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, N - 1)
    result = finished(total, up_total, bias, n_read, N, 0, HAS_GATE, out.dtype.element_ty)
    target = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, result, mask=is_row & (n < N)[None, :])


@triton.jit
def dequantize_kernel(  # type: ignore[no-untyped-def]
    words, numbers,  # of a PackedWeight
    out,  # [N, K], contiguous
    N: tl.constexpr, K: tl.constexpr, K_WORDS: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, HAS_MINIMA: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: one program per tile of BLOCK_N outputs by a chunk of inputs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    CHUNK: tl.constexpr = 16 * 32 // BITS
    begin = tl.program_id(0) % tl.cdiv(K, CHUNK) * CHUNK
    begin_n = tl.program_id(0) // tl.cdiv(K, CHUNK) * BLOCK_N
    weights = load_chunk(words, numbers, begin_n, begin, N, N, K_WORDS, BLOCK_N, CHUNK,
                          GROUP, BITS, NUMBERS, HAS_MINIMA, out.dtype.element_ty)  # fmt: skip
    n = begin_n + tl.arange(0, BLOCK_N)
    k = begin + tl.arange(0, CHUNK)
    mask = (n < N)[:, None] & (k < K)[None, :]
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], tl.trans(weights), mask=mask)


def _constants(weight: PackedWeight, num_outs: int, num_inputs: int) -> dict[str, object]:
    return {
        "N": num_outs,
        "K": num_inputs,
        "K_WORDS": weight.words.shape[1],
        "GROUP": weight.group,
        "BITS": weight.num_bits,
        "NUMBERS": weight.dtype,
        "HAS_MINIMA": weight.has_minima,
    }


def matmul(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    tile: Tile,
    has_gate: bool = False,
) -> Tensor:
    """``x @ weight.T + bias``, rounded; one launch, any number of rows.

    Args:
        x: ``[M, K]``, bfloat16 or float16. Rows may be strided.
        weight: packed ``[N, K]``, or ``[2 N, K]`` (gate, then up) with a gate.
        bias: ``[N]`` (``[2 N]``), or None; added before rounding.
        tile: sizes, which do not affect the result. ``block_k`` is all of K, or a multiple of 128;
            that much is in flight at once.
        has_gate: whether to return ``silu(gate) * up`` of the two halves, as
            :func:`..matmul.matmul` does.

    Returns:
        ``[M, N]``, contiguous.
    """
    num_rows, width = x.shape
    padded = weight.words.shape[1] * 32 // weight.num_bits
    num_outs = len(weight.words) // (2 if has_gate else 1)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(num_rows, num_outs)
    if num_rows == 0:
        return out
    grid = (triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outs, tile.block_n),)
    int4_kernel[grid](
        x, weight.words, weight.numbers,
        bias, out, num_rows, x.stride(0),
        **_constants(weight, num_outs, width),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=min(tile.block_k, padded),
        HAS_GATE=has_gate, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **overlap_options(x.device),
    )  # fmt: skip
    return out


def dequantize(weight: PackedWeight, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """The weight ``[N, K]``, contiguous, with which :func:`matmul` multiplies rows of ``dtype``."""
    num_outs = len(weight.words)
    out = torch.empty(num_outs, num_inputs, dtype=dtype, device=weight.words.device)
    block_n, chunk = 64, 16 * 32 // weight.num_bits
    grid = (triton.cdiv(num_outs, block_n) * triton.cdiv(num_inputs, chunk),)
    dequantize_kernel[grid](
        weight.words, weight.numbers, out,
        **_constants(weight, num_outs, num_inputs),
        BLOCK_N=block_n,
        num_warps=4,
        **overlap_options(out.device),
    )  # fmt: skip
    return out
