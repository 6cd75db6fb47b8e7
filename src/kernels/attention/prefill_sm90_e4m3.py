"""Arithmetic of Hopper's prefill over e4m3 numbers: that of :mod:`.e4m3_tiles`, in Gluon.

It is the same operation by operation, for its bits depend on that. Heads lie in halves, elements 0,
2, 4, ... and behind them 1, 3, 5, ...: so keys are summed, and so are queries, and outputs until
they are stored. Keys and values come as float16, with scales beside them
(:mod:`.prefill_sm90_convert`). States are those of :mod:`.prefill_sm90_softmax`, but that maxima
are logarithms.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2, warpgroup_mma

from .e4m3_tiles import HEADROOM
from .prefill_sm90_softmax import STEP_N, capped, fold, times

SCALE_ROWS = gl.constexpr(3)
"""Rows of a slot's scales: of keys, of values, and the logarithms of the latter."""


@gluon.jit
def halves(x):
    """``[M, D]``, the even elements of each row in front of the odd ones."""
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    return x.reshape([M, D // 2, 2]).permute([0, 2, 1]).reshape([M, D])


@gluon.jit
def whole(x):
    """What :func:`halves` was given."""
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    return x.reshape([M, 2, D // 2]).permute([0, 2, 1]).reshape([M, D])


@gluon.jit
def scaled_queries(q):
    """:func:`.e4m3_tiles.scaled_queries`: the halves of ``q [M, D]``, float16, and their unit."""
    wide = q.to(gl.float32)
    largest = gl.max(gl.abs(wide), 1).to(gl.int32, bitcast=True)
    exponent = gl.minimum(gl.maximum(largest, 27 << 23), 227 << 23) & (255 << 23)
    inverse = ((254 << 23) - exponent + (HEADROOM << 23)).to(gl.float32, bitcast=True)
    unit = (exponent - (HEADROOM << 23)).to(gl.float32, bitcast=True)
    return halves((wide * inverse[:, None]).to(gl.float16)), unit


@gluon.jit
def _row_of_scales(scales, slot, row: gl.constexpr, LAYOUT: gl.constexpr):
    return scales.index(slot * SCALE_ROWS + row).load(LAYOUT)


@gluon.jit
def scaled(scores, scales, slot, scoring):
    """Scores of a step times its keys' scales, and capped: as :func:`.e4m3_tiles._score` ends."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    scores = scores * _row_of_scales(scales, slot, 0, COLUMN)[None, :]
    if scoring.cap_in is not None:
        scores = capped(scores * scoring.unit[:, None], scoring)
    return scores


@gluon.jit
def add_e4m3(
    MAY_BEGIN_SPLIT: gl.constexpr,
    step, scores, state, v, scales, slot, ones, scoring, splits,
):  # fmt: skip
    """:func:`.e4m3_tiles._add_tile`, the values' sums under way.

    Args:
        MAY_BEGIN_SPLIT: whether ``step`` may begin a split. v: the step's values.
    """
    start = step * STEP_N
    if MAY_BEGIN_SPLIT:  # noqa: SIM102 (known when compiling, the other is not)
        if (
            start & (gl.where(start < splits.SPLIT_CHANGE, splits.NEAR_SPLIT, splits.FAR_SPLIT) - 1)
            == 0
        ):
            state = fold(state, 1.0)
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    COLUMN: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    factor = scoring.factor[:, None]
    exponents = _row_of_scales(scales, slot, 2, COLUMN)
    exponents = gl.broadcast(exponents[None, :], scores)[0]
    factors = gl.broadcast(factor, scores)[0]
    logs = gl.fma(scores, factors, exponents)
    new_row_max = gl.maximum(row_max, gl.max(logs, 1))
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = gl.exp2(gl.fma(scores, factors, gl.broadcast((-base)[:, None], scores)[0]))
    rescale = gl.exp2(row_max - base)
    narrow = gl.convert_layout(
        weights.to(ones.dtype), gl.DotOperandLayout(0, row_sum.type.layout, 2), assert_trivial=True
    )
    row_sum = mma_v2(narrow, ones, times(row_sum, rescale))
    weights = (weights * _row_of_scales(scales, slot, 1, COLUMN)[None, :]).to(v.dtype)
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, acc.type.layout, 2))
    acc = warpgroup_mma(weights, v, times(acc, rescale), is_async=True)
    return new_row_max, row_sum, acc, total_row_max, total_row_sum, total_acc
