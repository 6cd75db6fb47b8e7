"""Prefill attention over latent vectors: rows of several queries.

A program serves LINES consecutive lines of one row: all heads of its first query, all heads of its
second query, and so on. It reads all splits in view and folds them in order, with the steps of the
decode kernel (:mod:`.tiles`), so the bits are those of decode. The grid has enough tiles for any
row lengths. Each program finds its row from ``query_starts``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..attention.online_softmax import Splits, count_at_most, dot_precision, dot_size
from .tiles import Vectors, VectorShape, attend_vectors, load_lines


@triton.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=["table_stride", "num_tokens", "num_rows"],
    do_not_specialize_on_alignment=["starts", "contexts", "tables", "table_rows"],
)
def latent_prefill_kernel(  # type: ignore[no-untyped-def]
    query, cache, out, starts, contexts, tables, table_rows, factor, table_stride,
    num_tokens, num_rows,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr,
    LINES: tl.constexpr, BLOCK_N: tl.constexpr, ONES: tl.constexpr,
    NEAR_SPLIT: tl.constexpr, FAR_SPLIT: tl.constexpr, SPLIT_CHANGE: tl.constexpr,
    ROWS: tl.constexpr,  # rows read together
):  # fmt: skip
    """Same as :func:`.decode.latent_decode_kernel`, but causal and for rows of several queries. The
    outputs of tokens after the last row are zeros. Grid: ``(T * H // LINES + B + 2,)``."""
    SPLITS: tl.constexpr = Splits(NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE)
    SHAPE: tl.constexpr = VectorShape(
        R, P, dot_size(R), dot_size(P), PAGE, BLOCK_N, ONES, dot_precision(query.dtype.element_ty)
    )
    DTYPE: tl.constexpr = out.dtype.element_ty
    tile = tl.program_id(0)
    row = count_at_most(starts, num_rows, tile, H, LINES, True, ROWS) - 1
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1, mask=row < num_rows, other=0)
    end = tl.where(row < num_rows, end, num_tokens)
    num_queries = end - begin
    # The last tile, which sees the most, comes first.
    behind = tile - (begin * H // LINES + row)
    first = ((num_queries * H + LINES - 1) // LINES - 1 - behind) * LINES
    if first < 0:
        return
    if (row < num_rows) & (num_queries == 1):  # served by the decode kernel
        return
    lines = first + tl.arange(0, LINES)
    is_line = lines < num_queries * H
    queries, heads = lines // H, lines % H
    tokens = (begin + queries).to(tl.int64)
    dims = tl.arange(0, SHAPE.R_PAD)
    mask = (dims < R)[:, None] & is_line[None, :]
    target = out + (tokens * H + heads)[None, :] * R + dims[:, None]
    if row == num_rows:
        tl.store(target, tl.zeros((SHAPE.R_PAD, LINES), DTYPE), mask=mask)
        return
    start = tl.load(contexts + row) - num_queries
    last = start + tl.minimum((first + LINES - 1) // H, num_queries - 1)
    positions = tl.minimum(start + queries, last)
    loaded = load_lines(query, tokens, heads, is_line, H * (R + P), R + P, SHAPE)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    _, row_sum, acc = attend_vectors(
        loaded, Vectors(cache, table), 0, last + 1, last, positions, factor, SPLITS, SHAPE,
    )  # fmt: skip
    result = acc * (1.0 / tl.max(row_sum, 0))[None, :]
    tl.store(target, result.to(DTYPE), mask=mask)
