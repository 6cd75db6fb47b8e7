"""Attention of rows with several queries over pages (FlashAttention-2, Dao 2023).

A program serves one KV head and a tile of ``BLOCK_M // G`` consecutive queries of one row, whose
G query heads lie side by side along M, so that a tile of keys is read once for the group. It walks
all splits and folds them in order, as the decode kernel does.

The grid holds ``T // queries a tile + B + 1`` tiles, enough for any row lengths; each program finds
its row from ``query_starts``. Tokens behind the last row are one more row, which gets zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagespec.kernels.triton_softmax import block_ids, count_at_most, finish, fold, walk


@triton.jit(
    # What follows the batch must not make new versions of the kernel.
    do_not_specialize=[
        "window",
        "q_token_stride",
        "q_head_stride",
        "table_stride",
        "num_tokens",
        "num_rows",
        "num_tiles",
    ],
    do_not_specialize_on_alignment=["starts", "contexts", "tables"],
)
def prefill_kernel(  # type: ignore[no-untyped-def]
    query,
    k_cache,
    v_cache,
    out,
    starts,
    contexts,
    tables,
    sinks,
    factor,
    cap_in,
    cap_out,
    window,
    q_token_stride,  # in units of Q_STEP elements
    q_head_stride,
    table_stride,
    num_tokens,
    num_rows,
    num_tiles,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    Q_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    KNEE: tl.constexpr,
    PAGE: tl.constexpr,
    ONES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    G: tl.constexpr = HQ // HKV
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    # Later tiles of a row see more keys: longest first, so that the last programs are short.
    tile = num_tiles - 1 - tl.program_id(0) // HKV
    head = tl.program_id(0) % HKV
    row = count_at_most(starts, num_rows + 1, tile, BLOCK_Q, True) - 1
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1, mask=row < num_rows, other=0)
    end = tl.where(row < num_rows, end, num_tokens)
    num_queries = end - begin
    first = (tile - (begin // BLOCK_Q + row)) * BLOCK_Q
    if first >= num_queries:
        return
    if (row < num_rows) & (num_queries == 1):  # the decode kernel's
        return

    lines = tl.arange(0, BLOCK_M)
    queries = first + lines // G
    heads = head * G + lines % G
    is_line = (lines < BLOCK_Q * G) & (queries < num_queries)
    tokens = (begin + queries).to(tl.int64)
    dims = tl.arange(0, DV_PAD)
    mask = is_line[:, None] & (dims < DV)[None, :]
    target = out + (tokens * HQ + heads)[:, None] * DV + dims[None, :]
    if row == num_rows:
        tl.store(target, tl.zeros((BLOCK_M, DV_PAD), out.dtype.element_ty), mask=mask)
        return

    start = tl.load(contexts + row) - num_queries
    last = start + tl.minimum(first + BLOCK_Q, num_queries) - 1
    positions = tl.minimum(start + queries, last)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(start + first - window + 1, 0)
    table = tables + row.to(tl.int64) * table_stride
    blocks = block_ids(table, low // BLOCK_N * BLOCK_N, last, PAGE, BLOCK_N)
    k_dims = tl.arange(0, DK_PAD)
    q_rows = tokens * (q_token_stride * Q_STEP) + heads.to(tl.int64) * (q_head_stride * Q_STEP)
    q = tl.load(
        query + q_rows[:, None] + k_dims[None, :],
        mask=is_line[:, None] & (k_dims < DK)[None, :],
        other=0.0,
    )

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M, ONES), tl.float32)
    acc = tl.zeros((BLOCK_M, DV_PAD), tl.float32)
    total_peak, total_mass, total_acc = peak, mass, acc
    # Tiles that all queries see whole need no mask; with a window, all are masked.
    diagonal = low // BLOCK_N * BLOCK_N
    if not HAS_WINDOW:
        diagonal = (start + first + 1) // BLOCK_N * BLOCK_N
        blocks, total_peak, total_mass, total_acc, peak, mass, acc = walk(
            q,
            k_cache + head * DK,
            v_cache + head * DV,
            table,
            blocks,
            0,
            diagonal,
            last,
            positions,
            window,
            total_peak,
            total_mass,
            total_acc,
            peak,
            mass,
            acc,
            factor,
            cap_in,
            cap_out,
            HKV,
            DK,
            DV,
            DK_PAD,
            DV_PAD,
            BLOCK_N,
            SHORT,
            LONG,
            KNEE,
            PAGE,
            ONES,
            True,
            False,
            HAS_WINDOW,
            HAS_SOFTCAP,
            PRECISION,
        )
    _, total_peak, total_mass, total_acc, peak, mass, acc = walk(
        q,
        k_cache + head * DK,
        v_cache + head * DV,
        table,
        blocks,
        diagonal,
        last + 1,
        last,
        positions,
        window,
        total_peak,
        total_mass,
        total_acc,
        peak,
        mass,
        acc,
        factor,
        cap_in,
        cap_out,
        HKV,
        DK,
        DV,
        DK_PAD,
        DV_PAD,
        BLOCK_N,
        SHORT,
        LONG,
        KNEE,
        PAGE,
        ONES,
        True,
        True,
        HAS_WINDOW,
        HAS_SOFTCAP,
        PRECISION,
    )
    # Folding a split that has only just begun, and is empty, changes nothing.
    total_peak, total_mass, total_acc = fold(
        total_peak, total_mass, total_acc, peak, mass, acc, factor
    )
    result = finish(total_peak, total_mass, total_acc, sinks, heads, is_line, factor, HAS_SINKS)
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
