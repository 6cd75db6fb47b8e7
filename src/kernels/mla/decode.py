"""Decode attention over latent vectors: rows of one query, with contexts split over programs or
not.

A program serves one token and LINES of its heads. If there are many programs, each reads its whole
context. Otherwise ``num_workers`` programs share the context in *segments*. The first segment has
as many splits as a worker's share, and belongs to one worker. Each later split is a segment. The
states go to memory, and a second launch combines them in order: the bits are the same for any
number of workers.

If an indexer selected the positions that a token sees, every token is a unit, whatever its row.
Indices of selected positions then replace positions, so splits and sums depend on the number of
selected positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..attention.combine import combine
from ..attention.decode import token_of
from ..attention.online_softmax import Splits, dot_precision, dot_size, split_begin, split_of
from ..sparse.index_kernels import row_of_token
from .tiles import Vectors, VectorShape, attend_vectors, load_lines


@triton.jit
def splits_in_first(position, num_workers, splits):  # type: ignore[no-untyped-def]
    """Number of splits in the first segment of a context that ends at ``position``."""
    return tl.maximum(split_of(position // num_workers, splits), 1)


@triton.jit
def worker_step(worker, num_workers, num_segments):  # type: ignore[no-untyped-def]
    """The step from a worker's segment to its next one. The first worker has the first segment, and
    the others share the rest."""
    step = tl.where(worker == 0, num_segments, tl.maximum(num_workers - 1, 1))
    return tl.where(num_workers == 1, 1, step)


@triton.jit
def segment_bounds(segment, num_first, position, splits):  # type: ignore[no-untyped-def]
    """First and end position of a segment."""
    begin = tl.where(segment == 0, 0, split_begin(num_first + segment - 1, splits))
    return begin, tl.minimum(split_begin(num_first + segment, splits), position + 1)


@triton.jit
def _unit_of(  # type: ignore[no-untyped-def]
    starts, contexts, num_rows, unit, NUM_CHOSEN: tl.constexpr, BY_TOKEN: tl.constexpr
):
    """(row, token, position, last) of a unit, -1 if it has no work. ``last`` is the position, or
    the index of the last selected position."""
    if NUM_CHOSEN > 0:
        token = unit
        row, position = row_of_token(starts, contexts, num_rows, unit)
        last = tl.minimum(position, NUM_CHOSEN - 1)
    else:
        row, token, position = token_of(starts, contexts, num_rows, unit, BY_TOKEN)
        last = position
    return row, token, position, last


@triton.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=["table_stride", "num_rows", "num_workers", "max_splits"],
    do_not_specialize_on_alignment=["starts", "contexts", "tables", "table_rows"],
)
def latent_decode_kernel(  # type: ignore[no-untyped-def]
    query, cache, out,
    partial,  # of segments, float32 [units, H, max_splits, R]
    stats,  # float32 [units, H, max_splits, 2]: row_max and row_sum
    chosen,  # positions that tokens see, int32 [T, NUM_CHOSEN]; None for all in view
    starts, contexts, tables, table_rows, factor, table_stride, num_rows, num_workers, max_splits,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr,
    LINES: tl.constexpr, BLOCK_N: tl.constexpr, ONES: tl.constexpr,
    NEAR_SPLIT: tl.constexpr, FAR_SPLIT: tl.constexpr, SPLIT_CHANGE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, BY_TOKEN: tl.constexpr, IS_SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, h] = softmax(scale * query[t, h] @ C.T) @ C[:, :R]`` over the vectors C of t's row.

    Grid: ``(groups of heads * num_workers, units)``. A unit is a token if BY_TOKEN, else a row,
    which is served if it has one query. Shapes: query ``[T, H, R + P]`` and out ``[T, H, R]``,
    contiguous; cache ``[blocks, PAGE, 1, R + P]``, starts ``[B + 1]``, contexts ``[B]``, tables
    ``[rows, M]``, table_rows ``[B]``.
    """
    SPLITS: tl.constexpr = Splits(NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE)
    SHAPE: tl.constexpr = VectorShape(
        R, P, dot_size(R), dot_size(P), PAGE, BLOCK_N, ONES, dot_precision(query.dtype.element_ty)
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    GROUPS: tl.constexpr = (H + LINES - 1) // LINES
    DTYPE: tl.constexpr = out.dtype.element_ty
    unit = tl.program_id(1)
    group = tl.program_id(0) % GROUPS
    worker = tl.program_id(0) // GROUPS
    row, token, own, position = _unit_of(starts, contexts, num_rows, unit, NUM_CHOSEN, BY_TOKEN)
    heads = group * LINES + tl.arange(0, LINES)
    is_line = heads < H
    dims = tl.arange(0, SHAPE.R_PAD)
    mask = (dims < R)[:, None] & is_line[None, :]
    target = out + (token.to(tl.int64) * H + heads)[None, :] * R + dims[:, None]
    if position < 0:
        if BY_TOKEN and worker == 0:  # padding
            tl.store(target, tl.zeros((SHAPE.R_PAD, LINES), DTYPE), mask=mask)
        return
    some_row = tl.minimum(row, num_rows - 1)
    table = tables + tl.load(table_rows + some_row).to(tl.int64) * table_stride
    if NUM_CHOSEN > 0:
        vectors = Vectors(cache, table, chosen + token.to(tl.int64) * NUM_CHOSEN, own)
    else:
        vectors = Vectors(cache, table)
    positions = tl.zeros((LINES,), tl.int32) + position
    num_first = splits_in_first(position, num_workers, SPLITS)
    num_segments = split_of(position, SPLITS) + 2 - num_first
    if IS_SPLIT and worker >= num_segments:
        return
    tokens = tl.zeros((LINES,), tl.int64) + token
    lines = load_lines(query, tokens, heads, is_line, H * (R + P), R + P, SHAPE)
    if IS_SPLIT:
        for segment in range(worker, num_segments, worker_step(worker, num_workers, num_segments)):
            begin, end = segment_bounds(segment, num_first, position, SPLITS)
            row_max, row_sum, acc = attend_vectors(
                lines, vectors, begin, end, position, positions, factor, SPLITS, SHAPE
            )
            index = (unit.to(tl.int64) * H + heads) * max_splits + segment
            tl.store(partial + index[None, :] * R + dims[:, None], acc, mask=mask)
            tl.store(stats + index * 2, row_max, mask=is_line)
            tl.store(stats + index * 2 + 1, tl.max(row_sum, 0), mask=is_line)
    else:
        row_max, row_sum, acc = attend_vectors(
            lines, vectors, 0, position + 1, position, positions, factor, SPLITS, SHAPE
        )
        result = acc * (1.0 / tl.max(row_sum, 0))[None, :]
        tl.store(target, result.to(DTYPE), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "num_workers", "max_splits"],
    do_not_specialize_on_alignment=["starts", "contexts"],
)
def combine_kernel(  # type: ignore[no-untyped-def]
    partial, stats, out, starts, contexts, factor, num_rows, num_workers, max_splits,
    H: tl.constexpr, R: tl.constexpr,
    NEAR_SPLIT: tl.constexpr, FAR_SPLIT: tl.constexpr, SPLIT_CHANGE: tl.constexpr,
    CHUNK: tl.constexpr, NUM_CHOSEN: tl.constexpr, BY_TOKEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fold the segments of one head and unit, and store the output. Grid: ``(H, units)``."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    SPLITS: tl.constexpr = Splits(NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE)
    unit = tl.program_id(1)
    _, token, _, position = _unit_of(starts, contexts, num_rows, unit, NUM_CHOSEN, BY_TOKEN)
    if position < 0:
        return
    num_segments = split_of(position, SPLITS) + 2 - splits_in_first(position, num_workers, SPLITS)
    combine(
        partial, stats, out, None, None, None, unit, token, tl.program_id(0), num_segments,
        max_splits, factor, H, 1, R, dot_size(R), 1, CHUNK, min(SPLIT_CHANGE // NEAR_SPLIT, CHUNK),
        out.dtype.element_ty,
    )  # fmt: skip
