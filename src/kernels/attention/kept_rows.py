"""Attention for some tokens of a step only: each becomes the only query of a row of its own."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_rows(
    kept: Tensor, query_starts: Tensor, context_lens: Tensor, table_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a step that computes only the queries ``kept``, for :mod:`..ops`.

    Args:
        kept: int64 ``[S]``, ascending tokens of the step. From the first one that does not ascend,
            and from the first token of padding, all are padding.
        query_starts: int32 ``[B + 1]``. context_lens, table_rows: int32 ``[B]``.

    Returns:
        ``query_starts`` int32 ``[S + 1]``; ``context_lens`` and ``table_rows``, int32 ``[S]``.
    """
    tokens = kept.to(torch.int32)
    is_real = tokens < query_starts[-1]
    is_real[1:] &= tokens[1:] > tokens[:-1]
    starts = torch.nn.functional.pad(is_real.cumprod(0).cumsum(0, dtype=torch.int32), (1, 0))
    # The last row that begins at or before the token; rows without tokens begin where they end.
    rows = torch.searchsorted(query_starts, tokens, right=True).sub_(1)
    rows.clamp_(max=len(context_lens) - 1)
    num_behind = query_starts[rows + 1] - 1 - tokens
    contexts = (context_lens[rows] - num_behind) * starts.diff()
    return starts, contexts, table_rows[rows]
