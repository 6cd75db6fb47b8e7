"""Rows of a mixture of experts in the order of their experts: where each goes, in one launch.

A counting sort with one program an expert, in place of a library's sort, histogram, sum and
permutation, each a launch or several. Stable, without atomics; programs follow shapes alone, so
calls can be captured.
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
    _sort_kernel[(num_experts + 1,)](
        ids, sorted_ids, order, inverse, offs, num_rows,
        None if query_starts is None else query_starts[-1:],
        E=num_experts,
        BLOCK=block,
        TOP_K=top_k,
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )  # fmt: skip
    return sorted_ids, order, inverse, offs
