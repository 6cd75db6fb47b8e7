"""Matmul ``x @ weight.T`` in Triton with a weight in 4 or 8 bits, unpacked on the way.

A weight's values are ``(q - zero) * scale`` or ``q * scale + minimum`` in float32, by groups of 32,
64 or 128 inputs, rounded once to the dtype of x: what :func:`dequantize` stores, and what a model
of that dtype would hold. They are multiplied on the matrix units as in :mod:`.matmul`: one float32
accumulator per output that runs over K from 0 to its end, whatever the tile and the number of
rows. So the bits are those of a plain matmul with the dequantised weight.

Values lie in the order in which the matrix unit wants its right operand in registers, so that what
a thread loads in 16 bytes is what it multiplies with (the layout of Marlin, Frantar et al. 2024, is
made so)::

    int32 word [n, chunk of 16 words, t, b]       t < 4 lanes, b < 4
    field lo * H + h of it is the chunk's input   b * 8 H + h * 8 + 2 t + lo
                                                  H = 4 (4 bits) or 2 (8 bits), h < H, lo < 2
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

PADDING = 128
"""K is padded to a multiple of this."""


class PackedWeight(NamedTuple):
    """A weight ``[N, K]`` as the kernels here read it, padded to ``[N, P]``.

    Attributes:
        words: int32 ``[N, P * num_bits / 32]``.
        numbers: int32 ``[P / group, N]``, a scale's bits below those of a zero point or minimum,
            both float16 or bfloat16; or float32 ``[2, P / group, N]``, scales first.
        num_bits: 4 or 8. group: 32, 64 or 128 inputs, which share a scale.
        dtype: of the numbers, "float16", "bfloat16" or "float32".
        has_minima: whether they are minima, not zero points.
    """

    words: Tensor
    numbers: Tensor
    num_bits: int
    group: int
    dtype: str
    has_minima: bool


def pack_numbers(scales: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of scales and offsets ``[G, N]``."""
    if dtype == torch.float32:
        return torch.stack((scales, offsets)).float().contiguous()
    pair = torch.stack((scales, offsets), -1).to(dtype)
    return pair.contiguous().view(torch.int32).squeeze(-1)


def pack_words(values: Tensor, num_bits: int) -> Tensor:
    """The words of values ``[N, K]``, uint8."""
    num_outs, num_inputs = values.shape
    values = torch.nn.functional.pad(values, (0, -num_inputs % PADDING))
    high = 16 // num_bits  # H
    # n, chunk, b, h, t, lo
    fields = values.view(num_outs, -1, 4, high, 4, 2)
    fields = fields.permute(0, 1, 4, 2, 5, 3).flatten(-2)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int64, device=values.device)
    for place in range(2 * high):
        words |= fields[..., place].long() << num_bits * place
    # As the same bits, signed.
    return ((words + 2**31) % 2**32 - 2**31).int().flatten(1)


@triton.jit
def _half(bits, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 of the lower half of int32 ``bits``."""
    if NUMBERS == "bfloat16":
        return (bits << 16).to(tl.float32, bitcast=True)
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _twice(half):  # type: ignore[no-untyped-def]
    """int32 of the bits of a 16-bit number, twice."""
    bits = half.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def _unpacked(  # type: ignore[no-untyped-def]
    words,  # int32 [OUTS, 16]
    scales,  # float32 [GROUPS, OUTS]
    offsets,  # the same
    OUTS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, HAS_MINIMA: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The weights ``[inputs, OUTS]`` of a chunk."""
    FIELDS: tl.constexpr = 32 // BITS
    words = tl.reshape(words, (OUTS, 4, 4, 1))
    shifts = tl.reshape(tl.arange(0, FIELDS) * BITS, (1, 1, 1, FIELDS))
    values = (words >> shifts) & ((1 << BITS) - 1)
    values = tl.reshape(values, (OUTS, 4, 4, 2, FIELDS // 2))
    values = tl.permute(values, (2, 4, 1, 3, 0))
    values = tl.reshape(values, (GROUPS, 16 * FIELDS // GROUPS, OUTS)).to(tl.float32)
    scales = tl.broadcast_to(tl.expand_dims(scales, 1), values.shape)
    offsets = tl.broadcast_to(tl.expand_dims(offsets, 1), values.shape)
    if HAS_MINIMA:
        values = tl.fma(values, scales, offsets)
    else:
        values = (values - offsets) * scales
    values = tl.reshape(values, (16 * FIELDS, OUTS))
    # NumPy knows no bfloat16.
    return rounded(values, DTYPE) if EMULATE else values.to(DTYPE)


@triton.jit
def _unpacked_in_pairs(  # type: ignore[no-untyped-def]
    words,  # int32 [OUTS, 16], of 4 bits
    scales,  # float32 [GROUPS, OUTS], of numbers that float16 or bfloat16 has
    zeros,  # the same
    OUTS: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The same in bfloat16, two weights per instruction.

    128 + q is a bfloat16 number with q in its last bits, and what is left of the zero point, d, has
    4 bits. A scale is the sum of its nearest bfloat16 number and a rest of 3 bits at most. So
    d * rest is exact, and d * scale is rounded once, in the last operation.
    """
    upper = scales.to(tl.bfloat16)
    rest = (scales - upper.to(tl.float32)).to(tl.bfloat16)
    shape: tl.constexpr = (OUTS, 1, GROUPS, 1, 1)
    words = tl.reshape(words, (OUTS, 4, GROUPS, 4 // GROUPS, 1))
    shifts = tl.reshape(tl.arange(0, 4) * 4, (1, 1, 1, 1, 4))
    pairs = tl.inline_asm_elementwise(
        ASM,
        "=r,r,r,r,r",
        [
            words >> shifts,
            tl.reshape(tl.trans(_twice((zeros + 128.0).to(tl.bfloat16))), shape),
            tl.reshape(tl.trans(_twice(upper)), shape),
            tl.reshape(tl.trans(_twice(rest)), shape),
        ],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    halves = tl.reshape(tl.arange(0, 2) * 16, (1, 1, 1, 1, 2))
    values = (tl.reshape(pairs, (OUTS, 4, 4, 4, 1)) >> halves).to(tl.int16)
    values = tl.permute(values, (2, 3, 1, 4, 0)).to(tl.bfloat16, bitcast=True)
    return tl.reshape(values, (128, OUTS))


_PAIR_ASM = tl.constexpr("""
    {
    .reg .b32 d, e;
    lop3.b32 d, $1, 0x000F000F, 0x43004300, 0xEA;  // (a & b) | c
    sub.rn.bf16x2 d, d, $2;
    mul.rn.bf16x2 e, d, $4;
    fma.rn.bf16x2 $0, d, $3, e;
    }
""")


@triton.jit
def _load_chunk(  # type: ignore[no-untyped-def]
    words, numbers, begin_n, begin,
    N: tl.constexpr, ALL: tl.constexpr, K_WORDS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, NUMBERS: tl.constexpr,
    HAS_MINIMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The weights ``[inputs of a chunk, BLOCK_N]`` of the outputs from ``begin_n`` on, of ``ALL``,
    and of the inputs from ``begin`` on; zeros beyond the last one. BLOCK_K: inputs that may lie
    beyond."""
    INPUTS: tl.constexpr = 16 * 32 // BITS
    GROUPS: tl.constexpr = INPUTS // GROUP if INPUTS > GROUP else 1
    ALL_INPUTS: tl.constexpr = K_WORDS * 32 // BITS
    n = begin_n + tl.arange(0, BLOCK_N)
    if N % BLOCK_N:
        # What is computed beyond the end is not stored.
        n = tl.minimum(n, ALL - 1)
    w = begin * BITS // 32 + tl.arange(0, 16)
    g = begin // GROUP + tl.arange(0, GROUPS)
    words_at = words + n.to(tl.int64)[:, None] * K_WORDS + w[None, :]
    numbers_at = numbers + g[:, None] * ALL + n[None, :]
    # One load for both halves, of the four bytes that an asynchronous copy needs at least.
    if ALL_INPUTS % BLOCK_K:
        is_in = begin < ALL_INPUTS
        loaded = tl.load(words_at, mask=is_in, other=0)
        first = tl.load(numbers_at, mask=is_in, other=0)
    else:
        loaded = tl.load(words_at)
        first = tl.load(numbers_at)
    if NUMBERS == "float32":
        scales = first
        if ALL_INPUTS % BLOCK_K:
            offsets = tl.load(numbers_at + ALL_INPUTS // GROUP * ALL, mask=is_in, other=0)
        else:
            offsets = tl.load(numbers_at + ALL_INPUTS // GROUP * ALL)
    else:
        scales, offsets = _half(first, NUMBERS), _half(first >> 16, NUMBERS)
        if BITS == 4 and tl.bfloat16 == DTYPE and not HAS_MINIMA and not EMULATE:
            return _unpacked_in_pairs(loaded, scales, offsets, BLOCK_N, GROUPS, _PAIR_ASM)
    return _unpacked(loaded, scales, offsets, BLOCK_N, GROUPS, BITS, HAS_MINIMA, DTYPE)


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
    CHUNK: tl.constexpr = 16 * 32 // BITS
    k = tl.arange(0, CHUNK)
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        for chunk in tl.static_range(BLOCK_K // CHUNK):
            begin = first + chunk * CHUNK
            if K % BLOCK_K:
                rows = tl.load(x_at + begin, mask=is_row & (begin + k < K)[None, :], other=0.0)
            else:
                rows = tl.load(x_at + begin, mask=is_row, other=0.0)
            if EMULATE:
                rows = rows.to(tl.float32)
            weights = _load_chunk(
                words, numbers, begin_n, begin, N, ALL, K_WORDS, BLOCK_N, BLOCK_K, GROUP, BITS,
                NUMBERS, HAS_MINIMA, DTYPE,
            )  # fmt: skip
            total = tl.dot(rows, weights, total)
            if HAS_GATE:
                ups = _load_chunk(
                    words, numbers, begin_n + N, begin, N, ALL, K_WORDS, BLOCK_N, BLOCK_K, GROUP,
                    BITS, NUMBERS, HAS_MINIMA, DTYPE,
                )  # fmt: skip
                up_total = tl.dot(rows, ups, up_total)
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
    words, numbers,  # of a PackedWeight
    out,  # [N, K], contiguous
    N: tl.constexpr, K: tl.constexpr, K_WORDS: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, HAS_MINIMA: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of BLOCK_N outputs by a chunk of inputs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    CHUNK: tl.constexpr = 16 * 32 // BITS
    begin = tl.program_id(0) % tl.cdiv(K, CHUNK) * CHUNK
    begin_n = tl.program_id(0) // tl.cdiv(K, CHUNK) * BLOCK_N
    weights = _load_chunk(words, numbers, begin_n, begin, N, N, K_WORDS, BLOCK_N, CHUNK,
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
        weight: of ``[N, K]``, or ``[2 N, K]`` (gate, then up) with a gate.
        bias: ``[N]`` (``[2 N]``), or None; added before rounding.
        tile: sizes, without influence on the result; ``block_k`` is a multiple of 128, of which as
            much is under way at once, or all of K.
        has_gate: whether to return ``silu(gate) * up`` of the two halves, as :func:`.matmul.matmul`
            does.

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
    pdl = has_dependent_launch(x.device)
    grid = (triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outs, tile.block_n),)
    int4_kernel[grid](
        x, weight.words, weight.numbers,
        bias, out, num_rows, x.stride(0),
        **_constants(weight, num_outs, width),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=min(tile.block_k, padded),
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
    block_n, chunk = 64, 16 * 32 // weight.num_bits
    grid = (triton.cdiv(num_outs, block_n) * triton.cdiv(num_inputs, chunk),)
    dequantize_kernel[grid](
        weight.words, weight.numbers, out,
        **_constants(weight, num_outs, num_inputs),
        BLOCK_N=block_n,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
