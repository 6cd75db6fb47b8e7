"""Tiles of e4m3 keys and values: loads, scores, weighted sums and the prefill kernel's loop.

The steps are those of :mod:`.online_softmax` with scales: a key's multiplies its scores, a value's
the weights. What else is of its own:

- Operands are float16, which holds every e4m3 number; two are converted by one instruction. What
  they are multiplied with is brought into float16's range by powers of two, which cost no bits:
  queries by one of their own, weights by that in :func:`_add_tile`. Of float32 queries all operands
  are float32.
- Tiles are loaded as pairs of numbers, of 16 bits, since matrix instructions' operands are made of
  those. A pair is taken apart in registers: elements 0, 2, 4, ... are one operand and 1, 3, 5, ...
  another, the *halves* of a vector. Scores are the sum over the even ones, then the odd ones.

The decode kernel's loop is :mod:`.e4m3_decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.e4m3_store import SCALE_BYTES
from .e4m3_operands import halves_of_pairs
from .online_softmax import ONES, begins_split, block_ids, capped, fold, load_rows

_HEADROOM = 14
HEADROOM = tl.constexpr(_HEADROOM)
"""Logarithm of the largest magnitude that operands are brought to; float16 reaches 2^15.99."""
# Of scales, beyond which weights are no longer brought into range: what is rescaled from one to the
# other has to be a float32.
SMALLEST_EXPONENT = tl.constexpr(-50)
LARGEST_EXPONENT = tl.constexpr(70)


@triton.jit
def scaled_queries(q):  # type: ignore[no-untyped-def]
    """The halves of ``q [M, DK]`` for e4m3 keys, and the power of two, float32 ``[M]``, that they
    are in units of."""
    even, odd = tl.split(tl.reshape(q, (q.shape[0], q.shape[1] // 2, 2)))
    unit = tl.full((q.shape[0],), 1.0, tl.float32)
    if q.dtype != tl.float32:
        even = even.to(tl.float32)
        odd = odd.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1).to(tl.int32, bitcast=True)
        # Bits of the power of two below the largest magnitude, that held between 2^-100 and 2^100.
        exponent = tl.minimum(tl.maximum(largest, 27 << 23), 227 << 23) & (255 << 23)
        inverse = ((254 << 23) - exponent + (HEADROOM << 23)).to(tl.float32, bitcast=True)[:, None]
        even = (even * inverse).to(tl.float16)
        odd = (odd * inverse).to(tl.float16)
        unit = (exponent - (HEADROOM << 23)).to(tl.float32, bitcast=True)
    return even, odd, unit


@triton.jit
def line_factors(unit, factor, cap_in):  # type: ignore[no-untyped-def]
    """``Scoring.factor`` of each line, for queries in units of ``unit [M]``."""
    if cap_in is not None:
        unit = tl.full(unit.shape, 1.0, tl.float32)
    return unit * factor


@triton.jit
def _load_halves(  # type: ignore[no-untyped-def]
    cache, blocks, start, last,
    D: tl.constexpr, D_PAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, ZEROED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The halves ``[BLOCK_N, D_PAD / 2]`` of a tile in DTYPE; arguments as of
    :func:`.online_softmax.load_rows`."""
    pairs = load_rows(
        cache.to(tl.pointer_type(tl.uint16)), blocks, start, last,
        D // 2, D_PAD // 2, WIDTH // 2, BLOCK // 2, PAGE, BLOCK_N, ZEROED,
    )  # fmt: skip
    even, odd = halves_of_pairs(pairs)
    return even.to(DTYPE), odd.to(DTYPE)


@triton.jit
def scale_blocks_of(table, blocks, start, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block ids of a tile's scales: each once, which ``blocks`` repeats for each slot."""
    if PAGE < BLOCK_N:
        positions = tl.minimum(start + tl.arange(0, BLOCK_N // PAGE) * PAGE, last)
        blocks = tl.load(table + positions.to(tl.uint32) // PAGE)
    return blocks


@triton.jit
def _load_scales(  # type: ignore[no-untyped-def]
    scales, blocks, start, BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The scales ``[BLOCK_N]`` of a tile, of unused slots any number; ``blocks``: those of
    :func:`scale_blocks_of`."""
    base = scales.to(tl.pointer_type(tl.float32)) + blocks.to(tl.int64) * (BLOCK // SCALE_BYTES)
    if PAGE >= BLOCK_N:
        pointers = base + (start & (PAGE - 1)) + tl.arange(0, BLOCK_N)
    else:
        pointers = tl.reshape(base[:, None] + tl.arange(0, PAGE)[None, :], (BLOCK_N,))
    return tl.load(pointers)


@triton.jit
def load_keys(pages, blocks, scale_blocks, start, last, shape, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halves of a tile's keys, and their scales."""
    # Of unused slots, NaN perhaps: masked as scores.
    even, odd = _load_halves(
        pages.k_cache, blocks, start, last, shape.DK, shape.DK_PAD, shape.K_WIDTH, shape.K_BLOCK,
        shape.PAGE, shape.BLOCK_N, False, DTYPE,
    )  # fmt: skip
    scales = _load_scales(
        pages.k_cache + pages.k_scales, scale_blocks, start,
        shape.K_BLOCK, shape.PAGE, shape.BLOCK_N,
    )  # fmt: skip
    return even, odd, scales


@triton.jit
def load_value_scales(pages, scale_blocks, start, last, shape):  # type: ignore[no-untyped-def]
    """The scales of a tile's values, zeros beyond ``last``."""
    scales = _load_scales(
        pages.v_cache + pages.v_scales, scale_blocks, start,
        shape.V_BLOCK, shape.PAGE, shape.BLOCK_N,
    )  # fmt: skip
    # As the values, those have to be numbers.
    exists = tl.arange(0, shape.BLOCK_N) <= last - start
    return tl.where(exists, scales, 0.0)


@triton.jit
def _load_values(pages, blocks, scale_blocks, start, last, shape, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halves of a tile's values, and their scales, zeros beyond ``last``."""
    even, odd = _load_halves(
        pages.v_cache, blocks, start, last, shape.DV, shape.DV_PAD, shape.V_WIDTH, shape.V_BLOCK,
        shape.PAGE, shape.BLOCK_N, True, DTYPE,
    )  # fmt: skip
    return even, odd, load_value_scales(pages, scale_blocks, start, last, shape)


@triton.jit
def _score(q_even, q_odd, k_even, k_odd, k_scales, scoring):  # type: ignore[no-untyped-def]
    """``[M, N]``, without softcap in units of a power of two, which ``scoring.factor`` contains."""
    scores = tl.dot(q_even, tl.trans(k_even), input_precision=scoring.PRECISION)
    scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision=scoring.PRECISION)
    scores *= k_scales[None, :]
    if scoring.cap_in is not None:
        scores = capped(scores * scoring.unit[:, None], scoring.cap_in, scoring.cap_out)
    return scores


@triton.jit
def scale_exponents(v_scales):  # type: ignore[no-untyped-def]
    """Logarithms of the powers of two above scales of values, less HEADROOM, as float32."""
    exponents = (v_scales.to(tl.int32, bitcast=True) >> 23) - 126
    exponents = tl.minimum(tl.maximum(exponents, SMALLEST_EXPONENT), LARGEST_EXPONENT) - HEADROOM
    return exponents.to(tl.float32)


@triton.jit
def _add_tile(  # type: ignore[no-untyped-def]
    scores, v_even, v_odd, v_scales, ones, row_max, row_sum, even, odd, scoring
):
    """:func:`.online_softmax.add_tile` of values with scales; ``even`` and ``odd`` are of acc.

    ``row_max`` is a logarithm to base 2, of the largest weight times scale, the latter as the power
    of two above it: no weight of a value is larger than 2^HEADROOM, and those that matter are not
    much smaller.
    """
    factor = scoring.factor[:, None]
    logs = tl.fma(scores, factor, scale_exponents(v_scales)[None, :])
    new_row_max = tl.maximum(row_max, tl.max(logs, 1))
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    rescale = tl.exp2(row_max - base)[:, None]
    row_sum = tl.dot(
        weights.to(ones.dtype), ones, row_sum * rescale, input_precision=scoring.PRECISION
    )
    weights = (weights * v_scales[None, :]).to(v_even.dtype)
    even = tl.dot(weights, v_even, even * rescale, input_precision=scoring.PRECISION)
    odd = tl.dot(weights, v_odd, odd * rescale, input_precision=scoring.PRECISION)
    return new_row_max, row_sum, even, odd


@triton.jit
def _fold(  # type: ignore[no-untyped-def]
    total_row_max, total_row_sum, total_even, total_odd, row_max, row_sum, even, odd
):
    new_row_max, new_row_sum, total_even = fold(
        total_row_max, total_row_sum, total_even, row_max, row_sum, even, 1.0
    )
    _, _, total_odd = fold(total_row_max, total_row_sum, total_odd, row_max, row_sum, odd, 1.0)
    return new_row_max, new_row_sum, total_even, total_odd


@triton.jit
def _empty(BLOCK_M: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """A state that has seen nothing."""
    zeros = tl.zeros((BLOCK_M, HALF), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return row_max, tl.zeros((BLOCK_M, ONES), tl.float32), zeros, zeros


@triton.jit
def whole(even, odd):  # type: ignore[no-untyped-def]
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.constexpr_function
def sum_dtype(dtype):  # type: ignore[no-untyped-def]
    """Dtype that weights are summed in; those of values with scales are of any size."""
    return tl.float32 if dtype == tl.float32 else tl.bfloat16


@triton.jit
def attend_e4m3_tiles_fold_late(  # type: ignore[no-untyped-def]
    q_even, q_odd, pages, begin, first, last, positions, scoring, splits, shape
):
    """As :func:`.prefill.attend_tiles_fold_late`, of the halves of queries and caches of planes."""
    BLOCK_M: tl.constexpr = q_even.shape[0]
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    HALF: tl.constexpr = shape.DV_PAD // 2
    DTYPE: tl.constexpr = q_even.dtype
    inf = float("inf")
    diagonal = (first + 1) // BLOCK_N * BLOCK_N
    offsets = tl.arange(0, BLOCK_N)
    ones = tl.full((BLOCK_N, ONES), 1.0, sum_dtype(DTYPE))
    total_row_max, total_row_sum, total_even, total_odd = _empty(BLOCK_M, HALF)
    row_max, row_sum, even, odd = _empty(BLOCK_M, HALF)
    blocks = block_ids(pages.table, begin, last, shape.PAGE, BLOCK_N)
    scale_blocks = scale_blocks_of(pages.table, blocks, begin, last, shape.PAGE, BLOCK_N)
    for start in tl.range(begin, last + 1, BLOCK_N):
        k_even, k_odd, k_scales = load_keys(pages, blocks, scale_blocks, start, last, shape, DTYPE)
        v_even, v_odd, v_scales = _load_values(
            pages, blocks, scale_blocks, start, last, shape, DTYPE
        )
        blocks = block_ids(pages.table, start + BLOCK_N, last, shape.PAGE, BLOCK_N)
        scale_blocks = scale_blocks_of(
            pages.table, blocks, start + BLOCK_N, last, shape.PAGE, BLOCK_N
        )
        scores = _score(q_even, q_odd, k_even, k_odd, k_scales, scoring)
        if begins_split(start, splits):
            total_row_max, total_row_sum, total_even, total_odd = _fold(
                total_row_max, total_row_sum, total_even, total_odd, row_max, row_sum, even, odd
            )
            row_max, row_sum, even, odd = _empty(BLOCK_M, HALF)
            scores = tl.where(offsets[None, :] <= (positions - start)[:, None], scores, -inf)
        in_part = start >= diagonal
        if scoring.window is not None:
            in_part |= start <= last - scoring.window
        if in_part:
            visible = offsets[None, :] <= (positions - start)[:, None]
            if scoring.window is not None:
                visible &= offsets[None, :] > (positions - start - scoring.window)[:, None]
            scores = tl.where(visible, scores, -inf)
        row_max, row_sum, even, odd = _add_tile(
            scores, v_even, v_odd, v_scales, ones, row_max, row_sum, even, odd, scoring
        )
    row_max, row_sum, even, odd = _fold(
        total_row_max, total_row_sum, total_even, total_odd, row_max, row_sum, even, odd
    )
    return row_max, row_sum, whole(even, odd)
