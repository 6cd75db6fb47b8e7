"""Prefill attention for Hopper with other orders of summation: the kernel of
:mod:`benchmarks.prefill_forms`.

``out[t, h] = softmax(scale * query[t, h] @ K.T) @ V``, causal, over paged keys and values, in
bfloat16. Heads have 128 elements. There are no windows, softcaps, sinks, padding tokens and
quantised outputs, and values of unowned slots must be finite. Grid, loads and layouts are those of
:mod:`pagespec.kernels.attention.prefill_sm90`; keys and values have separate rings.

A *unit* is UNIT keys that share one maximum of the online softmax. The options:

- ORDER: "serial": scores, softmax and values of a unit one after another; other warpgroups keep the
  tensor core busy. "late": values of a unit beside the scores of the next one (FlashAttention-3,
  Shah et al. 2024).
- SUMS of weights: "added": each thread adds its float32 weights. "matmul": bfloat16 weights times
  ones by matmuls of single warps, as in the present kernel; "warpgroup": by those of a warpgroup,
  in serial order.
- TOTALS: "none": one sum per context. "l2": sums begin at zero in every split of SPLIT keys (four
  times as many from position CHANGE on), and totals are in global memory. "tile": sums begin at
  zero in every unit and are folded into the total at once.
- MAXIMA: "exact", or "integer": base-2 logarithms are rounded to multiples of 2^-14, and maxima up
  to integers. Rescaling is then exact, so bits do not depend on when a maximum rises.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pagespec.kernels.attention.online_softmax import count_at_most
from pagespec.kernels.attention.prefill_sm90_consumer import (
    fold_factors,
    fold_sums,
    lines_of,
    offsets_of,
    store_lines,
    times,
    weigh,
)
from pagespec.kernels.attention.prefill_sm90_producer import _load_async

_ROWS = gl.constexpr(1024)
_D = gl.constexpr(128)
_GRID = gl.constexpr(768.0)  # 1.5 * 2^9: float32 sums with it are multiples of 2^-14


class Form(NamedTuple):
    """Constants of one form of the kernel."""

    WARPGROUPS: Any
    UNIT: Any
    ORDER: Any
    SUMS: Any
    TOTALS: Any
    MAXIMA: Any
    SPLIT: Any
    CHANGE: Any


@gluon.constexpr_function
def _layout(N):
    """Accumulators ``[64, N]`` of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.constexpr_function
def _narrow_layout():
    """Accumulators ``[64, 8]`` of matmuls of single warps."""
    return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])


# Totals in global memory: 16-byte pieces, those of a thread 2 KiB apart.


@gluon.constexpr_function
def _pieces_layout(PIECES):
    return gl.BlockedLayout([PIECES, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])


@gluon.jit
def _pieces_at(totals, PIECES: gl.constexpr):
    LAYOUT: gl.constexpr = _pieces_layout(PIECES)
    ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    pieces = gl.arange(0, PIECES, gl.SliceLayout(1, ROWS))
    threads = gl.arange(0, 128, gl.SliceLayout(0, ROWS))
    elements = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    rows = pieces[:, None] * 512 + threads[None, :] * 4
    return totals + rows[:, :, None] + elements[None, None, :]


@gluon.jit
def _load_totals(totals, like):
    """Accumulators ``[64, D]`` in the layout of ``like``, stored by :func:`_store_totals`."""
    PIECES: gl.constexpr = like.shape[1] // 8
    sums = gl.load(_pieces_at(totals, PIECES))
    sums = sums.reshape([PIECES, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(sums.reshape([64, PIECES * 8]), like.type.layout, assert_trivial=True)


@gluon.jit
def _store_totals(totals, sums):
    PIECES: gl.constexpr = sums.shape[1] // 8
    sums = sums.reshape([4, 2, 8, PIECES, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    sums = sums.reshape([PIECES, 128, 4])
    sums = gl.convert_layout(sums, _pieces_layout(PIECES), assert_trivial=True)
    gl.store(_pieces_at(totals, PIECES), sums)


@gluon.jit
def _folded(state, totals, factor):
    """The state after folding a split, and the state of a new one. Row sums and maxima of totals
    stay in registers."""
    row_max, row_sum, acc, total_row_max, total_row_sum = state
    total_row_max, a, b = fold_factors(total_row_max, row_max, factor)
    total_row_sum = fold_sums(total_row_sum, row_sum, a, b)
    _store_totals(totals, fold_sums(_load_totals(totals, acc), acc, a, b))
    row_max = gl.full_like(row_max, float("-inf"))
    row_sum, acc = gl.zeros_like(row_sum), gl.zeros_like(acc)
    return row_max, row_sum, acc, total_row_max, total_row_sum


# The softmax of a unit.


@gluon.jit
def _masked(scores, unit, positions):
    N: gl.constexpr = scores.shape[1]
    offsets = gl.arange(0, N, gl.SliceLayout(0, scores.type.layout))
    visible = offsets[None, :] <= (positions - unit * N)[:, None]
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _weigh(scores, row_max, factor, form: gl.constexpr):
    """The new maxima, the factor of sums so far, and the weights."""
    if form.MAXIMA == "exact":
        row_max, rescale, weights = weigh(scores, row_max, factor)
    else:
        logs = gl.fma(scores, gl.full_like(scores, 1.0) * factor, gl.full_like(scores, _GRID))
        new_row_max = gl.maximum(row_max, gl.ceil(gl.max(logs, 1) - _GRID))
        base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        weights = gl.exp2(logs - (base + _GRID)[:, None])
        rescale = gl.exp2(row_max - base)
        row_max = new_row_max
    return row_max, rescale, weights


@gluon.jit
def _partial_sums(weights):
    """Sums of the weights of each thread: ``[64, 4]``."""
    N: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([64, N // 8, 4, 2]), 3), 1)


@gluon.jit
def _operand(weights, LAYOUT: gl.constexpr):
    return gl.convert_layout(
        weights.to(gl.bfloat16), gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True
    )


@gluon.jit
def _summed(weights, operand, rescale, row_sum, form: gl.constexpr):
    """The sums of weights after adding those of a unit."""
    if form.SUMS == "added":
        row_sum = times(row_sum, rescale) + _partial_sums(weights)
    elif form.SUMS == "matmul":
        NARROW: gl.constexpr = _narrow_layout()
        N: gl.constexpr = weights.shape[1]
        ones = gl.full([N, 8], 1.0, gl.bfloat16, gl.DotOperandLayout(1, NARROW, 2))
        narrow = gl.convert_layout(operand, gl.DotOperandLayout(0, NARROW, 2), assert_trivial=True)
        row_sum = mma_v2(narrow, ones, times(row_sum, rescale))
    return row_sum


@gluon.jit
def _scaled_sum(sums, part, by):
    """``sums * by + part``, rounded once."""
    by = gl.convert_layout(by, gl.SliceLayout(1, sums.type.layout))[:, None]
    return gl.fma(sums, gl.broadcast(by, sums)[0], part)


@gluon.jit
def _add_unit(scores, state, v_ring, ones, slot, factor, form: gl.constexpr):
    """The state with a unit."""
    A: gl.constexpr = _layout(_D)
    row_max, rescale, weights = _weigh(scores, state[0], factor, form)
    operand = _operand(weights, A)
    row_sum = _summed(weights, operand, rescale, state[1], form)
    acc = warpgroup_mma(operand, v_ring.index(slot), times(state[2], rescale), is_async=True)
    if form.SUMS == "warpgroup":
        ROW: gl.constexpr = _layout(8)
        narrow = gl.convert_layout(operand, gl.DotOperandLayout(0, ROW, 2), assert_trivial=True)
        sums = times(row_sum, rescale)
        sums = warpgroup_mma(narrow, ones.permute((1, 0)), sums, is_async=True)
        row_sum = warpgroup_mma_wait(0, deps=(sums,))
    acc, operand = warpgroup_mma_wait(0, deps=(acc, operand))
    added = (row_max, row_sum, acc)
    if form.TOTALS == "l2":
        added = (row_max, row_sum, acc, state[3], state[4])
    return added


@gluon.jit
def _add_tile(scores, state, v_ring, slot, factor, form: gl.constexpr):
    """The state with a unit whose sums begin at zero. Values are multiplied in two halves, so that
    the accumulators fit the registers."""
    HALF: gl.constexpr = _layout(_D // 2)
    row_max, row_sum, left, right = state
    if form.MAXIMA == "integer":
        row_max, a, weights = _weigh(scores, row_max, factor, form)
        operand = _operand(weights, HALF)
        row_sum = _summed(weights, operand, a, row_sum, form)
        b = a
    else:
        own_max, _, weights = weigh(scores, gl.full_like(row_max, float("-inf")), factor)
        row_max, a, b = fold_factors(row_max, own_max, factor)
        operand = _operand(weights, HALF)
        row_sum = fold_sums(row_sum, _partial_sums(weights), a, b)
    left = _add_half(operand, v_ring.index(2 * slot), left, a, b, form)
    right = _add_half(operand, v_ring.index(2 * slot + 1), right, a, b, form)
    return row_max, row_sum, left, right


@gluon.jit
def _add_half(operand, v, sums, a, b, form: gl.constexpr):
    zeros = gl.zeros_like(sums)
    part = warpgroup_mma(operand, v, zeros, use_acc=False, is_async=True)
    part, operand = warpgroup_mma_wait(0, deps=(part, operand))
    if form.MAXIMA == "integer":
        sums = _scaled_sum(sums, part, a)
    else:
        sums = fold_sums(sums, part, a, b)
    return sums


# Loops over units.


@gluon.jit
def _next(slot, phase, SLOTS: gl.constexpr):
    wraps = slot == SLOTS - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _serial_step(
    MASKED: gl.constexpr, unit, state, at, q, rings, bars, totals, positions, factor,
    form: gl.constexpr,
):  # fmt: skip
    """The state with ``unit``, and the next slots."""
    k_ring, v_ring, _ = rings
    full_k, empty_k, full_v, empty_v = bars
    k_slot, k_phase, v_slot, v_phase = at
    if form.TOTALS == "l2":
        # A split is folded while no other accumulators are alive.
        PER_SPLIT: gl.constexpr = form.SPLIT // form.UNIT
        CHANGE: gl.constexpr = form.CHANGE // form.UNIT
        if unit % gl.where(unit <= CHANGE, PER_SPLIT, 4 * PER_SPLIT) == 0:
            state = _folded(state, totals, factor)
    zeros = gl.zeros([64, form.UNIT], gl.float32, _layout(form.UNIT))
    mbarrier.wait(full_k.index(k_slot), k_phase)
    k = k_ring.index(k_slot).permute((1, 0))
    scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(empty_k.index(k_slot))
    mbarrier.wait(full_v.index(v_slot), v_phase)
    if MASKED:
        scores = _masked(scores, unit, positions)
    if form.TOTALS == "tile":
        state = _add_tile(scores, state, v_ring, v_slot, factor, form)
    else:
        state = _add_unit(scores, state, v_ring, rings[2], v_slot, factor, form)
    mbarrier.arrive(empty_v.index(v_slot))
    next_k, next_k_phase = _next(k_slot, k_phase, full_k.shape[0])
    next_v, next_v_phase = _next(v_slot, v_phase, full_v.shape[0])
    return state, (next_k, next_k_phase, next_v, next_v_phase)


@gluon.jit
def _late_step(
    MASKED: gl.constexpr, unit, final, operand, state, at, q, rings, bars,
    positions, factor, form: gl.constexpr,
):  # fmt: skip
    """The weights of ``unit``, the state with the unit before it, and the next slots.

    Args:
        operand: weights of the unit before. final: the last unit.
    """
    A: gl.constexpr = _layout(_D)
    k_ring, v_ring, _ = rings
    full_k, empty_k, full_v, empty_v = bars
    k_slot, k_phase, v_slot, v_phase = at
    zeros = gl.zeros([64, form.UNIT], gl.float32, _layout(form.UNIT))
    k = k_ring.index(k_slot).permute((1, 0))
    scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma(operand, v_ring.index(v_slot), state[2], is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(empty_k.index(k_slot))
    if MASKED:
        scores = _masked(scores, unit, positions)
    row_max, rescale, weights = _weigh(scores, state[0], factor, form)
    # Waiting here fixes the place of the next wait: ptxas moves it between two branches.
    next_k, next_k_phase = _next(k_slot, k_phase, full_k.shape[0])
    next_v, next_v_phase = _next(v_slot, v_phase, full_v.shape[0])
    mbarrier.wait(full_k.index(next_k), next_k_phase, pred=unit < final)
    mbarrier.wait(full_v.index(next_v), next_v_phase)
    acc, operand = warpgroup_mma_wait(0, deps=(acc, operand))
    mbarrier.arrive(empty_v.index(v_slot))
    operand = _operand(weights, A)
    row_sum = _summed(weights, operand, rescale, state[1], form)
    state = (row_max, row_sum, times(acc, rescale))
    return operand, state, (next_k, next_k_phase, next_v, next_v_phase)


@gluon.jit
def _attend_late(
    state, middle, final, q, rings, bars, positions, factor,
    form: gl.constexpr,
):  # fmt: skip
    A: gl.constexpr = _layout(_D)
    k_ring, v_ring, _ = rings
    full_k, empty_k, full_v, _ = bars
    zeros = gl.zeros([64, form.UNIT], gl.float32, _layout(form.UNIT))
    mbarrier.wait(full_k.index(0), 0)
    k = k_ring.index(0).permute((1, 0))
    scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(empty_k.index(0))
    row_max, rescale, weights = _weigh(_masked(scores, 0, positions), state[0], factor, form)
    operand = _operand(weights, A)
    row_sum = _summed(weights, operand, rescale, state[1], form)
    state = (row_max, row_sum, state[2])
    at = (1, 0, 0, 0)
    mbarrier.wait(full_k.index(1), 0, pred=final > 0)
    mbarrier.wait(full_v.index(0), 0)
    middle = gl.maximum(middle, 1)
    for unit in range(1, middle):
        operand, state, at = _late_step(
            False, unit, final, operand, state, at, q, rings, bars, positions, factor,
            form,
        )  # fmt: skip
    for unit in range(middle, final + 1):
        operand, state, at = _late_step(
            True, unit, final, operand, state, at, q, rings, bars, positions, factor,
            form,
        )  # fmt: skip
    acc = warpgroup_mma(operand, v_ring.index(at[2]), state[2], is_async=True)
    acc, operand = warpgroup_mma_wait(0, deps=(acc, operand))
    return state[0], state[1], acc


@gluon.jit
def _consume(
    WARPGROUP: gl.constexpr, q_smem, rings, bars, totals, task,
    HQ: gl.constexpr, G: gl.constexpr, STEP: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """The work of a consumer warpgroup: 64 lines from queries to outputs."""
    (
        query, out, head, begin, first, num_queries, num_tokens, start, last, token_stride,
        head_stride, factor,
    ) = task  # fmt: skip
    S: gl.constexpr = _layout(form.UNIT)
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    BLOCK_Q: gl.constexpr = form.WARPGROUPS * 64 // G
    FIRST: gl.constexpr = WARPGROUP * 64
    tokens, heads, mask = lines_of(FIRST, 64, head, begin, first, num_queries, G, BLOCK_Q, LINE)
    rows = tokens * (token_stride * STEP) + heads.to(gl.int64) * (head_stride * STEP)
    dims = gl.arange(0, _D, gl.SliceLayout(0, LINE))
    q_smem.store(gl.load(query + rows[:, None] + dims[None, :], mask=mask[:, None], other=0.0))
    fence_async_shared()

    lines = FIRST + gl.arange(0, 64, gl.SliceLayout(1, S))
    positions = gl.minimum(start + first + lines // G, last)
    final = last // form.UNIT
    # The first unit that a query of this warpgroup sees only in part.
    middle = gl.minimum((start + first + FIRST // G + 1) // form.UNIT, final)
    row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    if form.SUMS == "added":
        row_sum = _partial_sums(gl.zeros([64, form.UNIT], gl.float32, S))
    elif form.SUMS == "matmul":
        row_sum = gl.zeros([64, 8], gl.float32, _narrow_layout())
    else:
        row_sum = gl.zeros([64, 8], gl.float32, _layout(8))
    acc = gl.zeros([64, _D], gl.float32, _layout(_D))
    if form.TOTALS == "none":
        state = (row_max, row_sum, acc)
    elif form.TOTALS == "tile":
        half = gl.zeros([64, _D // 2], gl.float32, _layout(_D // 2))
        state = (row_max, row_sum, half, half)
    else:
        _store_totals(totals, acc)
        state = (row_max, row_sum, acc, row_max, row_sum)

    if form.ORDER == "late":
        state = _attend_late(state, middle, final, q_smem, rings, bars, positions, factor, form)
    else:
        at = (0, 0, 0, 0)
        for unit in range(middle):
            state, at = _serial_step(
                False, unit, state, at, q_smem, rings, bars, totals, positions, factor, form
            )
        for unit in range(middle, final + 1):
            state, at = _serial_step(
                True, unit, state, at, q_smem, rings, bars, totals, positions, factor, form
            )

    if form.TOTALS == "none":
        row_sum, acc = state[1], state[2]
    elif form.TOTALS == "tile":
        row_sum = state[1]
        acc = gl.join(state[2], state[3]).permute([0, 2, 1]).reshape([64, _D])
    else:
        _, a, b = fold_factors(state[3], state[0], factor)
        row_sum = fold_sums(state[4], state[1], a, b)
        acc = fold_sums(_load_totals(totals, state[2]), state[2], a, b)
    if form.SUMS == "added":
        weight = gl.sum(row_sum, 1)
    else:
        weight = gl.max(row_sum, 1)
    q_smem.store(times(acc, 1.0 / weight).to(query.dtype.element_ty))
    OUT: gl.constexpr = gl.BlockedLayout([8, 8], [2, 16], [4, 1], [1, 0])
    tokens, heads, mask = lines_of(FIRST, 64, head, begin, first, num_queries, G, BLOCK_Q, OUT)
    store_lines(q_smem.load(OUT), out, None, num_tokens, tokens, heads, mask, 0, HQ, _D)


@gluon.jit
def _produce(
    k_desc, v_desc, table, head, last, rings, bars, UNIT: gl.constexpr, PAGE: gl.constexpr
):
    """Load the keys of the first unit; then the keys of each next unit, and the values of the unit
    before it."""
    k_ring, v_ring, _ = rings
    full_k, empty_k, full_v, empty_v = bars
    BYTES: gl.constexpr = UNIT * _D * 2
    PARTS: gl.constexpr = _D // v_ring.shape[2]  # of a unit's values
    at = head * _D
    end = last // UNIT + 1
    mbarrier.expect(full_k.index(0), BYTES)
    _load_async(k_desc, table, 0, last, head, at, k_ring.index(0), full_k.index(0), PAGE)
    k_slot = 1
    k_phase = 1
    v_slot = 0
    v_phase = 1
    for unit in range(end):
        if unit + 1 < end:
            bar = full_k.index(k_slot)
            mbarrier.wait(empty_k.index(k_slot), k_phase)
            mbarrier.expect(bar, BYTES)
            keys = k_ring.index(k_slot)
            _load_async(k_desc, table, (unit + 1) * UNIT, last, head, at, keys, bar, PAGE)
        k_slot, k_phase = _next(k_slot, k_phase, full_k.shape[0])
        bar = full_v.index(v_slot)
        mbarrier.wait(empty_v.index(v_slot), v_phase)
        mbarrier.expect(bar, BYTES)
        for part in gl.static_range(PARTS):
            values = v_ring.index(PARTS * v_slot + part)
            element = at + part * (_D // PARTS)
            _load_async(v_desc, table, unit * UNIT, last, head, element, values, bar, PAGE)
        v_slot, v_phase = _next(v_slot, v_phase, full_v.shape[0])


@gluon.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=["q_token_stride", "q_head_stride", "table_stride", "num_tokens", "num_rows"],
    do_not_specialize_on_alignment=["starts", "contexts", "tables", "table_rows"],
)
def form_kernel(
    k_desc, v_desc, query, out, starts, contexts, tables, table_rows,
    scratch,  # float32 [multiprocessors, WARPGROUPS * 64, 128] for totals, else None
    factor,
    q_token_stride,  # in units of STEP elements
    q_head_stride, table_stride, num_tokens, num_rows,
    HQ: gl.constexpr, HKV: gl.constexpr, STEP: gl.constexpr, PAGE: gl.constexpr,
    HEAD_BY_HEAD: gl.constexpr,  # the longest context whose tiles are not ordered head by head
    WARPGROUPS: gl.constexpr, UNIT: gl.constexpr, ORDER: gl.constexpr,
    SUMS: gl.constexpr, TOTALS: gl.constexpr, MAXIMA: gl.constexpr, SPLIT: gl.constexpr,
    CHANGE: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
):  # fmt: skip
    """Grid: ``(tiles * HKV,)`` with ``T // (WARPGROUPS * 64 // G) + B + 1`` tiles.

    Shapes: query and out ``[T, HQ, 128]``, starts ``[B + 1]``, contexts ``[B]``, tables
    ``[rows, M]``, table_rows ``[B]``.
    """
    G: gl.constexpr = HQ // HKV
    BLOCK_Q: gl.constexpr = WARPGROUPS * 64 // G
    tile = gl.program_id(0) // HKV
    head = gl.program_id(0) % HKV
    row = count_at_most(starts, num_rows, tile, 1, BLOCK_Q, True, _ROWS, offsets_of) - 1
    if row >= num_rows:
        return
    begin = gl.load(starts + row)
    num_queries = gl.load(starts + row + 1) - begin
    num_tiles = (num_queries + BLOCK_Q - 1) // BLOCK_Q
    behind = tile - (begin // BLOCK_Q + row)
    if behind >= num_tiles:
        return
    context = gl.load(contexts + row)
    if context > HEAD_BY_HEAD:
        nth = behind * HKV + head
        head = nth // num_tiles
        behind = nth % num_tiles
    first = (num_tiles - 1 - behind) * BLOCK_Q
    start = context - num_queries
    last = start + gl.minimum(first + BLOCK_Q, num_queries) - 1
    table = tables + gl.load(table_rows + row).to(gl.int64) * table_stride
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = 2 if TOTALS == "tile" else 1
    dtype: gl.constexpr = query.dtype.element_ty
    q_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, 64, _D], OPERAND)
    k_ring = gl.allocate_shared_memory(dtype, [K_SLOTS, UNIT, _D], OPERAND)
    v_ring = gl.allocate_shared_memory(dtype, [V_SLOTS * PARTS, UNIT, _D // PARTS], OPERAND)
    full_k = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(K_SLOTS):
        mbarrier.init(full_k.index(slot), count=1)
        mbarrier.init(empty_k.index(slot), count=WARPGROUPS)
    for slot in gl.static_range(V_SLOTS):
        mbarrier.init(full_v.index(slot), count=1)
        mbarrier.init(empty_v.index(slot), count=WARPGROUPS)
    fence_async_shared()
    bars = (full_k, empty_k, full_v, empty_v)
    ONES_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(
        dtype, [8, UNIT], OPERAND, gl.full([8, UNIT], 1.0, dtype, ONES_LAYOUT)
    )
    rings = (k_ring, v_ring, ones)
    task = (
        query, out, head, begin, first, num_queries, num_tokens, start, last, q_token_stride,
        q_head_stride, factor,
    )  # fmt: skip
    FORM: gl.constexpr = Form(WARPGROUPS, UNIT, ORDER, SUMS, TOTALS, MAXIMA, SPLIT, CHANGE)
    if TOTALS == "l2":
        # One program per multiprocessor fits, so its number is a place for totals.
        multiprocessor = gl.inline_asm_elementwise(
            "mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
        )
        totals0 = scratch + multiprocessor * (WARPGROUPS * 64 * _D)
        totals1 = totals0 + 64 * _D
        totals2 = totals0 + (WARPGROUPS - 1) * 64 * _D
    else:
        totals0: gl.constexpr = None  # type: ignore[no-redef]
        totals1: gl.constexpr = None  # type: ignore[no-redef]
        totals2: gl.constexpr = None  # type: ignore[no-redef]
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, q_smem.index(0), rings, bars, totals0, task, HQ, G, STEP, FORM)),
                (_consume, (1, q_smem.index(1), rings, bars, totals1, task, HQ, G, STEP, FORM)),
                (_produce, (k_desc, v_desc, table, head, last, rings, bars, UNIT, PAGE)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, q_smem.index(0), rings, bars, totals0, task, HQ, G, STEP, FORM)),
                (_consume, (1, q_smem.index(1), rings, bars, totals1, task, HQ, G, STEP, FORM)),
                (_consume, (2, q_smem.index(2), rings, bars, totals2, task, HQ, G, STEP, FORM)),
                (_produce, (k_desc, v_desc, table, head, last, rings, bars, UNIT, PAGE)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
