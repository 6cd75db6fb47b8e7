"""Main loop of Hopper's prefill attention: the consumer warpgroups, from scores to outputs.

Matmuls run beside other instructions. ptxas allows that only while nothing but they touches their
sums (else its warning C7515, and all wait for all): so sums are rescaled, and splits folded, where
none of theirs is under way. Masks stay away from the loop over steps that all queries see. The
arithmetic is :mod:`.prefill_sm90_softmax`; see :mod:`.prefill_sm90`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .bundles import Scoring, Splits
from .prefill_sm90_e4m3 import add_e4m3, scaled, scaled_queries, whole
from .prefill_sm90_softmax import (
    STEP_N,
    add,
    capped,
    finish,
    fold,
    keys_of,
    lines_of,
    masked,
    values_of,
    wait,
)
from .prefill_sm90_store import store_lines


@gluon.jit
def _next(at, STAGES: gl.constexpr):
    slot, phase, _ = at
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase), slot


@gluon.jit
def _step(
    MASKED: gl.constexpr,
    MAY_BEGIN_SPLIT: gl.constexpr,
    step, scores, state, at, q_smem, ring, scales, ones, bars, positions, scoring, splits,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Softmax and sums of ``step`` and, beside them, the scores of the next. ``scales``: of e4m3
    numbers (:mod:`.prefill_sm90_e4m3`), else None."""
    slot, _, before = at
    full, empty = bars
    D: gl.constexpr = q_smem.shape[1]
    k = keys_of(ring, slot, D).permute((1, 0))
    v = values_of(ring, slot, 0, D)
    second_v = values_of(ring, slot, STEP_N // ring.shape[1] - 1, D)
    zeros = gl.zeros_like(scores)
    following = warpgroup_mma(q_smem, k, zeros, use_acc=False, is_async=True)
    # Waiting for the next keys here keeps the scores where they are: ptxas mixes what lies between
    # two branches, and would begin some of them behind the softmax.
    at = _next(at, STAGES)
    mbarrier.arrive(empty.index(before))
    mbarrier.wait(full.index(at[0]), at[1])
    if scales is None:
        scores = capped(scores, scoring)
    else:
        scores = scaled(scores, scales, slot, scoring)
    if MASKED:
        scores = masked(scores, step, positions, scoring)
    if scales is None:
        state = add(MAY_BEGIN_SPLIT, step, scores, state, v, second_v, ones, scoring, splits)
    else:
        state = add_e4m3(
            MAY_BEGIN_SPLIT, step, scores, state, v, scales, slot, ones, scoring, splits
        )
    state = wait(state)
    scores = warpgroup_mma_wait(0, deps=(following,))
    return scores, state, at


@gluon.jit
def _attend(
    state, begin, in_window, middle, final, q_smem, ring, scales, ones, bars, positions, scoring,
    splits, S: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The scores of the last step, the state of all steps before it, and the slot of its values.

    Args:
        begin, final: the first and the last step. in_window: the first one that is in the window
            of all queries. middle: the first behind it that a query sees in part.
    """
    full, _ = bars
    mbarrier.wait(full.index(0), 0)
    zeros = gl.zeros([64, STEP_N], gl.float32, S)
    k = keys_of(ring, 0, q_smem.shape[1]).permute((1, 0))
    scores = warpgroup_mma(q_smem, k, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    # The next slot, how often its barrier has been waited for (modulo 2), and the last slot.
    at = (1, 0, 0)
    mbarrier.wait(full.index(1), 0)
    middle = middle // 2 * 2
    pairs = 0
    if scoring.window is not None:
        pairs = gl.minimum((in_window + 1) // 2 * 2, final)
        middle = gl.maximum(middle, pairs)
        for step in range(begin, pairs):
            scores, state, at = _step(
                True, True, step, scores, state, at, q_smem, ring, scales, ones, bars, positions,
                scoring, splits, STAGES,
            )  # fmt: skip
    for step in range(pairs, middle, 2):  # splits begin at even steps
        scores, state, at = _step(
            False, True, step, scores, state, at, q_smem, ring, scales, ones, bars, positions,
            scoring, splits, STAGES,
        )  # fmt: skip
        scores, state, at = _step(
            False, False, step + 1, scores, state, at, q_smem, ring, scales, ones, bars, positions,
            scoring, splits, STAGES,
        )  # fmt: skip
    for step in range(middle, final):
        scores, state, at = _step(
            True, True, step, scores, state, at, q_smem, ring, scales, ones, bars, positions,
            scoring, splits, STAGES,
        )  # fmt: skip
    return scores, state, at


@gluon.jit
def consume(
    WARPGROUP: gl.constexpr,
    q_smem, ring, scales_smem, bars, task, part, first_step,
    HQ: gl.constexpr, G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, STEP: gl.constexpr,
    BLOCK_M: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr,
    SPLIT_CHANGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 lines from queries to outputs.

    Args:
        scales_smem: of e4m3 numbers, else None.
        task: ``start`` is the position of the row's first query, ``last`` the tile's last.
        part: the first of the values' elements. first_step: the first step of the keys.
    """
    (
        query, out, scales, sinks, head, begin, first, num_queries, num_tokens, start, last,
        token_stride, head_stride, window, factor, cap_in, cap_out,
    ) = task  # fmt: skip
    IS_E4M3: gl.constexpr = scales_smem is not None
    SPLITS: gl.constexpr = Splits(NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE)
    K_PAD: gl.constexpr = q_smem.shape[1]
    V_PAD: gl.constexpr = ring.shape[2]
    BLOCK_N: gl.constexpr = ring.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_N, 16])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_PAD, 16])
    MASS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    K_LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K_PAD, K_PAD // 8], [4, 1], [1, 0])
    V_LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V_PAD, V_PAD // 8], [4, 1], [1, 0])
    BLOCK_Q: gl.constexpr = BLOCK_M // G
    # Weights of values with scales are of any size.
    SUM: gl.constexpr = gl.bfloat16 if IS_E4M3 else ring.dtype
    ones = gl.full([BLOCK_N, 8], 1.0, SUM, gl.DotOperandLayout(1, MASS, 2))

    tokens, heads, mask = lines_of(
        WARPGROUP * 64, 64, head, begin, first, num_queries, G, BLOCK_Q, K_LINE
    )
    rows = tokens * (token_stride * STEP) + heads.to(gl.int64) * (head_stride * STEP)
    dims = gl.arange(0, K_PAD, gl.SliceLayout(0, K_LINE))
    mask = mask[:, None]
    if DK < K_PAD:
        mask = mask & (dims < DK)[None, :]
    q = gl.load(query + rows[:, None] + dims[None, :], mask=mask, other=0.0)
    scoring = Scoring(window, factor, cap_in, cap_out, None)
    if IS_E4M3:
        q, unit = scaled_queries(q)
        unit = gl.convert_layout(unit, gl.SliceLayout(1, S))
        line_factor = unit * factor
        if cap_in is not None:
            line_factor = gl.full_like(unit, 1.0) * factor
        scoring = Scoring(window, line_factor, cap_in, cap_out, None, unit)
        factor = 1.0  # maxima are logarithms
    q_smem.store(q)
    fence_async_shared()

    lines = WARPGROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
    positions = gl.minimum(start + first + lines // G, last)
    final = last // STEP_N  # the last step
    # The first step that a query of this warpgroup sees only in part.
    diagonal = (start + first + WARPGROUP * 64 // G + 1) // STEP_N
    middle = gl.minimum(diagonal, final)
    in_window = 0
    if window is not None:
        highest = gl.minimum(start + first + (WARPGROUP * 64 + 63) // G, last)
        in_window = gl.maximum(first_step, gl.maximum(highest - window + STEP_N, 0) // STEP_N)
    row_sum = gl.zeros([64, 8], gl.float32, MASS)
    acc = gl.zeros([64, V_PAD], gl.float32, A)
    row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, TILE))
    state = (row_max, row_sum, acc, row_max, row_sum, acc)

    scores, state, at = _attend(
        state, first_step, in_window, middle, final, q_smem, ring, scales_smem, ones, bars,
        positions, scoring, SPLITS, S, STAGES,
    )  # fmt: skip

    v = values_of(ring, at[0], 0, K_PAD)
    if IS_E4M3:
        scores = masked(scaled(scores, scales_smem, at[0], scoring), final, positions, scoring)
        state = add_e4m3(True, final, scores, state, v, scales_smem, at[0], ones, scoring, SPLITS)
    else:
        # Values of unowned slots have to be numbers.
        second_v = values_of(ring, at[0], STEP_N // BLOCK_N - 1, K_PAD)
        for tile in gl.static_range(STEP_N // BLOCK_N):
            tile_v = values_of(ring, at[0], tile, K_PAD)
            offsets = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, V_LINE))
            exists = offsets <= last - final * STEP_N
            values = tile_v.load(V_LINE)
            tile_v.store(gl.where(exists[:, None], values, gl.zeros_like(values)))
        fence_async_shared()
        scores = masked(capped(scores, scoring), final, positions, scoring)
        state = add(True, final, scores, state, v, second_v, ones, scoring, SPLITS)
    state = fold(wait(state), factor)
    _, heads, mask = lines_of(WARPGROUP * 64, 64, head, begin, first, num_queries, G, BLOCK_Q, MASS)
    result = finish(state, sinks, heads, mask, factor)
    result = result.to(query.dtype.element_ty)
    result_smem = q_smem
    if IS_E4M3:
        result = whole(result)
    if IS_E4M3 or V_PAD < K_PAD:
        result_smem = q_smem._reinterpret(query.dtype.element_ty, [64, V_PAD], q_smem.layout)
    result_smem.store(result)
    # Another layout than above: else addresses, worked out once, would be spilled for the loop.
    OUT: gl.constexpr = gl.BlockedLayout(
        [V_PAD // 16, 8], [256 // V_PAD, V_PAD // 8], [4, 1], [1, 0]
    )
    tokens, heads, mask = lines_of(
        WARPGROUP * 64, 64, head, begin, first, num_queries, G, BLOCK_Q, OUT
    )
    store_lines(result_smem.load(OUT), out, scales, num_tokens, tokens, heads, mask, part, HQ, DV)
