"""Sort the rows of a mixture of experts by expert: compute the destination of each row.

A counting sort replaces a library's sort, histogram, sum and permutation, each of which takes one
or more launches. It is stable and uses no atomics. The number of programs depends only on shapes,
so calls can be captured. With few rows there is one launch with one program per expert, which reads
all rows and places its own. With many rows, one launch counts each block's rows by expert. In a
second launch each block places its rows after those of preceding experts and blocks, in their
order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import overlap_options
from ..jit.parallel_build import may_skip_launches
from ..overlap import overlap

# Rows that a program reads at once, by the number of rows, and its warps.
_BLOCKS = ((128, 128, 4), (2048, 1 << 40, 8))
# From this value of rows x (experts + 128) on there is one program per block of rows. On an H200
# the limit is about 30,000 rows with 64 experts, 16,000 with 256 and 9,000 with 512.
_MANY = 6_000_000
_BLOCK = 512
_COUNTS_AT_ONCE = 8192
_COMPARED = tl.constexpr(32)  # rows that are compared at once with a block's rows
_OF_ROWS: dict[str, Any] = {
    "do_not_specialize": ["num_rows"],
    "do_not_specialize_on_alignment": ["ids", "num_real_tokens"],
}


@triton.jit
def _bins(  # type: ignore[no-untyped-def]
    ids, row, num_rows, num_real_tokens, E: tl.constexpr, TOP_K: tl.constexpr
):
    """For each row: its expert, E if it has none, E + 1 if the row does not exist; and its id."""
    found = tl.load(ids + row, mask=row < num_rows, other=E + 1)
    num_real = num_rows
    if num_real_tokens is not None:
        num_real = tl.minimum(tl.load(num_real_tokens) * TOP_K, num_rows)
    bins = tl.minimum(found, E).to(tl.int32)
    return tl.where(row < num_real, bins, tl.where(row < num_rows, E, E + 1)), found


@triton.jit(**_OF_ROWS)
def _sort_kernel(  # type: ignore[no-untyped-def]
    ids, sorted_ids, order, inverse, offs, num_rows, num_real_tokens,
    E: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the rows of one expert, and their end. Grid: ``(E + 1,)``. The last program has the
    rows without an expert: their ids are E or more, or they are padding."""
    overlap(PDL)
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    num_before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        bins, _ = _bins(ids, start + i, num_rows, num_real_tokens, E, TOP_K)
        num_before += (bins < expert).to(tl.int32)
    end = tl.sum(num_before, 0)
    for start in range(0, num_rows, BLOCK):
        row = start + i
        bins, found = _bins(ids, row, num_rows, num_real_tokens, E, TOP_K)
        is_here = bins == expert
        at = end + tl.cumsum(is_here.to(tl.int32), 0) - 1
        tl.store(order + at, row.to(tl.int64), mask=is_here)
        tl.store(sorted_ids + at, found, mask=is_here)
        tl.store(inverse + row, at.to(tl.int64), mask=is_here)
        end += tl.sum(is_here.to(tl.int32), 0)
    if expert < E:
        tl.store(offs + expert, end)


@triton.jit(**_OF_ROWS)
def _count_kernel(  # type: ignore[no-untyped-def]
    ids, counts, num_rows, num_real_tokens,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Count the rows of a block per expert: ``counts [blocks, BINS]``. Grid: ``(blocks,)``."""
    overlap(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bins, _ = _bins(ids, row, num_rows, num_real_tokens, E, TOP_K)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(bins, BINS))


@triton.jit(**_OF_ROWS)
def _place_kernel(  # type: ignore[no-untyped-def]
    ids, counts, sorted_ids, order, inverse, offs, num_rows, num_real_tokens,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    TOP_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the rows of one block; the first block also stores the end of each expert. Grid:
    ``(blocks,)``. ``STEP`` blocks' counts are read at once."""
    overlap(PDL)
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)  # in the blocks before this one
    for first in range(0, num_blocks, STEP):
        some = first + tl.arange(0, STEP)[:, None]
        count = tl.load(counts + some * BINS + bins[None, :], mask=some < num_blocks, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(some < block, count, 0), 0)
    ends = tl.cumsum(total, 0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    found_bins, found = _bins(ids, row, num_rows, num_real_tokens, E, TOP_K)
    at = tl.gather(ends - total + before, found_bins, 0)
    for first in range(0, BLOCK, _COMPARED):
        other = block * BLOCK + first + tl.arange(0, _COMPARED)
        other_bins, _ = _bins(ids, other, num_rows, num_real_tokens, E, TOP_K)
        is_before = other_bins[None, :] == found_bins[:, None]
        is_before &= other[None, :] < row[:, None]
        at += tl.sum(is_before.to(tl.int32), 1)
    is_row = row < num_rows
    tl.store(order + at, row.to(tl.int64), mask=is_row)
    tl.store(sorted_ids + at, found, mask=is_row)
    tl.store(inverse + row, at.to(tl.int64), mask=is_row)
    tl.store(offs + bins, ends, mask=(bins < E) & (block == 0))


def sort_by_expert(
    ids: Tensor, num_experts: int, top_k: int = 1, query_starts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``ids`` sorted, the order that sorts them, its inverse, and the end of each expert's rows.

    Args:
        ids: ``[S]`` int64, 0 or more, ``top_k`` per token. Ids of ``num_experts`` or more belong to
            no expert and come last, in their order.
        query_starts: int32 ``[B + 1]`` of the step: its last entry is the number of real tokens.
            Ids of the padding tokens after them belong to no expert, whatever their value:
            otherwise the weights of an expert chosen only by padding would be read.

    Returns:
        sorted ids int64 ``[S]``; order int64 ``[S]`` with ``sorted == ids[order]``, equal ids in
        their original order; inverse int64 ``[S]`` with ``ids == sorted[inverse]``; offs int32
        ``[num_experts]``.
    """
    num_rows = len(ids)
    ids = ids.contiguous()
    sorted_ids, order, inverse = (torch.empty_like(ids) for _ in range(3))
    offs = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    may_skip = may_skip_launches()
    if may_skip:  # other kernels read data that this kernel has not written
        for indices in (sorted_ids, order, inverse, offs):
            indices.zero_()
    num_real_tokens = None if query_starts is None else query_starts[-1:]
    shared = {"E": num_experts, "TOP_K": top_k, **overlap_options(ids.device)}
    results = (sorted_ids, order, inverse, offs)
    is_many = num_rows * (num_experts + 128) > _MANY
    # During compilation for later steps with fewer rows, compile the kernels of both methods.
    if not is_many or may_skip:
        block, _, num_warps = next(entry for entry in _BLOCKS if num_rows <= entry[1])
        _sort_kernel[(num_experts + 1,)](
            ids, *results, num_rows, num_real_tokens, BLOCK=block, num_warps=num_warps, **shared
        )
    if is_many:
        grid = (triton.cdiv(num_rows, _BLOCK),)
        num_bins = triton.next_power_of_2(num_experts + 2)
        counts = torch.empty(*grid, num_bins, dtype=torch.int32, device=ids.device)
        if may_skip:
            counts.zero_()
        shared |= {"BINS": num_bins, "BLOCK": _BLOCK, "num_warps": 8}
        _count_kernel[grid](ids, counts, num_rows, num_real_tokens, **shared)
        step = max(_COUNTS_AT_ONCE // num_bins, 1)
        _place_kernel[grid](ids, counts, *results, num_rows, num_real_tokens, STEP=step, **shared)
    return results
