"""Prefill attention over pages: rows with several queries (FlashAttention-2, Dao 2023).

A program serves one KV head and a tile of ``BLOCK_M // G`` consecutive queries of one row. The G
query heads of a query are side by side along M, so a tile of keys is read once for the group. The
program reads all splits and folds them in order, as the decode kernel does. If the accumulators of
all values do not fit its registers, ``PARTS`` programs serve the tile: each computes all scores,
and accumulates its share of the value dimensions.

The grid has ``T // queries per tile + B + 1`` tiles, enough for any row lengths. Each program finds
its row from ``query_starts``. Tokens after the last row form one more row, whose outputs are zeros.
Long tiles should start first and idle programs last. So the grid skips leading rows of a single
query, which the decode kernel serves. Then come the rows in order: the rest of a prompt that an
earlier step began before a new prompt. Within a row the last tile, which sees the most keys, comes
first.

The bits are those of the decode kernel. :func:`attend_tiles_fold_late` computes the steps of the
decode kernel's ``attend_tiles`` (:mod:`.online_softmax`), but folds later.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.e4m3_store import block_width, is_e4m3, slot_width
from .combine import results_at, store_lines, store_zeros
from .e4m3_tiles import (
    add_scored,
    joined,
    load_tile,
    places_of,
    scaled_queries,
    score_tile,
    sum_dtype,
)
from .online_softmax import (
    ONES,
    Scoring,
    Splits,
    TileShape,
    begins_split,
    count_at_most,
    dot_size,
    empty_state,
    finish,
    fold,
    head_pages,
    head_size,
    offsets_of,
)


@triton.jit
def attend_tiles_fold_late(  # type: ignore[no-untyped-def]
    q, pages, begin, first, last, positions, scoring, factor, splits, shape, DTYPE: tl.constexpr
):
    """The total over the tiles from ``begin``, a multiple of BLOCK_N, to the tile of ``last``.

    A split is folded in the next tile, after that tile's scores, not at its end. At that point no
    matmul with ``acc`` is in flight. On Hopper such a matmul runs concurrently with other
    instructions. If any code reads its accumulators before the wait, ptxas waits for every matmul
    of the kernel at once (its warning C7515). Times: docs/notes/attention.md.

    Args:
        q: queries; for e4m3 keys, halves. factor: scale of maxima. DTYPE: dtype of the queries.
        positions: positions of the queries, ``[M]``, from ``first`` to ``last``.
    """
    BLOCK_M: tl.constexpr = positions.shape[0]
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    IS_E4M3: tl.constexpr = scoring.unit is not None
    PARTS: tl.constexpr = 2 if IS_E4M3 else 1
    OPERAND: tl.constexpr = q[0].dtype if IS_E4M3 else q.dtype
    SUM: tl.constexpr = sum_dtype(DTYPE, IS_E4M3)
    inf = float("inf")
    diagonal = (first + 1) // BLOCK_N * BLOCK_N
    offsets = tl.arange(0, BLOCK_N)
    ones = tl.full((BLOCK_N, ONES), 1.0, SUM)
    state = empty_state(BLOCK_M, ONES, shape.DV_PAD // PARTS, PARTS)
    total = state
    places = places_of(pages, begin, last, shape)
    for start in tl.range(begin, last + 1, BLOCK_N):
        k, v = load_tile(pages, places, start, last, shape, OPERAND, False)
        # One tile ahead, so that no address waits for the load of its block id.
        places = places_of(pages, start + BLOCK_N, last, shape)
        scores = score_tile(q, k, scoring, False)
        if begins_split(start, splits):
            total = fold(total, state, factor)
            state = empty_state(BLOCK_M, ONES, shape.DV_PAD // PARTS, PARTS)
            # Masks only what is masked below in any case, and so keeps all this code after the
            # scores.
            scores = tl.where(offsets[None, :] <= (positions - start)[:, None], scores, -inf)
        in_part = start >= diagonal  # queries may see only a part of the tile
        if scoring.window is not None:
            in_part |= start <= last - scoring.window
        if in_part:
            visible = offsets[None, :] <= (positions - start)[:, None]
            if scoring.window is not None:
                visible &= offsets[None, :] > (positions - start - scoring.window)[:, None]
            scores = tl.where(visible, scores, -inf)
        state = add_scored(scores, v, ones, state, scoring, False)
    return joined(fold(total, state, factor), False)


@triton.jit
def num_leading_singles(  # type: ignore[no-untyped-def]
    starts, num_rows, WIDTH: tl.constexpr, OFFSETS: tl.constexpr = offsets_of
):
    """The number of leading rows with one query; reads WIDTH rows at a time."""
    num_singles = num_rows
    for first in range(0, num_rows, WIDTH):
        row = first + OFFSETS(WIDTH)
        end = tl.load(starts + row + 1, mask=row < num_rows, other=0)
        others = tl.where((row < num_rows) & (end != row + 1), row, num_rows)
        num_singles = tl.minimum(num_singles, tl.min(others, 0))
    return num_singles


@triton.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=[
        "window", "q_token_stride", "q_head_stride", "table_stride", "num_tokens", "num_rows",
    ],
    do_not_specialize_on_alignment=["starts", "contexts", "tables", "table_rows"],
)  # fmt: skip
def prefill_kernel(  # type: ignore[no-untyped-def]
    query, k_cache, v_cache, out, starts, contexts, tables, table_rows, sinks, factor, cap_in,
    cap_out, window,
    scales,  # float32 [HQ * DV / 128, T] if outputs are quantised, else None
    q_token_stride,  # in units of STEP elements
    q_head_stride, table_stride, num_tokens, num_rows,
    HQ: tl.constexpr, HKV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NEAR_SPLIT: tl.constexpr, FAR_SPLIT: tl.constexpr,
    SPLIT_CHANGE: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr,  # rows read together
):  # fmt: skip
    """``out[t, h] = softmax(scale * query[t, h] @ K.T) @ V``, causal, for rows of several queries.

    Grid: ``(tiles * HKV * PARTS,)`` with ``T // (BLOCK_M // G) + B + 1`` tiles. Shapes: query
    ``[T, HQ, DK]``, out ``[T, HQ, DV]``, caches ``[blocks, PAGE, HKV, DK or DV]``, starts
    ``[B + 1]``, contexts ``[B]``, tables ``[rows, M]``, table_rows ``[B]``.
    """
    IS_E4M3: tl.constexpr = is_e4m3(k_cache.dtype.element_ty)
    DK_PAD: tl.constexpr = head_size(DK, IS_E4M3)
    PART: tl.constexpr = dot_size(DV) // PARTS
    PART_USED: tl.constexpr = DV // PARTS
    G: tl.constexpr = HQ // HKV
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    num_singles = num_leading_singles(starts, num_rows, ROWS)
    tile = tl.program_id(0) // (HKV * PARTS) + num_singles // BLOCK_Q + num_singles
    if tile > num_tokens // BLOCK_Q + num_rows:
        return
    head = tl.program_id(0) // PARTS % HKV
    part = tl.program_id(0) % PARTS * PART
    row = count_at_most(starts, num_rows, tile, 1, BLOCK_Q, True, ROWS) - 1
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1, mask=row < num_rows, other=0)
    end = tl.where(row < num_rows, end, num_tokens)
    num_queries = end - begin
    behind = tile - (begin // BLOCK_Q + row)
    first = ((num_queries + BLOCK_Q - 1) // BLOCK_Q - 1 - behind) * BLOCK_Q
    if first < 0:
        return
    if (row < num_rows) & (num_queries == 1):  # served by the decode kernel
        return

    lines = tl.arange(0, BLOCK_M)
    queries = first + lines // G
    heads = head * G + lines % G
    is_line = (lines < BLOCK_Q * G) & (queries < num_queries)
    tokens = (begin + queries).to(tl.int64)
    DTYPE: tl.constexpr = query.dtype.element_ty
    QUANTIZE: tl.constexpr = scales is not None
    results = results_at(out, scales, num_tokens, tokens, heads, is_line, part, PART, HQ, DV)
    if row == num_rows:
        store_zeros(results, QUANTIZE)
        return

    start = tl.load(contexts + row) - num_queries
    last = start + tl.minimum(first + BLOCK_Q, num_queries) - 1
    positions = tl.minimum(start + queries, last)
    low = 0
    if window is not None:
        low = tl.maximum(start + first - window + 1, 0)
    k_dims = tl.arange(0, DK_PAD)
    q_rows = tokens * (q_token_stride * STEP) + heads.to(tl.int64) * (q_head_stride * STEP)
    q = tl.load(
        query + q_rows[:, None] + k_dims[None, :],
        mask=is_line[:, None] & (k_dims < DK)[None, :],
        other=0.0,
    )
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    pages = head_pages(k_cache, v_cache, table, head, part, HKV, DK, DV, PAGE)
    begin_tile = low // BLOCK_N * BLOCK_N
    SPLITS: tl.constexpr = Splits(NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE)
    SHAPE: tl.constexpr = TileShape(
        DK, PART_USED, DK_PAD, PART,
        slot_width(IS_E4M3, HKV, DK), slot_width(IS_E4M3, HKV, DV),
        block_width(IS_E4M3, PAGE, HKV, DK), block_width(IS_E4M3, PAGE, HKV, DV), PAGE, BLOCK_N,
    )  # fmt: skip
    q_unit, factors = None, factor
    if IS_E4M3:
        q, q_unit, factors = scaled_queries(q, factor, cap_in, False)
        factor = 1.0  # maxima are logarithms
    total = attend_tiles_fold_late(
        q, pages, begin_tile, start + first, last, positions,
        Scoring(window, factors, cap_in, cap_out, q_unit), factor, SPLITS, SHAPE, DTYPE,
    )  # fmt: skip
    result = finish(total, sinks, heads, is_line, factor)
    store_lines(result, results, DTYPE, QUANTIZE)
