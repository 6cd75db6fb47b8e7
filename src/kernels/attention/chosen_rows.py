"""Whose token it is and where what was chosen for it lies: device functions of all that serves
indexers, in which every token is a unit of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .online_softmax import count_at_most


@triton.jit
def row_of_token(starts, contexts, num_rows, token):  # type: ignore[no-untyped-def]
    """(row, position) of any token of a step; position -1 of padding."""
    row = count_at_most(starts + 1, num_rows, token, 1, False, 256)
    end = tl.load(starts + row + 1, mask=row < num_rows, other=0)
    context = tl.load(contexts + row, mask=row < num_rows, other=0)
    return row, tl.where(row < num_rows, context - (end - token), -1)


@triton.jit
def chosen_slots(  # type: ignore[no-untyped-def]
    chosen, position, table, start, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Slots ``[BLOCK_N]`` of the chosen positions from number ``start`` on; beyond ``last`` that
    of ``last``. ``chosen`` points to those of a query at ``position``, of which ``last + 1`` are
    there."""
    at = tl.load(chosen + tl.minimum(start + tl.arange(0, BLOCK_N), last))
    # While kernels are built, the one that chooses may not have run.
    at = tl.minimum(at.to(tl.uint32), position.to(tl.uint32))
    blocks = tl.load(table + at // PAGE)
    return blocks.to(tl.int64) * PAGE + at % PAGE
