"""Matmul ``x @ weight.T`` in Triton with a weight in 4 or 8 bits, unpacked on the way.

A weight's values are ``(q - zero) * scale`` or ``q * scale + minimum`` in float32, by groups of 32,
64 or 128 inputs, rounded once to the dtype of x: what :func:`dequantize` stores, and what a model
of that dtype would hold. They are multiplied on the matrix units as in :mod:`.matmul`: one float32
accumulator per output that runs over K from 0 to its end, whatever the tile and the number of
rows. So the bits are those of a plain matmul with the dequantised weight.

Values lie in the order in which the matrix unit wants its right operand in registers, so that what
a thread loads in 16 bytes is what it multiplies with (the layout of Marlin, Frantar et al. 2024, is
made so)::

    int32 word [n, chunk of 128 inputs, t, b]     t < 4 lanes, b < 4 (4 bits) or 8 (8 bits)
    field lo * H + h of a word is input           b * 8 H + h * 8 + 2 t + lo,  H = 4 or 2, lo < 2
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import has_dependent_launch
from ..fused.rounding import EMULATE, rounded
from .matmul import Tile, _add_bias, _silu_mul

CHUNK = 128
"""Inputs are padded to a multiple of this."""
_LANES = 4


class PackedWeight(NamedTuple):
    """A weight ``[N, K]`` as the kernels here read it; K padded to C chunks of 128 inputs.

    Attributes:
        words: int32 ``[N, C * 16]`` of 4 bits, ``[N, C * 32]`` of 8.
        scales: float16, bfloat16 or float32 ``[C * 128 / group, N]``.
        offsets: zero points or minima, as scales; empty if all zero points are in the middle.
        num_bits: 4 or 8. group: 32, 64 or 128 inputs, which share a scale.
        has_minima: whether ``offsets`` are minima.
    """

    words: Tensor
    scales: Tensor
    offsets: Tensor
    num_bits: int
    group: int
    has_minima: bool


def pack_words(values: Tensor, num_bits: int) -> Tensor:
    """The words of values ``[N, K]``, uint8."""
    num_outs, num_inputs = values.shape
    values = torch.nn.functional.pad(values, (0, -num_inputs % CHUNK))
    high = 16 // num_bits  # H
    # n, chunk, b, h, t, lo
    fields = values.view(num_outs, -1, CHUNK // (8 * high), high, _LANES, 2)
    fields = fields.permute(0, 1, 4, 2, 5, 3).flatten(-2)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int64, device=values.device)
    for place in range(2 * high):
        words |= fields[..., place].long() << num_bits * place
    # As the same bits, signed.
    return ((words + 2**31) % 2**32 - 2**31).int().flatten(1)


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    words,  # int32 [OUTS, BLOCK_K / fields of a word]
    scales,  # [GROUPS, OUTS]
    offsets,  # the same, or None
    OUTS: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    HAS_MINIMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The weights ``[OUTS, BLOCK_K]`` of a tile."""
    FIELDS: tl.constexpr = 32 // BITS
    HIGH: tl.constexpr = FIELDS // 2
    CHUNKS: tl.constexpr = BLOCK_K // 128
    words = tl.reshape(words, (OUTS, CHUNKS, 4, 16 // HIGH, 1))
    shifts = tl.reshape(tl.arange(0, FIELDS) * BITS, (1, 1, 1, 1, FIELDS))
    values = (words >> shifts) & ((1 << BITS) - 1)
    values = tl.reshape(values, (OUTS, CHUNKS, 4, 16 // HIGH, 2, HIGH))
    values = tl.permute(values, (0, 1, 3, 5, 2, 4))
    values = tl.reshape(values, (OUTS, GROUPS, BLOCK_K // GROUPS)).to(tl.float32)
    scales = tl.expand_dims(tl.trans(scales.to(tl.float32)), 2)
    if offsets is None:
        values = (values - (1 << (BITS - 1))) * scales
    else:
        offsets = tl.expand_dims(tl.trans(offsets.to(tl.float32)), 2)
        if HAS_MINIMA:
            values = tl.fma(
                values,
                tl.broadcast_to(scales, values.shape),
                tl.broadcast_to(offsets, values.shape),
            )
        else:
            values = (values - offsets) * scales
    values = tl.reshape(values, (OUTS, BLOCK_K))
    # NumPy knows no bfloat16.
    return rounded(values, DTYPE) if EMULATE else values.to(DTYPE)


@triton.jit
def _load_tile(  # type: ignore[no-untyped-def]
    words, scales, offsets, begin_n, begin,
    N: tl.constexpr, ALL: tl.constexpr, K_WORDS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, HAS_MINIMA: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The weights ``[BLOCK_N, BLOCK_K]`` of the outputs from ``begin_n`` on, of ``ALL``, and of the
    inputs from ``begin`` on; zeros beyond the last one."""
    WORDS: tl.constexpr = BLOCK_K * BITS // 32
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    n = begin_n + tl.arange(0, BLOCK_N)
    if N % BLOCK_N:
        # What is computed beyond the end is not stored.
        n = tl.minimum(n, ALL - 1)
    w = begin * BITS // 32 + tl.arange(0, WORDS)
    g = begin // GROUP + tl.arange(0, GROUPS)
    words_at = words + n.to(tl.int64)[:, None] * K_WORDS + w[None, :]
    numbers_at = g[:, None] * ALL + n[None, :]
    ALL_GROUPS: tl.constexpr = K_WORDS * 32 // BITS // GROUP
    if K_WORDS % WORDS:
        loaded = tl.load(words_at, mask=(w < K_WORDS)[None, :], other=0)
        mask = (g < ALL_GROUPS)[:, None]
        own_scales = tl.load(scales + numbers_at, mask=mask, other=0.0)
    else:
        loaded = tl.load(words_at)
        own_scales = tl.load(scales + numbers_at)
    own_offsets = None
    if offsets is not None:
        if K_WORDS % WORDS:
            own_offsets = tl.load(offsets + numbers_at, mask=mask, other=0.0)
        else:
            own_offsets = tl.load(offsets + numbers_at)
    return _weights(loaded, own_scales, own_offsets, BLOCK_N, BLOCK_K, GROUPS, BITS, HAS_MINIMA,
                    DTYPE)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def int4_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_rows, K]
    words, scales, offsets,  # of a PackedWeight; offsets or None
    bias,  # [N] or [2 N], or None
    out,  # [num_rows, N], contiguous
    num_rows,
    x_stride,
    N: tl.constexpr, K: tl.constexpr, K_WORDS: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, HAS_MINIMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T + bias``, with a gate ``silu(gate) * up`` of its two halves.

    Grid: tiles of BLOCK_M rows by BLOCK_N outputs; each sums over K in order, without split-K.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    ALL: tl.constexpr = 2 * N if HAS_GATE else N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_tiles_m = tl.cdiv(num_rows, BLOCK_M)
    begin_m = tl.program_id(0) % num_tiles_m * BLOCK_M
    begin_n = tl.program_id(0) // num_tiles_m * BLOCK_N
    m = begin_m + tl.arange(0, BLOCK_M)
    is_row = m[:, None] < num_rows
    k = tl.arange(0, BLOCK_K)
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, K, BLOCK_K):
        if K % BLOCK_K:
            rows = tl.load(x_at + begin, mask=is_row & (begin + k < K)[None, :], other=0.0)
        else:
            rows = tl.load(x_at + begin, mask=is_row, other=0.0)
        if EMULATE:
            rows = rows.to(tl.float32)
        weights = _load_tile(words, scales, offsets, begin_n, begin, N, ALL, K_WORDS, BLOCK_N,
                             BLOCK_K, GROUP, BITS, HAS_MINIMA, DTYPE)  # fmt: skip
        total = tl.dot(rows, tl.trans(weights), total)
        if HAS_GATE:
            ups = _load_tile(words, scales, offsets, begin_n + N, begin, N, ALL, K_WORDS,
                             BLOCK_N, BLOCK_K, GROUP, BITS, HAS_MINIMA, DTYPE)  # fmt: skip
            up_total = tl.dot(rows, tl.trans(ups), up_total)
    n = begin_n + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, N - 1)
    if bias is not None:
        total = _add_bias(total, tl.load(bias + n_read)[None, :])
    result = total.to(out.dtype.element_ty)
    if HAS_GATE:
        if bias is not None:
            up_total = _add_bias(up_total, tl.load(bias + n_read + N)[None, :])
        result = _silu_mul(result, up_total.to(out.dtype.element_ty))
    target = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, result, mask=is_row & (n < N)[None, :])


@triton.jit
def dequantize_kernel(  # type: ignore[no-untyped-def]
    words, scales, offsets,
    out,  # [N, K], contiguous
    N: tl.constexpr, K: tl.constexpr, K_WORDS: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, HAS_MINIMA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of BLOCK_N outputs by BLOCK_K inputs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.program_id(0) % tl.cdiv(K, BLOCK_K) * BLOCK_K
    begin_n = tl.program_id(0) // tl.cdiv(K, BLOCK_K) * BLOCK_N
    weights = _load_tile(words, scales, offsets, begin_n, begin, N, N, K_WORDS, BLOCK_N,
                         BLOCK_K, GROUP, BITS, HAS_MINIMA, out.dtype.element_ty)  # fmt: skip
    n = begin_n + tl.arange(0, BLOCK_N)
    k = begin + tl.arange(0, BLOCK_K)
    mask = (n < N)[:, None] & (k < K)[None, :]
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], weights, mask=mask)


def _constants(weight: PackedWeight, num_outs: int, num_inputs: int) -> dict[str, object]:
    return {
        "N": num_outs,
        "K": num_inputs,
        "K_WORDS": weight.words.shape[1],
        "GROUP": weight.group,
        "BITS": weight.num_bits,
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
        weight: of ``[N, K]``, or ``[2 N, K]`` (gate, then up) with a gate.
        bias: ``[N]`` (``[2 N]``), or None; added before rounding.
        tile: sizes, without influence on the result; ``block_k`` is a multiple of 128.
        has_gate: whether to return ``silu(gate) * up`` of the two halves, as :func:`.matmul.matmul`
            does.

    Returns:
        ``[M, N]``, contiguous.
    """
    num_rows, width = x.shape
    num_outs = len(weight.words) // (2 if has_gate else 1)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(num_rows, num_outs)
    if num_rows == 0:
        return out
    pdl = has_dependent_launch(x.device)
    grid = (triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outs, tile.block_n),)
    int4_kernel[grid](
        x, weight.words, weight.scales, weight.offsets if weight.offsets.numel() else None,
        bias, out, num_rows, x.stride(0),
        **_constants(weight, num_outs, width),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        HAS_GATE=has_gate,
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def dequantize(weight: PackedWeight, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """``[N, K]``, contiguous; what :func:`matmul` multiplies rows of this dtype with."""
    num_outs = len(weight.words)
    out = torch.empty(num_outs, num_inputs, dtype=dtype, device=weight.words.device)
    pdl = has_dependent_launch(out.device)
    block_n, block_k = 32, 256
    grid = (triton.cdiv(num_outs, block_n) * triton.cdiv(num_inputs, block_k),)
    dequantize_kernel[grid](
        weight.words, weight.scales, weight.offsets if weight.offsets.numel() else None, out,
        **_constants(weight, num_outs, num_inputs),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
