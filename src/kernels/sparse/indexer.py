"""Top-k indexers on a CPU: the selection of positions that a query attends to (DeepSeek-V3.2's
sparse attention).

An indexer has its own heads over one small key per token. It scores position j for a query t by

    score[t, j] = sum_h weights[t, h] * relu(scale * query[t, h] . key[j])

Attention sees the K positions in view with the highest scores, or all if there are no more. Of
equal scores at the threshold, the selection is that of ``torch.topk`` over the positions in view,
as transformers has it when it decodes the query's token. In a longer prompt, transformers also
passes the hidden positions after them to ``topk``, which may break such a tie otherwise.

As in :mod:`..attention.cpu_invariant`, every matmul has the shape of a tile of keys that begins at
a fixed position. So a score has the same bits in any step, and the selection is the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.cpu_invariant import TILE, AlignedLayout, QueryGroup, gathered
from ..device import MKL_ROW_UNIT

# The most elements that the dot products of all heads may have before they are weighted.
_PRODUCT_ELEMENTS = 1 << 22
_NEG_INF = float("-inf")


def index_topk(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    layout: AlignedLayout,
    scale: float,
    num_chosen: int,
) -> Tensor:
    """Write new keys into the cache, in place, and select positions for each query.

    Args:
        query: ``[T, H, D]``. key: ``[T, D]``. weights: ``[T, H]``.
        cache: ``[num_blocks + 1, block_size, 1, D]``. slot_mapping: int64 ``[T]``.
        layout: the layout of the step, without window, chunk and slopes.
        scale: factor on the dot products. num_chosen: K.

    Returns:
        int32 ``[T, K]``, unordered. A query that sees fewer than K positions has -1 after its last
        one.
    """
    cache.view(-1, cache.shape[3]).index_copy_(0, slot_mapping, key)
    chosen = torch.full((len(query), num_chosen), -1, dtype=torch.int32)
    for gather in layout.gathers:
        keys: Tensor | None = None
        for group in gather.groups:
            visible = _num_visible(group)
            if int(visible.max()) <= num_chosen:  # no selection needed
                at = torch.arange(min(num_chosen, group.num_tiles * TILE))
            else:
                if keys is None:
                    keys = gathered("index keys", cache, gather)
                scores = _scores(query[group.tokens], weights[group.tokens], keys, group, scale)
                at = _topk(scores, visible, num_chosen)
            at = torch.where(torch.arange(at.shape[-1]) < visible[:, None], at, -1)
            padded = F.pad(at, (0, num_chosen - at.shape[-1]), value=-1)
            chosen[group.tokens] = padded.to(torch.int32)
    return chosen


def _num_visible(group: QueryGroup) -> Tensor:
    """``[R * n]``: the number of positions, from 0 on, that each query has in view."""
    return (group.first_hidden * TILE + (~group.hidden).sum((0, 3, 4))).reshape(-1)


def _scores(
    query: Tensor, weights: Tensor, keys: Tensor, group: QueryGroup, scale: float
) -> Tensor:
    """Scores of one group: ``[R * n, num_tiles * 64]`` from ``query [R * n, H, D]`` and keys
    ``[num_tiles or more * R, 64, 1, D]``."""
    num_rows, num_tiles = group.num_rows, group.num_tiles
    total, num_heads, dim = query.shape
    used = total // num_rows * num_heads
    q = query.reshape(num_rows, used, dim).float()
    q = F.pad(q, (0, 0, 0, -used % MKL_ROW_UNIT))
    # One row of weights per query, and rows of zeros.
    w = F.pad(weights.float().unsqueeze(1), (0, 0, 0, MKL_ROW_UNIT - 1))
    columns = keys[: num_tiles * num_rows, :, 0].transpose(1, 2)
    scores = q.new_empty(num_tiles, total, TILE)
    at_once = max(1, _PRODUCT_ELEMENTS // (q.shape[0] * q.shape[1] * TILE))
    for first in range(0, num_tiles, at_once):
        num = min(at_once, num_tiles - first)
        part = columns[first * num_rows : (first + num) * num_rows]
        products = torch.bmm(q.repeat(num, 1, 1), part)
        products = products.mul_(scale).relu_()[:, :used]
        products = products.reshape(num * total, num_heads, TILE)
        weighed = torch.bmm(w.repeat(num, 1, 1), products)
        scores[first : first + num] = weighed[:, 0].view(num, total, TILE)
    return scores.transpose(0, 1).reshape(total, -1)


def _topk(scores: Tensor, visible: Tensor, num_chosen: int) -> Tensor:
    """The selected positions for each row of scores ``[N, L]``. Those of a row that sees at most
    ``num_chosen`` positions come first."""
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    scores = scores.masked_fill(hidden, _NEG_INF)
    values, at = scores.topk(num_chosen)
    # Which of equal scores are selected depends on the rest of the row, so the row contains only
    # what is in view.
    is_tied = (scores >= values[:, -1:]).sum(1) > num_chosen
    for row in (is_tied & (visible > num_chosen)).nonzero()[:, 0].tolist():
        at[row] = scores[row, : int(visible[row])].topk(num_chosen).indices
    few = visible <= num_chosen
    at[few] = torch.arange(num_chosen)
    return at
