"""The order in which the decode kernel takes up the rows of a step: the longest contexts first.

The list scheduling of Graham (1969), longest processing time first: programs that start last should
not take longest. With caches of e4m3 numbers a multiprocessor, not memory, limits how fast its
programs read, so long contexts have to be spread over all of them, too (docs/notes/attention.md).
The order changes no bits, and is worked out once per step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import count_sms
from ..jit.parallel_build import may_skip_launches
from .tiling import choose_tiling, for_card


@triton.jit
def _longest_first_kernel(contexts, order, num_rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``order[n]``: the row that n others come before. Grid: ``(num_rows,)``; ROWS: no fewer."""
    row = tl.program_id(0)
    others = tl.arange(0, ROWS)
    lengths = tl.load(contexts + others, mask=others < num_rows, other=-1)
    length = tl.load(contexts + row)
    is_before = (lengths > length) | ((lengths == length) & (others < row))
    tl.store(order + tl.sum(is_before.to(tl.int32)), row)


def longest_first(contexts: Tensor, num_kv_heads: int) -> Tensor | None:
    """The rows of a step, those with the longest contexts first, alike ones as they come.

    Args:
        contexts: int32 ``[B]``.
        num_kv_heads: the most that an attention call has.

    Returns:
        int32 ``[B]``, a permutation; None where there are so few rows that no call asks for it.
    """
    num_rows = len(contexts)
    tiling = for_card(choose_tiling(torch.bfloat16, 1, 1), count_sms(contexts.device))
    if num_rows * num_kv_heads < tiling.some_unsplit_from:
        return None
    order = torch.empty_like(contexts)
    if may_skip_launches():  # other kernels read at what this one has not written
        torch.arange(num_rows, out=order)
    _longest_first_kernel[(num_rows,)](
        contexts, order, num_rows, ROWS=triton.next_power_of_2(num_rows)
    )
    return order
