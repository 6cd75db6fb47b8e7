"""Main loop of Hopper's prefill attention: the consumer warpgroups, from scores to outputs.

The arithmetic is that of :mod:`.online_softmax`, operation by operation; its bits
depend on that. A state is ``(row_max, row_sum, acc, total_row_max, total_row_sum, total_acc)``, of
the current split and of those before it, for the 64 lines of a warpgroup. See :mod:`.prefill_sm90`.

Matmuls run beside other instructions. ptxas allows that only while nothing but they touches their
sums (else its warning C7515, and all wait for all): so sums are rescaled, and splits folded, where
none of theirs is under way. Masks stay away from the loop over tiles that all queries see.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)


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


@gluon.jit
def _weigh(scores, row_max, factor):
    """The first half of :func:`.online_softmax.add_tile`: row_max, rescale and weights."""
    new_row_max = gl.maximum(row_max, gl.max(scores, 1))
    # Rows that have seen nothing yet: without this, -inf - -inf.
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = gl.exp2(gl.fma(scores, factor, -(base * factor)[:, None]))
    rescale = gl.exp2((row_max - base) * factor)
    return new_row_max, rescale, weights


@gluon.jit
def _times(sums, by):
    """Sums of lines, each times ``by``, ``[M]`` of another layout of the same lines."""
    return sums * gl.convert_layout(by, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def _fold_sums(total, sums, a, b):
    layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    b = gl.convert_layout(b, layout)[:, None]
    return gl.fma(sums, gl.broadcast(b, sums)[0], _times(total, a))


@gluon.jit
def _fold(state, factor):
    """:func:`.online_softmax.fold`, and the state of a split that begins."""
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    new_row_max = gl.maximum(total_row_max, row_max)
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    a = gl.exp2((total_row_max - base) * factor)
    b = gl.exp2((row_max - base) * factor)
    total_row_sum = _fold_sums(total_row_sum, row_sum, a, b)
    total_acc = _fold_sums(total_acc, acc, a, b)
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
def _add(
    MAY_BEGIN_SPLIT: gl.constexpr,
    tile, scores, state, ones, v, factor,
    BLOCK_N: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr,
    SPLIT_CHANGE: gl.constexpr,
):  # fmt: skip
    """:func:`.online_softmax.add_tile`, its values' sums under way.

    Args:
        MAY_BEGIN_SPLIT: whether ``tile`` may begin a split.
    """
    start = tile * BLOCK_N
    if MAY_BEGIN_SPLIT:  # noqa: SIM102 (known when compiling, the other is not)
        if start & (gl.where(start < SPLIT_CHANGE, NEAR_SPLIT, FAR_SPLIT) - 1) == 0:
            state = _fold(state, factor)
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    row_max, rescale, weights = _weigh(scores, row_max, factor)
    weights, row_sum = _sum_weights(weights, rescale, row_sum, acc, ones, v.dtype)
    acc = warpgroup_mma(weights, v, _times(acc, rescale), is_async=True)
    return row_max, row_sum, acc, total_row_max, total_row_sum, total_acc


@gluon.jit
def _wait(state):
    """The state with its sums done."""
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return row_max, row_sum, acc, total_row_max, total_row_sum, total_acc


@gluon.jit
def _masked(scores, tile, positions, BLOCK_N: gl.constexpr):
    offsets = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
    visible = offsets[None, :] <= (positions - tile * BLOCK_N)[:, None]
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _step(
    MASKED: gl.constexpr,
    MAY_BEGIN_SPLIT: gl.constexpr,
    tile, scores, state, at, q_smem, ring, ones, bars, positions, factor,
    BLOCK_N: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr,
    SPLIT_CHANGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Softmax and sums of ``tile`` and, beside them, the scores of the next."""
    slot, _, before = at
    full, empty = bars
    k = ring.index(2 * slot).permute((1, 0))
    v = ring.index(2 * slot + 1)
    zeros = gl.zeros_like(scores)
    following = warpgroup_mma(q_smem, k, zeros, use_acc=False, is_async=True)
    # Waiting for the next unit here keeps the scores where they are: ptxas mixes what lies between
    # two branches, and would begin some of them behind the softmax.
    at = _next(at, STAGES)
    mbarrier.arrive(empty.index(before))
    mbarrier.wait(full.index(at[0]), at[1])
    if MASKED:
        scores = _masked(scores, tile, positions, BLOCK_N)
    state = _add(
        MAY_BEGIN_SPLIT, tile, scores, state, ones, v, factor, BLOCK_N, NEAR_SPLIT, FAR_SPLIT,
        SPLIT_CHANGE,
    )  # fmt: skip
    state = _wait(state)
    scores = warpgroup_mma_wait(0, deps=(following,))
    return scores, state, at


@gluon.jit
def _step_late(
    MASKED: gl.constexpr,
    MAY_BEGIN_SPLIT: gl.constexpr,
    tile, weights, scores, state, at, q_smem, ring, ones, bars, positions, factor,
    BLOCK_N: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr,
    SPLIT_CHANGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Softmax of ``tile`` and, beside it, the sums of the values of the tile before and the scores
    of the next: both matmuls of a warpgroup run beside its softmax.

    Args:
        weights: of the tile before, for whose row_max the sums are scaled already.
        scores: of ``tile``.
    """
    slot, _, before = at
    full, empty = bars
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    k = ring.index(2 * slot).permute((1, 0))
    v = ring.index(2 * slot + 1)
    zeros = gl.zeros_like(scores)
    following = warpgroup_mma(q_smem, k, zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma(weights, v, acc, is_async=True)
    at = _next(at, STAGES)
    mbarrier.arrive(empty.index(before))
    mbarrier.wait(full.index(at[0]), at[1])
    if MASKED:
        scores = _masked(scores, tile, positions, BLOCK_N)
    start = tile * BLOCK_N
    old_row_max, old_row_sum = row_max, row_sum
    if MAY_BEGIN_SPLIT:
        begins = start & (gl.where(start < SPLIT_CHANGE, NEAR_SPLIT, FAR_SPLIT) - 1) == 0
        row_max = gl.where(begins, float("-inf"), row_max)
        row_sum = gl.where(begins, 0.0, row_sum)
    row_max, rescale, next_weights = _weigh(scores, row_max, factor)
    next_weights, row_sum = _sum_weights(
        next_weights, rescale, row_sum, total_acc, ones, ring.dtype
    )
    # Over at once. Without a branch here ptxas computes all of the softmax behind the wait below.
    mbarrier.wait(full.index(at[0]), at[1])
    acc = warpgroup_mma_wait(0, deps=(acc,))
    scores = warpgroup_mma_wait(0, deps=(following,))
    if MAY_BEGIN_SPLIT:  # noqa: SIM102 (known when compiling, the other is not)
        if begins:
            folded = _fold(
                (old_row_max, old_row_sum, acc, total_row_max, total_row_sum, total_acc), factor
            )
            acc = folded[2]
            total_row_max, total_row_sum, total_acc = folded[3], folded[4], folded[5]
    acc = _times(acc, rescale)
    state = (row_max, row_sum, acc, total_row_max, total_row_sum, total_acc)
    return next_weights, scores, state, at


@gluon.jit
def _sum_weights(weights, rescale, row_sum, acc, ones, dtype: gl.constexpr):
    """Weights as an operand, and the sums of weights with them added."""
    weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    narrow = gl.convert_layout(
        weights, gl.DotOperandLayout(0, row_sum.type.layout, 2), assert_trivial=True
    )
    # Each warp's own matmul: a warpgroup's made prefill 4% slower on an H100 (8 x 2k: 10%).
    row_sum = mma_v2(narrow, ones, _times(row_sum, rescale))
    return weights, row_sum


@gluon.jit
def _attend_late(
    state, middle, final, q_smem, ring, ones, bars, positions, factor,
    S: gl.constexpr, BLOCK_N: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr,
    SPLIT_CHANGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The weights of the last tile, the state of all tiles but for its values, and their slot.

    Scores are computed of one tile too many, of keys that are not there: no branch about a matmul.
    """
    full, empty = bars
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S)
    mbarrier.wait(full.index(0), 0)
    scores = warpgroup_mma(
        q_smem, ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.wait(full.index(1), 0)
    following = warpgroup_mma(
        q_smem, ring.index(2).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.arrive(empty.index(0))
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    scores = _masked(scores, 0, positions, BLOCK_N)
    row_max, rescale, weights = _weigh(scores, row_max, factor)
    weights, row_sum = _sum_weights(weights, rescale, row_sum, acc, ones, ring.dtype)
    state = (row_max, row_sum, acc, total_row_max, total_row_sum, total_acc)
    scores = warpgroup_mma_wait(0, deps=(following,))
    at = (2, 0, 1)
    mbarrier.wait(full.index(2), 0)
    pairs_end = 1 + gl.maximum(middle - 1, 0) // 2 * 2
    for tile in range(1, pairs_end, 2):  # splits begin at even tiles
        weights, scores, state, at = _step_late(
            False, False, tile, weights, scores, state, at, q_smem, ring, ones, bars, positions,
            factor, BLOCK_N, NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE, STAGES,
        )  # fmt: skip
        weights, scores, state, at = _step_late(
            False, True, tile + 1, weights, scores, state, at, q_smem, ring, ones, bars, positions,
            factor, BLOCK_N, NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE, STAGES,
        )  # fmt: skip
    for tile in range(pairs_end, final + 1):
        weights, scores, state, at = _step_late(
            True, True, tile, weights, scores, state, at, q_smem, ring, ones, bars, positions,
            factor, BLOCK_N, NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE, STAGES,
        )  # fmt: skip
    return weights, state, at


@gluon.jit
def _next(at, STAGES: gl.constexpr):
    slot, phase, _ = at
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase), slot


@gluon.jit
def _attend(
    state, middle, final, q_smem, ring, ones, bars, positions, factor,
    S: gl.constexpr, BLOCK_N: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr,
    SPLIT_CHANGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The scores of the last tile, the state of all tiles before it, and the slot of its values."""
    full, _ = bars
    mbarrier.wait(full.index(0), 0)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S)
    k = ring.index(0).permute((1, 0))
    scores = warpgroup_mma(q_smem, k, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    # The next unit's slot, how often its barrier has been waited for (modulo 2), and the last slot.
    at = (1, 0, 0)
    mbarrier.wait(full.index(1), 0)
    middle = middle // 2 * 2
    for tile in range(0, middle, 2):  # splits begin at even tiles
        scores, state, at = _step(
            False, True, tile, scores, state, at, q_smem, ring, ones, bars, positions, factor,
            BLOCK_N, NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE, STAGES,
        )  # fmt: skip
        scores, state, at = _step(
            False, False, tile + 1, scores, state, at, q_smem, ring, ones, bars, positions, factor,
            BLOCK_N, NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE, STAGES,
        )  # fmt: skip
    for tile in range(middle, final):
        scores, state, at = _step(
            True, True, tile, scores, state, at, q_smem, ring, ones, bars, positions, factor,
            BLOCK_N, NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE, STAGES,
        )  # fmt: skip
    return scores, state, at


@gluon.jit
def consume(
    WARPGROUP: gl.constexpr,
    q_smem, ring, bars, task,
    HQ: gl.constexpr, G: gl.constexpr, D: gl.constexpr, STEP: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr,
    SPLIT_CHANGE: gl.constexpr, STAGES: gl.constexpr, LATE_VALUES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 lines from queries to outputs.

    ``task``: ``start`` is the position of the row's first query, ``last`` the tile's last.
    """
    query, out, head, begin, first, num_queries, start, last, token_stride, head_stride, factor = (
        task
    )
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    MASS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    BLOCK_Q: gl.constexpr = BLOCK_M // G
    ones = gl.full([BLOCK_N, 8], 1.0, ring.dtype, gl.DotOperandLayout(1, MASS, 2))

    tokens, heads, mask = lines_of(
        WARPGROUP * 64, 64, head, begin, first, num_queries, G, BLOCK_Q, LINE
    )
    rows = tokens * (token_stride * STEP) + heads.to(gl.int64) * (head_stride * STEP)
    dims = gl.arange(0, D, gl.SliceLayout(0, LINE))
    q = gl.load(query + rows[:, None] + dims[None, :], mask=mask[:, None], other=0.0)
    q_smem.store(q)
    fence_async_shared()

    lines = WARPGROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
    positions = gl.minimum(start + first + lines // G, last)
    final = last // BLOCK_N  # the last tile
    # The first tile that a query of this warpgroup sees only in part.
    diagonal = (start + first + WARPGROUP * 64 // G + 1) // BLOCK_N
    middle = gl.minimum(diagonal, final)
    row_sum = gl.zeros([64, 8], gl.float32, MASS)
    acc = gl.zeros([64, D], gl.float32, A)
    row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    state = (row_max, row_sum, acc, row_max, row_sum, acc)

    if LATE_VALUES:
        weights, state, at = _attend_late(
            state, middle, final, q_smem, ring, ones, bars, positions, factor,
            S, BLOCK_N, NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE, STAGES,
        )  # fmt: skip
    else:
        scores, state, at = _attend(
            state, middle, final, q_smem, ring, ones, bars, positions, factor,
            S, BLOCK_N, NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE, STAGES,
        )  # fmt: skip

    v = ring.index(2 * at[0] + 1)
    # Values of unowned slots have to be numbers.
    exists = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LINE)) <= last - final * BLOCK_N
    values = v.load(LINE)
    v.store(gl.where(exists[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    if LATE_VALUES:
        row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        state = (row_max, row_sum, acc, total_row_max, total_row_sum, total_acc)
    else:
        scores = _masked(scores, final, positions, BLOCK_N)
        state = _add(
            True, final, scores, state, ones, v, factor,
            BLOCK_N, NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE,
        )  # fmt: skip
    state = _fold(_wait(state), factor)
    weight = gl.max(state[4], 1)
    result = _times(state[5], 1.0 / weight)
    q_smem.store(result.to(ring.dtype))
    # Another layout than above: else addresses, worked out once, would be spilled for the loop.
    OUT: gl.constexpr = gl.BlockedLayout([D // 16, 8], [256 // D, D // 8], [4, 1], [1, 0])
    tokens, heads, mask = lines_of(
        WARPGROUP * 64, 64, head, begin, first, num_queries, G, BLOCK_Q, OUT
    )
    dims = gl.arange(0, D, gl.SliceLayout(0, OUT))
    target = out + (tokens * HQ + heads)[:, None] * D + dims[None, :]
    gl.store(target, q_smem.load(OUT), mask=mask[:, None])
