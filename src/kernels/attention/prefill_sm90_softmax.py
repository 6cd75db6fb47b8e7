"""Arithmetic of Hopper's prefill attention: that of :mod:`.online_softmax`, in Gluon.

It is the same operation by operation, for its bits depend on that. A state is ``(row_max, row_sum,
acc, total_row_max, total_row_sum, total_acc)``, of the current split and of those before it, for
the 64 lines of a warpgroup. Loops take steps of ``STEP_N`` positions: one tile of 64, or two of 32.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .online_softmax import LOG2E

STEP_N = gl.constexpr(64)


@gluon.jit
def lines_of(
    FROM: gl.constexpr,
    COUNT: gl.constexpr,
    head,
    begin,
    first,
    num_queries,
    G: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Tokens and heads of lines, and which of them are there."""
    lines = FROM + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))
    queries = first + lines // G
    is_line = (lines < BLOCK_Q * G) & (queries < num_queries)
    return (begin + queries).to(gl.int64), head * G + lines % G, is_line


@gluon.constexpr_function
def num_entries(BLOCK_N, DV, D):
    """Entries of the ring, each the values ``[BLOCK_N, DV]`` of a tile, that a step's keys of D
    elements and its values take."""
    return STEP_N.value // BLOCK_N * (D // DV + 1)


@gluon.jit
def keys_of(ring, slot, D: gl.constexpr):
    """The keys of a slot of the ring, ``[STEP_N, D]``."""
    SIZE: gl.constexpr = num_entries(ring.shape[1], ring.shape[2], D)
    keys = ring.index(SIZE * slot)
    if keys.shape[0] != STEP_N or keys.shape[1] != D:
        keys = keys._reinterpret(ring.dtype, [STEP_N, D], ring.layout)
    return keys


@gluon.jit
def values_of(ring, slot, tile: gl.constexpr, D: gl.constexpr):
    """The values of a step's tile, 0 or 1: ``[BLOCK_N, DV]``. D: elements of a key."""
    SIZE: gl.constexpr = num_entries(ring.shape[1], ring.shape[2], D)
    return ring.index(SIZE * slot + (SIZE - STEP_N // ring.shape[1] + tile))


@gluon.jit
def times(sums, by):
    """Sums of lines, each times ``by``, ``[M]`` of another layout of the same lines."""
    return sums * gl.convert_layout(by, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def fold_sums(total, sums, a, b):
    layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    b = gl.convert_layout(b, layout)[:, None]
    return gl.fma(sums, gl.broadcast(b, sums)[0], times(total, a))


@gluon.jit
def fold(state, factor):
    """:func:`.online_softmax.fold`, and the state of a split that begins."""
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    new_row_max = gl.maximum(total_row_max, row_max)
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    a = gl.exp2((total_row_max - base) * factor)
    b = gl.exp2((row_max - base) * factor)
    total_row_sum = fold_sums(total_row_sum, row_sum, a, b)
    total_acc = fold_sums(total_acc, acc, a, b)
    row_max = gl.full_like(row_max, float("-inf"))
    return (
        row_max,
        gl.zeros_like(row_sum),
        gl.zeros_like(acc),
        new_row_max,
        total_row_sum,
        total_acc,
    )


@gluon.jit
def capped(scores, scoring):
    """:func:`.online_softmax.capped`, if there is a cap."""
    if scoring.cap_in is not None:
        power = gl.exp2(scores * (scoring.cap_in * (2.0 * LOG2E)))
        scores = gl.fma(-2.0, 1.0 / (power + 1.0), 1.0) * scoring.cap_out
    return scores


@gluon.jit
def masked(scores, step, positions, scoring):
    """Scores, -inf where a query does not see a key of the step."""
    offsets = gl.arange(0, STEP_N, gl.SliceLayout(0, scores.type.layout))
    ends = positions - step * STEP_N
    visible = offsets[None, :] <= ends[:, None]
    if scoring.window is not None:
        visible &= offsets[None, :] > (ends - scoring.window)[:, None]
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def weigh(scores, row_max, factor):
    """The first half of :func:`.online_softmax.add_tile`: row_max, rescale and weights."""
    new_row_max = gl.maximum(row_max, gl.max(scores, 1))
    # Rows that have seen nothing yet: without this, -inf - -inf.
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = gl.exp2(gl.fma(scores, factor, -(base * factor)[:, None]))
    rescale = gl.exp2((row_max - base) * factor)
    return new_row_max, rescale, weights


@gluon.jit
def sum_weights(weights, rescale, row_sum, acc, ones, dtype: gl.constexpr):
    """Weights as an operand, and the sums of weights with them added."""
    weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    narrow = gl.convert_layout(
        weights, gl.DotOperandLayout(0, row_sum.type.layout, 2), assert_trivial=True
    )
    # Each warp's own matmul: a warpgroup's made prefill 4% slower on an H100 (8 x 2k: 10%).
    row_sum = mma_v2(narrow, ones, times(row_sum, rescale))
    return weights, row_sum


@gluon.jit
def _halves(scores):
    """``[M, 2 N]`` as the left and the right ``[M, N]``, each thread's own registers."""
    M: gl.constexpr = scores.shape[0]
    N: gl.constexpr = scores.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    left, right = scores.reshape([M, 2, N]).permute([0, 2, 1]).split()
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def add(
    MAY_BEGIN_SPLIT: gl.constexpr,
    step, scores, state, v, second_v, ones, scoring, splits,
):  # fmt: skip
    """:func:`.online_softmax.add_tile` of a step's tiles, the last one's values' sums under way.

    Args:
        MAY_BEGIN_SPLIT: whether ``step`` may begin a split.
        v: values of the first tile. second_v: those of the second, if there is one.
    """
    start = step * STEP_N
    if MAY_BEGIN_SPLIT:  # noqa: SIM102 (known when compiling, the other is not)
        if (
            start & (gl.where(start < splits.SPLIT_CHANGE, splits.NEAR_SPLIT, splits.FAR_SPLIT) - 1)
            == 0
        ):
            state = fold(state, scoring.factor)
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    if v.shape[0] == STEP_N:
        row_max, rescale, weights = weigh(scores, row_max, scoring.factor)
        weights, row_sum = sum_weights(weights, rescale, row_sum, acc, ones, v.dtype)
        acc = warpgroup_mma(weights, v, times(acc, rescale), is_async=True)
    else:
        left, right = _halves(scores)
        row_max, rescale, weights = weigh(left, row_max, scoring.factor)
        weights, row_sum = sum_weights(weights, rescale, row_sum, acc, ones, v.dtype)
        acc = warpgroup_mma(weights, v, times(acc, rescale), is_async=True)
        row_max, rescale, weights = weigh(right, row_max, scoring.factor)
        weights, row_sum = sum_weights(weights, rescale, row_sum, total_acc, ones, v.dtype)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        acc = warpgroup_mma(weights, second_v, times(acc, rescale), is_async=True)
    return row_max, row_sum, acc, total_row_max, total_row_sum, total_acc


@gluon.jit
def wait(state):
    """The state with its sums done."""
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return row_max, row_sum, acc, total_row_max, total_row_sum, total_acc


@gluon.jit
def finish(state, sinks, heads, is_line, factor):
    """:func:`.online_softmax.finish` of a folded state; heads and is_line: of lines, ``[M]``, in
    the layout of the sums of weights."""
    weight = gl.max(state[4], 1)
    if sinks is not None:
        sink = gl.load(sinks + heads, mask=is_line, other=0.0).to(gl.float32)
        row_max = gl.convert_layout(state[3], weight.type.layout)
        weight += gl.exp2(gl.fma(-row_max, factor, sink * LOG2E))
    return times(state[5], 1.0 / weight)
