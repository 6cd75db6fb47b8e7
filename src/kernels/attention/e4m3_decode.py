"""The decode kernel's loop over tiles of e4m3 numbers: keys and values as left operands.

A matrix instruction multiplies 16 lines on its left by 8 on its right, and decode seldom has more
than 8 query heads a KV head: keys ``[N, DK]`` times queries ``[DK, M]``, and values ``[DV, N]``
times weights ``[N, M]``, are half the instructions of the prefill kernel's form, and leave half as
many scores to the softmax. States are transposed. All else is as in :mod:`.e4m3_tiles`, to the bit:
each element is the same chain of products, whichever side its operands are on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .e4m3_operands import halves_of_pairs
from .e4m3_tiles import (
    load_keys,
    load_value_scales,
    scale_blocks_of,
    scale_exponents,
    sum_dtype,
    whole,
)
from .online_softmax import MIN_DOT, ONES, block_ids, capped, ends_split

_RIGHT = 8  # smallest right side of a matrix instruction


@triton.constexpr_function
def num_lines(GROUP, DK_PAD, FUSE_ROPE):  # type: ignore[no-untyped-def]
    """Query heads of a KV head with padding. Where RoPE is fused, more of small heads: threads then
    have 8 elements each, as in the kernel of its own (:func:`.decode_prologue.fits`)."""
    return max(GROUP, MIN_DOT if FUSE_ROPE and DK_PAD < 128 else _RIGHT)


@triton.jit
def _load_values(pages, blocks, start, last, shape, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halves ``[DV_PAD / 2, BLOCK_N]`` of a tile's values, zeros beyond ``last``.

    Transposed where they are loaded: behind that, they would be exchanged through shared memory.
    """
    HALF: tl.constexpr = shape.DV_PAD // 2
    WIDTH: tl.constexpr = shape.V_WIDTH // 2
    dims = tl.arange(0, HALF)[:, None]
    offsets = tl.arange(0, shape.BLOCK_N)
    base = pages.v_cache.to(tl.pointer_type(tl.uint16))
    base += blocks.to(tl.int64) * (shape.V_BLOCK // 2)
    if shape.PAGE >= shape.BLOCK_N:
        columns = base + (start & (shape.PAGE - 1)) * WIDTH + (offsets * WIDTH)[None, :]
    else:  # the tile begins where a block begins
        columns = base[None, :] + ((offsets & (shape.PAGE - 1)) * WIDTH)[None, :]
    mask = (offsets <= last - start)[None, :]
    if shape.DV < shape.DV_PAD:
        mask &= dims < shape.DV // 2
    even, odd = halves_of_pairs(tl.load(columns + dims, mask=mask, other=0))
    return even.to(DTYPE), odd.to(DTYPE)


@triton.jit
def _fold(  # type: ignore[no-untyped-def]
    total_row_max, total_row_sum, total_even, total_odd, row_max, row_sum, even, odd
):
    """:func:`.online_softmax.fold` of transposed states."""
    new_row_max = tl.maximum(total_row_max, row_max)
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    a = tl.exp2(total_row_max - base)[None, :]
    b = tl.exp2(row_max - base)[None, :]
    total_row_sum = tl.fma(row_sum, b, total_row_sum * a)
    total_even = tl.fma(even, b, total_even * a)
    total_odd = tl.fma(odd, b, total_odd * a)
    return new_row_max, total_row_sum, total_even, total_odd


@triton.jit
def _empty(BLOCK_M: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    zeros = tl.zeros((HALF, BLOCK_M), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return row_max, tl.zeros((ONES, BLOCK_M), tl.float32), zeros, zeros


@triton.jit
def _add_tile(  # type: ignore[no-untyped-def]
    scores, v_even, v_odd, v_scales, ones, row_max, row_sum, even, odd, scoring
):
    logs = tl.fma(scores, scoring.factor[None, :], scale_exponents(v_scales)[:, None])
    new_row_max = tl.maximum(row_max, tl.max(logs, 0))
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = tl.exp2(tl.fma(scores, scoring.factor[None, :], -base[None, :]))
    rescale = tl.exp2(row_max - base)[None, :]
    row_sum = tl.dot(
        ones, weights.to(ones.dtype), row_sum * rescale, input_precision=scoring.PRECISION
    )
    weights = (weights * v_scales[:, None]).to(v_even.dtype)
    even = tl.dot(v_even, weights, even * rescale, input_precision=scoring.PRECISION)
    odd = tl.dot(v_odd, weights, odd * rescale, input_precision=scoring.PRECISION)
    return new_row_max, row_sum, even, odd


@triton.jit
def attend_e4m3_tiles(  # type: ignore[no-untyped-def]
    q_even, q_odd, pages, blocks, begin, end, last, positions, scoring, splits, shape,
    FOLD: tl.constexpr,
):  # fmt: skip
    """As :func:`.online_softmax.attend_tiles`, of the halves of queries and caches of planes."""
    BLOCK_M: tl.constexpr = q_even.shape[0]
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    HALF: tl.constexpr = shape.DV_PAD // 2
    DTYPE: tl.constexpr = q_even.dtype
    offsets = tl.arange(0, BLOCK_N)
    ones = tl.full((ONES, BLOCK_N), 1.0, sum_dtype(DTYPE))
    q_even = tl.trans(q_even)
    q_odd = tl.trans(q_odd)
    total_row_max, total_row_sum, total_even, total_odd = _empty(BLOCK_M, HALF)
    row_max, row_sum, even, odd = _empty(BLOCK_M, HALF)
    scale_blocks = scale_blocks_of(pages.table, blocks, begin, last, shape.PAGE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        k_even, k_odd, k_scales = load_keys(pages, blocks, scale_blocks, start, last, shape, DTYPE)
        v_even, v_odd = _load_values(pages, blocks, start, last, shape, DTYPE)
        v_scales = load_value_scales(pages, scale_blocks, start, last, shape)
        blocks = block_ids(pages.table, start + BLOCK_N, last, shape.PAGE, BLOCK_N)
        scale_blocks = scale_blocks_of(
            pages.table, blocks, start + BLOCK_N, last, shape.PAGE, BLOCK_N
        )
        visible = (start + offsets)[:, None] <= positions[None, :]
        if scoring.window is not None:
            visible &= (start + offsets)[:, None] > positions[None, :] - scoring.window
        scores = tl.dot(k_even, q_even, input_precision=scoring.PRECISION)
        scores = tl.dot(k_odd, q_odd, scores, input_precision=scoring.PRECISION)
        scores *= k_scales[:, None]
        if scoring.cap_in is not None:
            scores = capped(scores * scoring.unit[None, :], scoring.cap_in, scoring.cap_out)
        scores = tl.where(visible, scores, float("-inf"))
        row_max, row_sum, even, odd = _add_tile(
            scores, v_even, v_odd, v_scales, ones, row_max, row_sum, even, odd, scoring
        )
        if FOLD:  # noqa: SIM102 (one is known when compiling, the other is not)
            if ends_split(start + BLOCK_N, splits):
                total_row_max, total_row_sum, total_even, total_odd = _fold(
                    total_row_max, total_row_sum, total_even, total_odd, row_max, row_sum, even, odd
                )
                row_max, row_sum, even, odd = _empty(BLOCK_M, HALF)
    total_acc = whole(tl.trans(total_even), tl.trans(total_odd))
    acc = whole(tl.trans(even), tl.trans(odd))
    return (
        total_row_max, tl.trans(total_row_sum), total_acc, row_max, tl.trans(row_sum), acc,
    )  # fmt: skip
