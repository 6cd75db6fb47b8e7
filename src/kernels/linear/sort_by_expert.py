"""Rows of a mixture of experts in the order of their experts: where each goes.

A counting sort, in place of a library's sort, histogram, sum and permutation, each a launch or
several. Stable, without atomics; programs follow shapes alone, so calls can be captured. Where
rows are few, one launch with one program per expert, which counts all rows and places its own;
where they are many, one that counts them by block and expert, and one in which several programs
per expert place the rows of some blocks each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import has_dependent_launch
from ..jit.parallel_build import may_skip_launches

# Rows that a program looks at at once, up to how many rows there are, and its warps.
_BLOCKS = ((128, 128, 4), (2048, 1 << 40, 8))
_MANY_ROWS = 8192  # beyond, rows are counted in a launch of their own
_NUM_PLACING = 1024  # about so many programs place them: each reads the counts of all blocks


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["ids", "num_real_tokens"]
)
def _sort_kernel(  # type: ignore[no-untyped-def]
    ids, sorted_ids, order, inverse, offs, num_rows, num_real_tokens,
    E: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stores the rows of one expert, and where they end. Grid: ``(E + 1,)``; the last program has
    the rows of no expert, whose ids are E or more, or which are padding."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    num_real = num_rows
    if num_real_tokens is not None:
        num_real = tl.minimum(tl.load(num_real_tokens) * TOP_K, num_rows)
    i = tl.arange(0, BLOCK)
    num_before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):  # what is read does not wait for that number
        found = tl.load(ids + start + i, mask=start + i < num_rows, other=E + 1)
        num_before += ((found < expert) & (start + i < num_real)).to(tl.int32)
    end = tl.sum(num_before, 0)
    for start in range(0, num_rows, BLOCK):
        row = start + i
        found = tl.load(ids + row, mask=row < num_rows, other=-1)
        is_here = (found == expert) & (row < num_real)
        if expert == E:
            is_here = (found >= E) | ((row >= num_real) & (row < num_rows))
        at = end + tl.cumsum(is_here.to(tl.int32), 0) - 1
        tl.store(order + at, row.to(tl.int64), mask=is_here)
        tl.store(sorted_ids + at, found, mask=is_here)
        tl.store(inverse + row, at.to(tl.int64), mask=is_here)
        end += tl.sum(is_here.to(tl.int32), 0)
    if expert < E:
        tl.store(offs + expert, end)


@triton.jit
def _bins(  # type: ignore[no-untyped-def]
    ids, row, num_rows, num_real_tokens, E: tl.constexpr, TOP_K: tl.constexpr
):
    """Of rows: their expert, E if they have none, E + 1 if there is no such row; and their ids."""
    found = tl.load(ids + row, mask=row < num_rows, other=E + 1)
    is_real = row < num_rows
    if num_real_tokens is not None:
        is_real &= row < tl.load(num_real_tokens) * TOP_K
    bins = tl.where(is_real, tl.minimum(found, E), tl.where(row < num_rows, E, E + 1))
    return bins.to(tl.int32), found


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["ids", "num_real_tokens"]
)
def _count_kernel(  # type: ignore[no-untyped-def]
    ids, counts, num_rows, num_real_tokens,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """How many rows of a block each expert has: ``counts [blocks, BINS]``. Grid: ``(blocks,)``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bins, _ = _bins(ids, row, num_rows, num_real_tokens, E, TOP_K)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(bins, BINS))


@triton.jit(
    do_not_specialize=["num_rows", "num_parts"],
    do_not_specialize_on_alignment=["ids", "num_real_tokens"],
)
def _place_kernel(  # type: ignore[no-untyped-def]
    ids, counts, sorted_ids, order, inverse, offs, num_rows, num_real_tokens, num_parts,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As :func:`_sort_kernel`, of the blocks of one part. Grid: ``(E + 1, num_parts)``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, part = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.cdiv(num_rows, BLOCK)
    per_part = tl.cdiv(num_blocks, num_parts)
    first = part * per_part
    bins = tl.arange(0, BINS)
    ahead = tl.zeros((BINS,), tl.int32)  # rows that come before those of this part
    own = tl.zeros((BINS,), tl.int32)  # of the expert, in all blocks
    for block in range(num_blocks):
        count = tl.load(counts + block * BINS + bins)
        ahead += tl.where((bins < expert) | ((bins == expert) & (block < first)), count, 0)
        own += tl.where(bins <= expert, count, 0)
    end = tl.sum(ahead, 0)
    for block in range(first, tl.minimum(first + per_part, num_blocks)):
        row = block * BLOCK + tl.arange(0, BLOCK)
        found_bins, found = _bins(ids, row, num_rows, num_real_tokens, E, TOP_K)
        is_here = found_bins == expert
        at = end + tl.cumsum(is_here.to(tl.int32), 0) - 1
        tl.store(order + at, row.to(tl.int64), mask=is_here)
        tl.store(sorted_ids + at, found, mask=is_here)
        tl.store(inverse + row, at.to(tl.int64), mask=is_here)
        end += tl.sum(is_here.to(tl.int32), 0)
    if (part == 0) & (expert < E):
        tl.store(offs + expert, tl.sum(own, 0))


def sort_by_expert(
    ids: Tensor, num_experts: int, top_k: int = 1, query_starts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``ids`` sorted, the order that sorts them, its inverse, and where each expert's rows end.

    Args:
        ids: ``[S]`` int64, 0 or more, ``top_k`` a token; those of ``num_experts`` or more are no
            expert's, and come last in the order they have.
        query_starts: int32 ``[B + 1]``, of a step whose tokens they are of: its last entry says how
            many of them are real. Those of the tokens behind, padding, are no expert's, whatever
            they are: an expert that only padding chose would be read for nothing.

    Returns:
        sorted ids int64 ``[S]``; order int64 ``[S]``, ``sorted == ids[order]``, equal ids in the
        order they have; inverse int64 ``[S]``, ``ids == sorted[inverse]``; offs int32
        ``[num_experts]``.
    """
    num_rows = len(ids)
    ids = ids.contiguous()
    sorted_ids, order, inverse = (torch.empty_like(ids) for _ in range(3))
    offs = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    if may_skip_launches():  # other kernels read at what this one has not written
        for indices in (sorted_ids, order, inverse, offs):
            indices.zero_()
    pdl = has_dependent_launch(ids.device)
    block, _, num_warps = next(entry for entry in _BLOCKS if num_rows <= entry[1])
    num_real_tokens = None if query_starts is None else query_starts[-1:]
    shape = {"E": num_experts, "BLOCK": block, "TOP_K": top_k, "PDL": pdl}
    options = {"num_warps": num_warps, "launch_pdl": pdl}
    results = (sorted_ids, order, inverse, offs)
    if num_rows <= _MANY_ROWS:
        _sort_kernel[(num_experts + 1,)](
            ids, *results, num_rows, num_real_tokens, **shape, **options
        )
        return results
    num_blocks, num_bins = triton.cdiv(num_rows, block), triton.next_power_of_2(num_experts + 2)
    counts = torch.empty(num_blocks, num_bins, dtype=torch.int32, device=ids.device)
    if may_skip_launches():
        counts.zero_()
    num_parts = max(min(num_blocks, _NUM_PLACING // (num_experts + 1)), 1)
    _count_kernel[(num_blocks,)](
        ids, counts, num_rows, num_real_tokens, BINS=num_bins, **shape, **options
    )
    _place_kernel[(num_experts + 1, num_parts)](
        ids, counts, *results, num_rows, num_real_tokens, num_parts,
        BINS=num_bins, **shape, **options,
    )  # fmt: skip
    return results
