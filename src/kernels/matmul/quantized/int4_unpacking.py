"""Device functions that load 4-bit or 8-bit weights and unpack them in registers.

:mod:`.int4_packing` defines the layout, and :mod:`.matmul_int4` the values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...fused.rounding import EMULATE, rounded
from ..matmul import load_tile


@triton.jit
def _half(bits, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lower half of int32 ``bits`` as float32."""
    if NUMBERS == "bfloat16":
        return (bits << 16).to(tl.float32, bitcast=True)
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _twice(half):  # type: ignore[no-untyped-def]
    """int32 that contains the bits of a 16-bit value twice."""
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
    # NumPy has no bfloat16.
    return rounded(values, DTYPE) if EMULATE else values.to(DTYPE)


@triton.jit
def _unpacked_in_pairs(  # type: ignore[no-untyped-def]
    words,  # int32 [OUTS, 16], of 4 bits
    scales,  # float32 [GROUPS, OUTS], with values of float16 or bfloat16
    zeros,  # the same
    OUTS: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """:func:`_unpacked` in bfloat16, two weights per instruction.

    128 + q is a bfloat16 with q in its last bits, and the rest d of the zero point has 4 bits. A
    scale is the sum of its nearest bfloat16 and a remainder of at most 3 bits. So d * remainder is
    exact, and d * scale is rounded once, in the last operation.
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
def load_chunk(  # type: ignore[no-untyped-def]
    words, numbers, begin_n, begin,
    N: tl.constexpr, ALL: tl.constexpr, K_WORDS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, NUMBERS: tl.constexpr,
    HAS_MINIMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The weights ``[inputs of a chunk, BLOCK_N]`` for the outputs from ``begin_n`` on, of ``ALL``,
    and the inputs from ``begin`` on; zeros beyond the last input. BLOCK_K: number of inputs that
    may lie beyond it."""
    INPUTS: tl.constexpr = 16 * 32 // BITS
    GROUPS: tl.constexpr = INPUTS // GROUP if INPUTS > GROUP else 1
    ALL_INPUTS: tl.constexpr = K_WORDS * 32 // BITS
    n = begin_n + tl.arange(0, BLOCK_N)
    if N % BLOCK_N:
        # Results beyond the end are not stored.
        n = tl.minimum(n, ALL - 1)
    w = begin * BITS // 32 + tl.arange(0, 16)
    g = begin // GROUP + tl.arange(0, GROUPS)
    words_at = words + n.to(tl.int64)[:, None] * K_WORDS + w[None, :]
    numbers_at = numbers + g[:, None] * ALL + n[None, :]
    # One load for both halves: an asynchronous copy needs at least four bytes.
    MASKED: tl.constexpr = ALL_INPUTS % BLOCK_K > 0
    is_in = begin < ALL_INPUTS
    loaded = load_tile(None, 0, 0, words_at, is_in, MASKED)
    first = load_tile(None, 0, 0, numbers_at, is_in, MASKED)
    if NUMBERS == "float32":
        scales = first
        offsets_at = numbers_at + ALL_INPUTS // GROUP * ALL
        offsets = load_tile(None, 0, 0, offsets_at, is_in, MASKED)
    else:
        scales, offsets = _half(first, NUMBERS), _half(first >> 16, NUMBERS)
        if BITS == 4 and tl.bfloat16 == DTYPE and not HAS_MINIMA and not EMULATE:
            return _unpacked_in_pairs(loaded, scales, offsets, BLOCK_N, GROUPS, _PAIR_ASM)
    return _unpacked(loaded, scales, offsets, BLOCK_N, GROUPS, BITS, HAS_MINIMA, DTYPE)
