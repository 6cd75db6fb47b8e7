"""The consumer warpgroups of Hopper's prefill attention, from scores to stored outputs: see
:mod:`.prefill_sm90`.

The arithmetic is that of :mod:`.online_softmax` (for e4m3 elements that of :mod:`.e4m3_tiles`) in
Gluon, operation by operation, because the bits depend on it. A state is ``(row_max, row_sum, acc,
total_row_max, total_row_sum, total_acc)``, for the current split and for those before it, of the 64
lines of a warpgroup. Loops advance by ``STEP_N`` positions: one tile of 64, or two of 32.

With e4m3 elements, vectors are stored in halves: elements 0, 2, 4, ... and then 1, 3, 5, ... This
holds for keys and queries, and for outputs until they are stored. Keys and values arrive as float16
with separate scales (:func:`.prefill_sm90_producer.convert`), and maxima are logarithms.

Matmuls run concurrently with other instructions. ptxas allows this only while no other instruction
touches their accumulators. Otherwise it emits warning C7515, and every matmul is waited for. So the
code rescales accumulators and folds splits only while no matmul on them is in flight. The loop over
steps that all queries see fully has no masks.
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

from ..fused.e4m3_groups import GROUP, SMALLEST_SCALE, quantized
from . import online_softmax
from .e4m3_tiles import HEADROOM
from .online_softmax import LOG2E, Scoring, begins_split, per_line

STEP_N = gl.constexpr(64)


@gluon.jit
def offsets_of(WIDTH: gl.constexpr):
    """:func:`.online_softmax.offsets_of` for a warpgroup."""
    return gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def lines_of(
    FROM: gl.constexpr, COUNT: gl.constexpr, head, begin, first, num_queries,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tokens and heads of lines, and the mask of the lines that exist."""
    lines = FROM + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))
    queries = first + lines // G
    is_line = (lines < BLOCK_Q * G) & (queries < num_queries)
    return (begin + queries).to(gl.int64), head * G + lines % G, is_line


@gluon.constexpr_function
def num_entries(BLOCK_N, DV, D):
    """Number of ring entries, each the values ``[BLOCK_N, DV]`` of a tile, that hold a step's keys
    of D elements and its values."""
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
def _beside(by, sums, TURNED: gl.constexpr):
    """``by [M]``, broadcast to accumulators of the same lines, which are columns if TURNED."""
    by = gl.convert_layout(by, gl.SliceLayout(0 if TURNED else 1, sums.type.layout))
    return per_line(by, TURNED)


@gluon.jit
def times(sums, by, TURNED: gl.constexpr = False):
    """Accumulators of lines, each multiplied by ``by``, ``[M]`` in another layout of the same
    lines."""
    return sums * _beside(by, sums, TURNED)


@gluon.jit
def fold_sums(total, sums, a, b, TURNED: gl.constexpr = False):
    by = gl.broadcast(_beside(b, sums, TURNED), sums)[0]
    return gl.fma(sums, by, times(total, a, TURNED))


@gluon.jit
def fold_factors(total_row_max, row_max, factor):
    """The new maxima, and the factors for the accumulators of the total and of the split."""
    new_row_max = gl.maximum(total_row_max, row_max)
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    a = gl.exp2((total_row_max - base) * factor)
    b = gl.exp2((row_max - base) * factor)
    return new_row_max, a, b


@gluon.jit
def fold(state, factor):
    """:func:`.online_softmax.fold`, followed by the state of a new split."""
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    total_row_max, a, b = fold_factors(total_row_max, row_max, factor)
    total_row_sum = fold_sums(total_row_sum, row_sum, a, b)
    total_acc = fold_sums(total_acc, acc, a, b)
    row_max = gl.full_like(row_max, float("-inf"))
    row_sum, acc = gl.zeros_like(row_sum), gl.zeros_like(acc)
    return row_max, row_sum, acc, total_row_max, total_row_sum, total_acc


@gluon.jit
def capped(scores, scoring):
    """:func:`.online_softmax.capped`, if there is a cap."""
    if scoring.cap_in is not None:
        scores = online_softmax.capped(scores, scoring.cap_in, scoring.cap_out)
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
    # For rows that have seen no key: without this, -inf - -inf would be NaN.
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = gl.exp2(gl.fma(scores, factor, -(base * factor)[:, None]))
    rescale = gl.exp2((row_max - base) * factor)
    return new_row_max, rescale, weights


@gluon.jit
def sum_weights(weights, rescale, row_sum, acc, ones, dtype: gl.constexpr):
    """The weights as an operand, and the sums of weights after adding them."""
    weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    narrow = gl.convert_layout(
        weights, gl.DotOperandLayout(0, row_sum.type.layout, 2), assert_trivial=True
    )
    # A matmul per warp: with one per warpgroup, prefill was 4% slower on an H100 (8 x 2k: 10%).
    row_sum = mma_v2(narrow, ones, times(row_sum, rescale))
    return weights, row_sum


@gluon.jit
def sides(scores):
    """``[M, 2 N]`` as its left and right ``[M, N]``, without moving registers between threads."""
    M: gl.constexpr = scores.shape[0]
    N: gl.constexpr = scores.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    left, right = scores.reshape([M, 2, N]).permute([0, 2, 1]).split()
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def add(scores, state, v, second_v, ones, scoring):
    """:func:`.online_softmax.add_tile` for a step's tiles. The matmul with the last tile's values
    is in flight on return.

    Args:
        v: values of the first tile. second_v: values of the second tile, if there is one.
    """
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    if v.shape[0] == STEP_N:
        row_max, rescale, weights = weigh(scores, row_max, scoring.factor)
        weights, row_sum = sum_weights(weights, rescale, row_sum, acc, ones, v.dtype)
        acc = warpgroup_mma(weights, v, times(acc, rescale), is_async=True)
    else:
        left, right = sides(scores)
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
    """The state after its matmuls have completed."""
    row_max, row_sum, acc, total_row_max, total_row_sum, total_acc = state
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return row_max, row_sum, acc, total_row_max, total_row_sum, total_acc


@gluon.jit
def finish(state, sinks, heads, is_line, factor):
    """:func:`.online_softmax.finish` of a folded state. heads, is_line: of the lines, ``[M]``, in
    the layout of the sums of weights."""
    weight = gl.max(state[4], 1)
    if sinks is not None:
        sink = gl.load(sinks + heads, mask=is_line, other=0.0).to(gl.float32)
        row_max = gl.convert_layout(state[3], weight.type.layout)
        weight += gl.exp2(gl.fma(-row_max, factor, sink * LOG2E))
    return times(state[5], 1.0 / weight)


SCALE_ROWS = gl.constexpr(3)
"""Rows of a slot's scales: of keys, of values, and the logarithms of the latter."""


@gluon.jit
def halves(x):
    """``[M, D]``: the even elements of each row, then the odd ones."""
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    return x.reshape([M, D // 2, 2]).permute([0, 2, 1]).reshape([M, D])


@gluon.jit
def whole(x):
    """The inverse of :func:`halves`."""
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
    """The last steps of :func:`.e4m3_tiles.score_tile`: scores times the keys' scales, capped."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    scores = scores * _row_of_scales(scales, slot, 0, COLUMN)[None, :]
    if scoring.cap_in is not None:
        scores = capped(scores * scoring.unit[:, None], scoring)
    return scores


@gluon.jit
def add_e4m3(scores, state, v, scales, slot, ones, scoring):
    """:func:`.e4m3_tiles.add_scored`, with the matmul of the values in flight on return; v: the
    step's values."""
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


_GROUP = gl.constexpr(GROUP)


@gluon.jit
def store_lines(
    lines, out, scales, num_tokens, tokens, heads, is_line, part,
    HQ: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Store ``lines [M, D]``: the D values of each head from element ``part`` on, rounded to the
    model's dtype. With scales, D is a group of 128 channels.

    Args:
        out: ``[T, HQ, DV]``. scales: ``[HQ * DV / 128, T]``, or None. num_tokens: T.
        tokens: int64 ``[M]``. heads: query heads, ``[M]``. is_line: mask of the lines.
    """
    if scales is None:
        _store(lines, out, tokens, heads, is_line, part, HQ, DV)
    else:
        gl.static_assert(lines.shape[1] == _GROUP)
        values, factors = quantized(lines.to(gl.float32))
        _store(values, out, tokens, heads, is_line, part, HQ, DV)
        _store_scales(factors, scales, num_tokens, tokens, heads, is_line, part, DV)


@gluon.jit
def store_zeros(
    out, scales, num_tokens, tokens, heads, is_line, part,
    HQ: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """:func:`store_lines` of zeros in LAYOUT.

    The code does not quantise constant zeros: then all pairs of e4m3 elements are the same, and if
    a word is a pair twice, ptxas before CUDA 13 reads the upper half from a register that was never
    written.
    """
    M: gl.constexpr = tokens.shape[0]
    zeros = gl.zeros([M, D], out.dtype.element_ty, LAYOUT)
    _store(zeros, out, tokens, heads, is_line, part, HQ, DV)
    if scales is not None:
        factors = gl.full([M], SMALLEST_SCALE, gl.float32, tokens.type.layout)
        _store_scales(factors, scales, num_tokens, tokens, heads, is_line, part, DV)


@gluon.jit
def _store(lines, out, tokens, heads, is_line, part, HQ: gl.constexpr, DV: gl.constexpr):
    D: gl.constexpr = lines.shape[1]
    dims = part + gl.arange(0, D, gl.SliceLayout(0, lines.type.layout))
    target = out + (tokens * HQ + heads)[:, None] * DV + dims[None, :]
    mask = is_line[:, None]
    if DV % D:
        mask = mask & (dims < DV)[None, :]
    gl.store(target, lines, mask=mask)


@gluon.jit
def _store_scales(
    factors, scales, num_tokens, tokens, heads, is_line, part, DV: gl.constexpr
):  # fmt: skip
    group = heads.to(gl.int64) * (DV // _GROUP) + part // _GROUP
    gl.store(scales + group * num_tokens + tokens, factors, mask=is_line)


@gluon.jit
def _next(at, STAGES: gl.constexpr):
    slot, phase, _ = at
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase), slot


@gluon.jit
def _weigh_step(
    MASKED: gl.constexpr, MAY_BEGIN_SPLIT: gl.constexpr,
    step, scores, state, slot, v, second_v, scales, ones, positions, scoring, splits,
):  # fmt: skip
    """The state after a step, with the matmul of its values in flight. ``slot``: the ring slot of
    its values.

    Args:
        MASKED: whether a query may not see all keys. MAY_BEGIN_SPLIT: whether ``step`` may begin a
            split.
        scales: for e4m3 elements, else None.
    """
    if scales is None:
        scores = capped(scores, scoring)
    else:
        scores = scaled(scores, scales, slot, scoring)
    if MASKED:
        scores = masked(scores, step, positions, scoring)
    if MAY_BEGIN_SPLIT:  # noqa: SIM102 (known when compiling, the other is not)
        if begins_split(step * STEP_N, splits):
            # With e4m3 elements maxima are logarithms.
            state = fold(state, scoring.factor if scales is None else 1.0)
    if scales is None:
        state = add(scores, state, v, second_v, ones, scoring)
    else:
        state = add_e4m3(scores, state, v, scales, slot, ones, scoring)
    return state


@gluon.jit
def _step(
    MASKED: gl.constexpr,
    MAY_BEGIN_SPLIT: gl.constexpr,
    step, scores, state, at, q_smem, ring, scales, ones, bars, positions, scoring, splits,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Softmax and weighted values of ``step``, overlapped with the scores of the next step.
    ``scales``: for e4m3 elements, else None."""
    slot, _, before = at
    full, empty = bars
    D: gl.constexpr = q_smem.shape[1]
    k = keys_of(ring, slot, D).permute((1, 0))
    v = values_of(ring, slot, 0, D)
    second_v = values_of(ring, slot, STEP_N // ring.shape[1] - 1, D)
    zeros = gl.zeros_like(scores)
    following = warpgroup_mma(q_smem, k, zeros, use_acc=False, is_async=True)
    # Waiting for the next keys here fixes the place of the scores: ptxas reorders the code between
    # two branches, and would start some of them after the softmax.
    at = _next(at, STAGES)
    mbarrier.arrive(empty.index(before))
    mbarrier.wait(full.index(at[0]), at[1])
    state = _weigh_step(
        MASKED, MAY_BEGIN_SPLIT, step, scores, state, slot, v, second_v, scales, ones, positions,
        scoring, splits,
    )  # fmt: skip
    state = wait(state)
    scores = warpgroup_mma_wait(0, deps=(following,))
    return scores, state, at


@gluon.jit
def _attend(
    state, begin, in_window, middle, final, q_smem, ring, scales, ones, bars, positions, scoring,
    splits, S: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The scores of the last step, the state after all steps before it, and the slot of its values.

    Args:
        begin, final: the first and the last step. in_window: the first step that is in the window
            of all queries. middle: the first later step that some query sees only in part.
    """
    full, _ = bars
    mbarrier.wait(full.index(0), 0)
    zeros = gl.zeros([64, STEP_N], gl.float32, S)
    k = keys_of(ring, 0, q_smem.shape[1]).permute((1, 0))
    scores = warpgroup_mma(q_smem, k, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    # The next slot, its barrier's phase (number of waits modulo 2), and the last slot.
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
    BLOCK_M: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The work of a consumer warpgroup: 64 lines from queries to outputs.

    Args:
        scales_smem: for e4m3 elements, else None.
        task: ``start`` is the position of the row's first query, ``last`` the last position of the
            tile.
        part: first element of the values. first_step: first step of the keys.
    """
    (
        query, out, scales, sinks, head, begin, first, num_queries, num_tokens, start, last,
        token_stride, head_stride, window, factor, cap_in, cap_out,
    ) = task  # fmt: skip
    IS_E4M3: gl.constexpr = scales_smem is not None
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
    # Weights of values with scales may have any magnitude.
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
    scoring = Scoring(window, factor, cap_in, cap_out)
    if IS_E4M3:
        q, unit = scaled_queries(q)
        unit = gl.convert_layout(unit, gl.SliceLayout(1, S))
        line_factor = unit * factor
        if cap_in is not None:
            line_factor = gl.full_like(unit, 1.0) * factor
        scoring = Scoring(window, line_factor, cap_in, cap_out, unit)
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
    second_v = values_of(ring, at[0], STEP_N // BLOCK_N - 1, K_PAD)
    if not IS_E4M3:
        # Values of unowned slots must be finite.
        for tile in gl.static_range(STEP_N // BLOCK_N):
            tile_v = values_of(ring, at[0], tile, K_PAD)
            offsets = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, V_LINE))
            exists = offsets <= last - final * STEP_N
            values = tile_v.load(V_LINE)
            tile_v.store(gl.where(exists[:, None], values, gl.zeros_like(values)))
        fence_async_shared()
    state = _weigh_step(
        True, True, final, scores, state, at[0], v, second_v, scales_smem, ones, positions, scoring,
        SPLITS,
    )  # fmt: skip
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
    # Another layout than above: otherwise addresses, computed once, would be spilled over the loop.
    OUT: gl.constexpr = gl.BlockedLayout(
        [V_PAD // 16, 8], [256 // V_PAD, V_PAD // 8], [4, 1], [1, 0]
    )
    tokens, heads, mask = lines_of(
        WARPGROUP * 64, 64, head, begin, first, num_queries, G, BLOCK_Q, OUT
    )
    store_lines(result_smem.load(OUT), out, scales, num_tokens, tokens, heads, mask, part, HQ, DV)
