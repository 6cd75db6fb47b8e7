"""Tiles of keys and values for the loops of decode and prefill: how they are loaded, scored and
weighted. Elements are of the model's dtype as in :mod:`.online_softmax`, or e4m3 with one scale per
vector.

The steps are the same. A key's scale multiplies its scores, and a value's scale multiplies its
weights. Differences for e4m3:

- Operands are float16, which represents every e4m3 value exactly. One instruction converts two
  elements. Powers of two, which cost no bits, bring the other operands into float16's range: one
  per query line, and for weights the one in :func:`add_scored`. With float32 queries, all operands
  are float32.
- Tiles are loaded as 16-bit pairs of elements, because operands of matrix instructions have 16-bit
  elements. A pair is split in registers: elements 0, 2, 4, ... are one operand and 1, 3, 5, ...
  another, the *halves* of a vector. Scores are the sum over the even elements, then over the odd
  ones.
- Decode is transposed ("turned"): keys and values are left operands. A matrix instruction
  multiplies 16 lines on its left by 8 on its right, and decode seldom has more than 8 query heads
  per KV head. Keys ``[N, DK]`` times queries ``[DK, M]``, and values ``[DV, N]`` times weights
  ``[N, M]``, need half the instructions of prefill's form, and leave half as many scores to the
  softmax. Each element is the same chain of multiply-adds, whichever side its operands are on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.e4m3_store import SCALE_BYTES, is_e4m3
from .online_softmax import (
    MIN_DOT,
    add_tile,
    block_ids,
    capped,
    dot,
    dot_precision,
    load_rows,
    per_line,
    score,
)

_HEADROOM = 14
HEADROOM = tl.constexpr(_HEADROOM)
"""Base-2 logarithm of the largest magnitude that operands are scaled to; float16 reaches
2^15.99."""
# Scales with a smaller exponent no longer bring weights into range: the factor between two scales
# must be a float32.
SMALLEST_EXPONENT = tl.constexpr(-50)
LARGEST_EXPONENT = tl.constexpr(70)
_RIGHT = 8  # smallest right side of a matrix instruction
CONVERT = tl.constexpr("""{
        .reg .b32 sorted;
        .reg .b16 lower, upper;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {lower, upper}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, lower;
        cvt.rn.f16x2.e4m3x2 $1, upper;
        }""")
"""PTX: the even and the odd elements of a word of four e4m3 elements, as pairs of float16."""


@triton.constexpr_function
def num_lines(GROUP, DK_PAD, FUSE_ROPE):  # type: ignore[no-untyped-def]
    """Query heads of a KV head, with padding. With fused RoPE, small heads get more padding:
    threads then have 8 elements each, as in the separate kernel (:func:`.decode_prologue.fits`)."""
    return max(GROUP, MIN_DOT if FUSE_ROPE and DK_PAD < 128 else _RIGHT)


@triton.jit
def halves_of_pairs(pairs):  # type: ignore[no-untyped-def]
    """The lower and the upper bytes of ``pairs``, uint16, as float16: exact."""
    # Two neighbours along the summed dimension share a register: one instruction converts their
    # lower bytes, and one their upper bytes. With bytes, the compiler emits three times as many.
    return tl.inline_asm_elementwise(
        CONVERT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def scaled_queries(q, factor, cap_in, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """For e4m3 keys: the halves of ``q [M, DK]``, transposed if TURNED; the power of two, float32
    ``[M]``, that is their unit; and ``Scoring.factor`` of each line."""
    even, odd = tl.split(tl.reshape(q, (q.shape[0], q.shape[1] // 2, 2)))
    ones = tl.full((q.shape[0],), 1.0, tl.float32)
    unit = ones
    if q.dtype != tl.float32:
        even = even.to(tl.float32)
        odd = odd.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1).to(tl.int32, bitcast=True)
        # Bits of the power of two below the largest magnitude, clamped to 2^-100 .. 2^100.
        exponent = tl.minimum(tl.maximum(largest, 27 << 23), 227 << 23) & (255 << 23)
        inverse = ((254 << 23) - exponent + (HEADROOM << 23)).to(tl.float32, bitcast=True)[:, None]
        even = (even * inverse).to(tl.float16)
        odd = (odd * inverse).to(tl.float16)
        unit = (exponent - (HEADROOM << 23)).to(tl.float32, bitcast=True)
    factors = (ones if cap_in is not None else unit) * factor
    halves = (tl.trans(even), tl.trans(odd)) if TURNED else (even, odd)
    return halves, unit, factors


@triton.constexpr_function
def sum_dtype(dtype, IS_E4M3):  # type: ignore[no-untyped-def]
    """Dtype of the weighted sums for queries of ``dtype``. Values with scales may have any
    magnitude."""
    return tl.bfloat16 if IS_E4M3 and dtype != tl.float32 else dtype


@triton.jit
def with_scale_blocks(pages, blocks, start, last, shape):  # type: ignore[no-untyped-def]
    """The location of the tile at ``start``: its :func:`.block_ids`, and the block ids of its
    scales. The latter occur once each; ``blocks`` repeats them for each slot."""
    scale_blocks = blocks
    if is_e4m3(pages.k_cache.dtype.element_ty) and shape.PAGE < shape.BLOCK_N:
        offsets = tl.arange(0, shape.BLOCK_N // shape.PAGE) * shape.PAGE
        positions = tl.minimum(start + offsets, last)
        scale_blocks = tl.load(pages.table + positions.to(tl.uint32) // shape.PAGE)
    return blocks, scale_blocks


@triton.jit
def places_of(pages, start, last, shape):  # type: ignore[no-untyped-def]
    """:func:`with_scale_blocks` of a tile whose block ids are not yet loaded."""
    blocks = block_ids(pages.table, start, last, shape.PAGE, shape.BLOCK_N)
    return with_scale_blocks(pages, blocks, start, last, shape)


@triton.jit
def _load_scales(  # type: ignore[no-untyped-def]
    scales, blocks, start, BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The scales ``[BLOCK_N]`` of a tile; undefined for unused slots. ``blocks``: from
    :func:`scale_blocks_of`."""
    base = scales.to(tl.pointer_type(tl.float32)) + blocks.to(tl.int64) * (BLOCK // SCALE_BYTES)
    if PAGE >= BLOCK_N:
        pointers = base + (start & (PAGE - 1)) + tl.arange(0, BLOCK_N)
    else:
        pointers = tl.reshape(base[:, None] + tl.arange(0, PAGE)[None, :], (BLOCK_N,))
    return tl.load(pointers)


@triton.jit
def _load_halves(  # type: ignore[no-untyped-def]
    cache, blocks, start, last,
    D: tl.constexpr, D_PAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, ZEROED: tl.constexpr, DTYPE: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """The halves ``[BLOCK_N, D_PAD / 2]`` of a tile in DTYPE; arguments as in
    :func:`.online_softmax.load_rows`."""
    pairs = load_rows(
        cache.to(tl.pointer_type(tl.uint16)), blocks, start, last,
        D // 2, D_PAD // 2, WIDTH // 2, BLOCK // 2, PAGE, BLOCK_N, ZEROED, TURNED,
    )  # fmt: skip
    even, odd = halves_of_pairs(pairs)
    return even.to(DTYPE), odd.to(DTYPE)


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    pages, places, start, last, shape, DTYPE: tl.constexpr, TURNED: tl.constexpr
):
    """Keys ``[BLOCK_N, DK_PAD]`` and values ``[BLOCK_N, DV_PAD]`` of the tile at ``start``. For
    e4m3 elements each is ``(even, odd, scales)``, with halves in the DTYPE of the queries. If
    TURNED, the halves of values are transposed."""
    PAGE: tl.constexpr = shape.PAGE
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    blocks, scale_blocks = places
    # Keys of unused slots, NaN perhaps, are masked as scores. Values have to be numbers.
    if is_e4m3(pages.k_cache.dtype.element_ty):
        k_even, k_odd = _load_halves(
            pages.k_cache, blocks, start, last, shape.DK, shape.DK_PAD, shape.K_WIDTH,
            shape.K_BLOCK, PAGE, BLOCK_N, False, DTYPE, False,
        )  # fmt: skip
        k_at = pages.k_cache + pages.k_scales
        k = (k_even, k_odd, _load_scales(k_at, scale_blocks, start, shape.K_BLOCK, PAGE, BLOCK_N))
        # Transposed where they are loaded: later, they would be exchanged through shared memory.
        v_even, v_odd = _load_halves(
            pages.v_cache, blocks, start, last, shape.DV, shape.DV_PAD, shape.V_WIDTH,
            shape.V_BLOCK, PAGE, BLOCK_N, True, DTYPE, TURNED,
        )  # fmt: skip
        v_at = pages.v_cache + pages.v_scales
        v_scales = _load_scales(v_at, scale_blocks, start, shape.V_BLOCK, PAGE, BLOCK_N)
        exists = tl.arange(0, BLOCK_N) <= last - start
        v = (v_even, v_odd, tl.where(exists, v_scales, 0.0))
    else:
        k = load_rows(
            pages.k_cache, blocks, start, last, shape.DK, shape.DK_PAD, shape.K_WIDTH,
            shape.K_BLOCK, PAGE, BLOCK_N, False,
        )  # fmt: skip
        v = load_rows(
            pages.v_cache, blocks, start, last, shape.DV, shape.DV_PAD, shape.V_WIDTH,
            shape.V_BLOCK, PAGE, BLOCK_N, True,
        )  # fmt: skip
    return k, v


@triton.jit
def score_tile(q, k, scoring, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores ``[M, N]`` (turned: ``[N, M]``) of queries, or their halves, and keys from
    :func:`load_tile`. For e4m3 keys without softcap, ``scoring.factor`` contains the unit of the
    scores."""
    if scoring.unit is None:
        scores = score(q, k, scoring)
    else:
        PRECISION: tl.constexpr = dot_precision(k[0].dtype)
        if TURNED:
            scores = tl.dot(k[0], q[0], input_precision=PRECISION)
            scores = tl.dot(k[1], q[1], scores, input_precision=PRECISION)
        else:
            scores = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
            scores = tl.dot(q[1], tl.trans(k[1]), scores, input_precision=PRECISION)
        scores *= per_line(k[2], not TURNED)
        if scoring.cap_in is not None:
            scores *= per_line(scoring.unit, TURNED)
            scores = capped(scores, scoring.cap_in, scoring.cap_out)
    return scores


@triton.jit
def scale_exponents(v_scales):  # type: ignore[no-untyped-def]
    """Logarithms of the powers of two above the scales of values, less HEADROOM, as float32."""
    exponents = (v_scales.to(tl.int32, bitcast=True) >> 23) - 126
    exponents = tl.minimum(tl.maximum(exponents, SMALLEST_EXPONENT), LARGEST_EXPONENT) - HEADROOM
    return exponents.to(tl.float32)


@triton.jit
def add_scored(scores, v, ones, state, scoring, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """:func:`.online_softmax.add_tile` for values from :func:`load_tile`.

    For e4m3 values ``row_max`` is a base-2 logarithm: of the largest weight times the power of two
    above its scale. So no weight of a value is larger than 2^HEADROOM, and those that matter are
    not much smaller.
    """
    if scoring.unit is None:
        state = add_tile(scores, v, ones, state, scoring.factor)
    else:
        row_max, row_sum, even, odd = state
        v_even, v_odd, v_scales = v
        factor = per_line(scoring.factor, TURNED)
        logs = tl.fma(scores, factor, per_line(scale_exponents(v_scales), not TURNED))
        new_row_max = tl.maximum(row_max, tl.max(logs, 0 if TURNED else 1))
        base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        weights = tl.exp2(tl.fma(scores, factor, per_line(-base, TURNED)))
        rescale = per_line(tl.exp2(row_max - base), TURNED)
        row_sum = dot(weights.to(ones.dtype), ones, row_sum * rescale, TURNED)
        weights = (weights * per_line(v_scales, not TURNED)).to(v_even.dtype)
        even = dot(weights, v_even, even * rescale, TURNED)
        odd = dot(weights, v_odd, odd * rescale, TURNED)
        state = (new_row_max, row_sum, even, odd)
    return state


@triton.jit
def whole(even, odd):  # type: ignore[no-untyped-def]
    """Whole vectors from their halves."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def joined(state, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A state in the form of :mod:`.online_softmax`: not turned, with whole values."""
    if len(state) == 4:
        row_max, row_sum, even, odd = state
        if TURNED:
            state = (row_max, tl.trans(row_sum), whole(tl.trans(even), tl.trans(odd)))
        else:
            state = (row_max, row_sum, whole(even, odd))
    return state
