"""Split-KV decode attention over pages. The same launch combines the splits.

PagedAttention (Kwon et al. 2023) with the splits of Flash-Decoding (Dao et al. 2023), for rows of
one query: ``softmax(scale * q @ K.T) @ V``.

A program serves one token, one KV head with its G query heads, and some of the *segments* of the
context. The first segment contains the first splits, which one program folds. Each later split is a
segment. The number of splits in the first segment depends on the batch size (``FIRST_SPLITS``) and
on the context length. A context below ``UNSPLIT_BELOW`` is a single segment. In a context of
``LONG_CONTEXT`` positions or more, the first segment ends at ``SPLIT_CHANGE``. The *workers* of a
context are adjacent programs. They take segments ``worker``, ``worker + num_workers``, ... from the
last one back: the first segments are short, and the work that starts last should end early. If a
context has more than one worker, their states go to ``partial`` and ``stats``, and the program that
arrives last combines them in order (:mod:`.combine`). Any choice of segments and workers and any
order of arrival give the same bits (:mod:`.online_softmax`). So these choices may depend on the
batch size.

With ``key``, the kernel takes the step's queries, keys and values directly from the matmul, and
first normalises, rotates and stores them (:mod:`.decode_prologue`). With a late ``TRIGGER`` the
next kernel starts after that (:func:`.device.triggers_dependents_late`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.e4m3_store import block_width, is_e4m3, slot_width
from ..fused.norm_rope_store import HeadNorm, norm_and_rotate, partners_of
from .combine import combine, is_last_arrival, results_at, store_lines, store_zeros
from .decode_prologue import (
    Angles,
    NewTokens,
    WorkerShare,
    keys_at_once,
    load_angles,
    load_weights,
    prefetch_tile,
    store_new,
)
from .e4m3_tiles import (
    add_scored,
    joined,
    load_tile,
    num_lines,
    places_of,
    scaled_queries,
    score_tile,
    sum_dtype,
    with_scale_blocks,
)
from .online_softmax import (
    ONES,
    Scoring,
    Splits,
    TileShape,
    block_ids,
    count_at_most,
    dot_size,
    empty_state,
    ends_split,
    finish,
    fold,
    head_pages,
    head_size,
    offsets_of,
    segment_begin,
    segments_of,
    split_begin,
    splits_in_first,
    visible_in,
)


@triton.jit
def attend_tiles(  # type: ignore[no-untyped-def]
    q, pages, blocks, begin, end, last, positions, scoring, factor, splits, shape,
    DTYPE: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The total over the tiles that begin in ``[begin, end)``; ``begin`` is a multiple of BLOCK_N.

    Args:
        q: queries; for e4m3 keys, transposed halves. factor: scale of maxima. DTYPE: dtype of the
            queries.
        pages: :class:`.HeadPages`. blocks: the :func:`.block_ids` of ``begin``, loaded in advance.
        last: last position that any of the queries sees. positions: positions of the queries,
            ``[M]``.
        splits, shape: :class:`.Splits` and :class:`.TileShape`.
        FOLD: False if all tiles belong to one split.
    """
    BLOCK_M: tl.constexpr = positions.shape[0]
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    IS_E4M3: tl.constexpr = scoring.unit is not None
    PARTS: tl.constexpr = 2 if IS_E4M3 else 1
    OPERAND: tl.constexpr = q[0].dtype if IS_E4M3 else q.dtype
    SUM: tl.constexpr = sum_dtype(DTYPE, IS_E4M3)
    ones = tl.full((ONES, BLOCK_N) if IS_E4M3 else (BLOCK_N, ONES), 1.0, SUM)
    total = empty_state(BLOCK_M, ONES, shape.DV_PAD // PARTS, PARTS, IS_E4M3)
    state = total
    places = with_scale_blocks(pages, blocks, begin, last, shape)
    for start in tl.range(begin, end, BLOCK_N):
        k, v = load_tile(pages, places, start, last, shape, OPERAND, IS_E4M3)
        # One tile ahead, so that no address waits for the load of its block id.
        places = places_of(pages, start + BLOCK_N, last, shape)
        visible = visible_in(start, positions, scoring.window, BLOCK_N, IS_E4M3)
        scores = score_tile(q, k, scoring, IS_E4M3)
        scores = tl.where(visible, scores, float("-inf"))
        state = add_scored(scores, v, ones, state, scoring, IS_E4M3)
        if FOLD:  # noqa: SIM102 (one is known when compiling, the other is not)
            if ends_split(start + BLOCK_N, splits):
                total = fold(total, state, factor, IS_E4M3)
                state = empty_state(BLOCK_M, ONES, shape.DV_PAD // PARTS, PARTS, IS_E4M3)
    # The last split if its end was not reached; otherwise an empty state, which changes nothing.
    return fold(joined(total, IS_E4M3), joined(state, IS_E4M3), factor)


@triton.jit
def token_of(  # type: ignore[no-untyped-def]
    starts, contexts, num_rows, unit, BY_TOKEN: tl.constexpr, OFFSETS: tl.constexpr = offsets_of
):
    """(row, token, position) of a unit; position -1 if the unit has no work.

    With BY_TOKEN a unit is a token (then at most B units). Otherwise it is a row, served if it has
    one query. OFFSETS: see :func:`.count_at_most`.
    """
    if BY_TOKEN:
        row = unit
        token = unit
        begin = tl.load(starts + unit)
        end = tl.load(starts + unit + 1)
        context = tl.load(contexts + unit)
        if (begin != unit) | (end != unit + 1):  # unusual: a row without exactly one query
            row = count_at_most(starts + 1, num_rows - 1, unit, 1, 1, False, 256, OFFSETS)
            end = tl.load(starts + row + 1, mask=row < num_rows, other=0)
            context = tl.load(contexts + row, mask=row < num_rows, other=0)
        position = tl.where(row < num_rows, context - (end - token), -1)
    else:
        row = unit
        token = tl.load(starts + unit)
        is_single = tl.load(starts + unit + 1) - token == 1
        context = tl.load(contexts + unit)
        position = tl.where(is_single, context - 1, -1)
    return row, token, position


@triton.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=[
        "window", "q_token_stride", "q_head_stride", "table_stride", "num_rows", "num_workers",
        "max_segments", "num_tokens", "k_token_stride", "k_head_stride", "v_token_stride",
        "v_head_stride", "cos_stride", "cos_step", "sin_stride", "sin_step",
    ],
    do_not_specialize_on_alignment=["starts", "contexts", "tables", "table_rows", "slot_mapping"],
)  # fmt: skip
def decode_kernel(  # type: ignore[no-untyped-def]
    query, k_cache, v_cache, out,
    partial,  # float32 [units, HQ, max_segments, DV]
    stats,  # float32 [units, HQ, max_segments, 2]: row_max and row_sum
    arrival_counters,  # int32 [units * HKV], zero before and after the launch
    starts, contexts, tables, table_rows,
    order,  # int32 [units]: unit that starts first, second ...; None: in order of their numbers
    sinks, factor, cap_in, cap_out, window,
    scales,  # float32 [HQ * DV / 128, T] if outputs are quantised, else None
    q_token_stride,  # in units of STEP elements
    q_head_stride, table_stride, num_tokens, num_rows, num_workers, max_segments,
    HQ: tl.constexpr, HKV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NEAR_SPLIT: tl.constexpr, FAR_SPLIT: tl.constexpr, SPLIT_CHANGE: tl.constexpr,
    FIRST_SPLITS: tl.constexpr, UNSPLIT_BELOW: tl.constexpr, LONG_CONTEXT: tl.constexpr,
    PAGE: tl.constexpr, CHUNK: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    TRIGGER: tl.constexpr,  # when the next kernel may start: "early", "late", or "" without PDL
    # For fused RoPE; norms are None without FORM.
    key=None, value=None, cos=None, sin=None, q_weight=None, k_weight=None, slot_mapping=None,
    eps=None, k_token_stride=None, k_head_stride=None,  # strides of heads in units of STEP
    v_token_stride=None, v_head_stride=None,
    cos_stride=None, cos_step=None, sin_stride=None, sin_step=None,  # steps None if both are 1
    R: tl.constexpr = None,  # the first R of DK elements are rotated, by TABLE angles
    TABLE: tl.constexpr = None, FORM: tl.constexpr = None,
):  # fmt: skip
    """``out[t, h] = softmax(scale * query[t, h] @ K.T) @ V`` over the pages of t's row and h's KV
    head.

    Grid: ``(HKV * num_workers, units)``, or ``(HKV, units, num_workers)`` with ``order``. A unit is
    a token if BY_TOKEN, else a row. Shapes: query ``[T, HQ, DK]``, out ``[T, HQ, DV]``, caches
    ``[blocks, PAGE, HKV, DK or DV]``, starts ``[B + 1]``, contexts ``[B]``, tables ``[rows, M]``,
    table_rows ``[B]``; key ``[T, HKV, DK]`` and value likewise, cos and sin ``[1, T, TABLE]``,
    slot_mapping ``[T]``.
    """
    FUSE_ROPE: tl.constexpr = key is not None
    # 8 if rows of cos and sin can be read 8 elements at once, else 1.
    ANGLES: tl.constexpr = 8 if cos_step is None else 1
    PDL: tl.constexpr = TRIGGER != ""
    IS_E4M3: tl.constexpr = is_e4m3(k_cache.dtype.element_ty)
    DK_PAD: tl.constexpr = head_size(DK, IS_E4M3)
    DV_PAD: tl.constexpr = head_size(DV, IS_E4M3)
    SPLITS: tl.constexpr = Splits(NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE)
    SHAPE: tl.constexpr = TileShape(
        DK, DV, DK_PAD, DV_PAD, slot_width(IS_E4M3, HKV, DK), slot_width(IS_E4M3, HKV, DV),
        block_width(IS_E4M3, PAGE, HKV, DK), block_width(IS_E4M3, PAGE, HKV, DV), PAGE, BLOCK_N,
    )  # fmt: skip
    DTYPE: tl.constexpr = query.dtype.element_ty
    QUANTIZE: tl.constexpr = scales is not None
    G: tl.constexpr = HQ // HKV
    GROUP: tl.constexpr = triton.next_power_of_2(G)
    FEW_LINES: tl.constexpr = IS_E4M3 or (FUSE_ROPE and QUANTIZE)  # see decode_prologue.fits
    BLOCK_M: tl.constexpr = num_lines(GROUP, DK_PAD, FUSE_ROPE) if FEW_LINES else dot_size(G)
    FOLD: tl.constexpr = (
        FIRST_SPLITS > 1 or UNSPLIT_BELOW > 0 or LONG_CONTEXT > 0
    )  # a segment may hold several splits
    unit = tl.program_id(1)
    if order is not None:
        head = tl.program_id(0)
        worker = tl.program_id(2)
        unit = tl.load(order + unit)
    else:
        head = tl.program_id(0) % HKV
        worker = tl.program_id(0) // HKV
    # The first kernels of a step write the tensors of the batch and let no kernel start before they
    # end. Weights are never written. So both can be read before the wait.
    row, token, position = token_of(starts, contexts, num_rows, unit, BY_TOKEN)
    seen = tl.maximum(position, 0)  # a padding token, which also has a table
    num_first = splits_in_first(seen, SPLITS, FIRST_SPLITS, UNSPLIT_BELOW, LONG_CONTEXT)
    low, first_segment, last_segment = segments_of(seen, window, num_first, SPLITS)
    if worker > last_segment - first_segment:
        return  # before the wait, to free its slot; worker 0 goes on
    some_row = tl.minimum(row, num_rows - 1)
    table = tables + tl.load(table_rows + some_row).to(tl.int64) * table_stride
    begin = segment_begin(last_segment - worker, low, num_first, SPLITS, BLOCK_N)
    blocks = block_ids(table, begin, seen, PAGE, BLOCK_N)
    k_dims = tl.arange(0, DK_PAD)
    if FUSE_ROPE:
        first_new = tl.where(position < 0, token, tl.load(starts + some_row))
        stores = (first_new < token) | (worker == 0)
        partners = partners_of(k_dims, R)
        q_own, q_others = load_weights(q_weight, k_dims, partners, DK, BLOCK_M, DTYPE, FORM)
        k_size = tl.where(stores, DK, 0)
        keys: tl.constexpr = keys_at_once(IS_E4M3, DK_PAD)
        k_own, k_others = load_weights(k_weight, k_dims, partners, k_size, keys, DTYPE, FORM)
        if PDL:  # noqa: SIM102 (one is known when compiling, the other is not)
            if position >= 0:
                pages = head_pages(k_cache, v_cache, table, head, 0, HKV, DK, DV, PAGE)
                prefetch_tile(
                    pages.k_cache, blocks, begin, SHAPE.K_WIDTH, SHAPE.K_BLOCK, DK, PAGE, BLOCK_N
                )
                prefetch_tile(
                    pages.v_cache, blocks, begin, SHAPE.V_WIDTH, SHAPE.V_BLOCK, DV, PAGE, BLOCK_N
                )
    if PDL:
        tl.extra.cuda.gdc_wait()
        if TRIGGER == "early":
            # Not earlier: programs of the next kernel would take slots where this kernel has none
            # yet. Some multiprocessors would then run three programs of one launch, and others
            # none.
            tl.extra.cuda.gdc_launch_dependents()

    in_group = tl.arange(0, BLOCK_M)
    heads = head * G + in_group
    dims = tl.arange(0, DV_PAD)
    is_head = in_group < G
    results = results_at(
        out, scales, num_tokens, token.to(tl.int64), heads, is_head, 0, DV_PAD, HQ, DV
    )
    if not FUSE_ROPE:  # noqa: SIM102 (one is known when compiling, the other is not)
        if position < 0:
            if BY_TOKEN:  # padding
                store_zeros(results, QUANTIZE)
            return

    q_rows = (
        query
        + token.to(tl.int64) * (q_token_stride * STEP)
        + heads.to(tl.int64)[:, None] * (q_head_stride * STEP)
    )
    q_mask = is_head[:, None] & (k_dims < DK)[None, :]
    q = tl.load(q_rows + k_dims[None, :], mask=q_mask, other=0.0)
    if FUSE_ROPE:
        # Loaded before the keys and used after them, so that both loads are in flight together.
        y = tl.load(q_rows + partners[None, :], mask=q_mask, other=0.0)
        q_tokens = tl.zeros((BLOCK_M,), tl.int64) + token
        c, s = load_angles(
            Angles(cos, sin, cos_stride, cos_step, sin_stride, sin_step, R, TABLE, ANGLES),
            q_tokens, is_head, k_dims,
        )  # fmt: skip
        end_new = tl.where(stores, token + 1, first_new)
        store_new(
            NewTokens(
                key, value, slot_mapping, first_new, end_new,
                k_token_stride, k_head_stride, v_token_stride, v_head_stride, STEP,
            ),
            Angles(cos, sin, cos_stride, cos_step, sin_stride, sin_step, R, TABLE, ANGLES),
            HeadNorm(k_own, k_others, eps, FORM), k_cache, v_cache, head, HKV, token, seen,
            WorkerShare(num_first, last_segment, worker, num_workers), k_dims, partners, SPLITS,
            SHAPE,
        )  # fmt: skip
        if position < 0:  # padding
            store_zeros(results, QUANTIZE)
            return
        if stores:
            tl.debug_barrier()  # other threads of this program are about to load it
        q = norm_and_rotate(q, y, HeadNorm(q_own, q_others, eps, FORM), c, s, k_dims, DK, R, DTYPE)
    if TRIGGER == "late":
        tl.extra.cuda.gdc_launch_dependents()

    q_unit, factors = None, factor
    if IS_E4M3:
        q, q_unit, factors = scaled_queries(q, factor, cap_in, IS_E4M3)
        factor = 1.0  # maxima are logarithms
    positions = tl.zeros((BLOCK_M,), tl.int32) + position
    for behind in range(worker, last_segment - first_segment + 1, num_workers):
        segment = last_segment - behind
        next_segment = tl.maximum(segment - num_workers, 0)
        next_begin = segment_begin(next_segment, low, num_first, SPLITS, BLOCK_N)
        next_blocks = block_ids(table, next_begin, position, PAGE, BLOCK_N)
        end = split_begin(segment + num_first, SPLITS)
        end = tl.minimum(end, position + 1)
        pages = head_pages(k_cache, v_cache, table, head, 0, HKV, DK, DV, PAGE)
        state = attend_tiles(
            q, pages, blocks, begin, end, position, positions,
            Scoring(window, factors, cap_in, cap_out, q_unit), factor, SPLITS, SHAPE, DTYPE, FOLD,
        )  # fmt: skip
        begin = next_begin
        blocks = next_blocks
        if first_segment == last_segment:
            result = finish(state, sinks, heads, is_head, factor)
            store_lines(result, results, DTYPE, QUANTIZE)
        else:
            index = (unit.to(tl.int64) * HQ + heads) * max_segments + (segment - first_segment)
            row_max, row_sum, acc = state
            tl.store(partial + index[:, None] * DV + dims[None, :], acc, mask=results.mask)
            tl.store(stats + index * 2, row_max, mask=is_head)
            tl.store(stats + index * 2 + 1, tl.max(row_sum, 1), mask=is_head)

    if first_segment == last_segment:
        return
    num_segments = last_segment - first_segment + 1
    FEW: tl.constexpr = min(SPLIT_CHANGE // NEAR_SPLIT, CHUNK)
    # Workers without a segment have already returned.
    if is_last_arrival(arrival_counters + unit * HKV + head, tl.minimum(num_workers, num_segments)):
        combine(
            partial, stats, out, scales, num_tokens, sinks, unit, token, head, num_segments,
            max_segments, factor, HQ, G, DV, DV_PAD, GROUP, CHUNK, FEW, DTYPE,
        )  # fmt: skip
