"""Paged attention on a CPU with the same bits however a step is cut and whoever is in it.

The keys of a row are read in tiles of 64 positions, counted from position 0, and every product has
the shape of a tile: a score is one sum over the head dimension, the values of a tile are one sum
over its 64 positions, and tiles are added in order. The maximum has no order. What a query must
not see (later positions, those left of a window, whole tiles that only pad a group) has
probability 0 and adds an exact zero, so neither padding nor grouping shows in the bits, and a
position gets the same from a long prompt as from a decode.

Products are batched ones with at least four rows: MKL has one order of summation for all of those
(see :mod:`pagespec.kernels.rowwise`), and others below.

As in :mod:`pagespec.kernels.reference`, what depends on the batch alone is laid out once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pagespec.kernels.reference import grouped_by_length

_TILE = 64
_QUERY_TILE = 128
_MIN_ROWS = 4
_NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Queries that are attended as one batch: n consecutive ones of each of R rows.

    Attributes:
        tokens: where they lie, int64 ``[R * n]`` or a slice.
        num_rows: R.
        num_tiles: how many of the gathered tiles they look at.
        hidden: bool ``[num_tiles, R, 1, n, 1, 64]``, True where not seen.
    """

    tokens: slice | Tensor
    num_rows: int
    num_tiles: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Gather:
    """Cache slots of R rows and the queries that look at them.

    Attributes:
        slots: int64 ``[num_tiles * R * 64]``: tile outermost, then row, then position.
    """

    slots: Tensor
    num_tiles: int
    num_rows: int
    groups: tuple[QueryGroup, ...]


@dataclass(frozen=True, slots=True)
class AlignedLayout:
    """All that attention needs to know of one step, for one window."""

    gathers: tuple[Gather, ...]
    num_tokens: int


def build_layout(
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    block_size: int,
    window: int,
) -> AlignedLayout:
    """Arguments as of :func:`pagespec.kernels.reference.build_layout`."""
    starts: list[int] = query_starts.tolist()
    contexts: list[int] = context_lens.tolist()
    device = block_tables.device
    num_queries = [end - begin for begin, end in pairwise(starts)]
    decode = [row for row, n in enumerate(num_queries) if n == 1]
    # The first tile that the first query of a row sees, and how many from there to its last.
    lows = [
        max(0, c - n - window + 1) // _TILE if window else 0
        for c, n in zip(contexts, num_queries, strict=True)
    ]
    counts = [-(-c // _TILE) - low for c, low in zip(contexts, lows, strict=True)]

    def gather(rows: list[int], tiles: list[tuple[int, int]]) -> Gather:
        """``tiles``: ranges of the rows' queries, counted from each row's first."""
        num_tiles = max(counts[row] for row in rows)
        index = torch.tensor(rows, device=device)
        low = torch.tensor([lows[row] for row in rows], device=device)
        last = torch.tensor([contexts[row] - 1 for row in rows], device=device)
        offsets = torch.arange(num_tiles * _TILE, device=device).view(num_tiles, 1, _TILE)
        positions = low.view(1, -1, 1) * _TILE + offsets
        # Positions after the last are not settled: read the last one there, and hide it.
        settled = torch.minimum(positions, last.view(1, -1, 1))
        blocks = block_tables[index.view(1, -1, 1), settled // block_size].long()
        slots = (blocks * block_size + settled % block_size).reshape(-1)
        groups = []
        for a, b in tiles:
            ends = [contexts[row] - num_queries[row] + b for row in rows]
            seen = max(-(-e // _TILE) - lows[row] for e, row in zip(ends, rows, strict=True))
            first = torch.tensor([e - (b - a) for e in ends], device=device)
            queries = (first[:, None] + torch.arange(b - a, device=device))[None, :, :, None]
            keys = positions[:seen, :, None, :]
            hidden = keys > queries
            if window:
                hidden |= keys <= queries - window
            begin = starts[rows[0]] + a
            tokens: slice | Tensor = slice(begin, begin + len(rows) * (b - a))
            if any(starts[row] + a != begin + i for i, row in enumerate(rows)):
                tokens = torch.tensor([starts[row] for row in rows], device=device)
            groups.append(QueryGroup(tokens, len(rows), seen, hidden[:, :, None, :, None, :]))
        return Gather(slots, num_tiles, len(rows), tuple(groups))

    gathers = [gather(rows, [(0, 1)]) for rows in grouped_by_length(decode, counts)]
    for row, n in enumerate(num_queries):
        if n > 1:
            tiles = [(a, min(a + _QUERY_TILE, n)) for a in range(0, n, _QUERY_TILE)]
            gathers.append(gather([row], tiles))
    return AlignedLayout(tuple(gathers), starts[-1])


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: AlignedLayout,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of ``query [T, Hq, Dk]``; returns ``[T, Hq, Dv]``, computed in float32.

    Tokens that belong to no row (padding) get zeros.
    """
    num_q_heads = query.shape[1]
    v_dim = v_cache.shape[3]
    out = query.new_empty(query.shape[0], num_q_heads, v_dim)
    out[layout.num_tokens :] = 0
    for gather in layout.gathers:
        keys, values = _gathered(k_cache, gather), _gathered(v_cache, gather)
        for group in gather.groups:
            out[group.tokens] = _attend(
                query[group.tokens], keys, values, group, scale, softcap, sinks
            ).to(out.dtype)
    return out


def _gathered(cache: Tensor, gather: Gather) -> Tensor:
    """``[num_tiles, R, Hkv, 64, D]``, contiguous, float32."""
    num_heads, dim = cache.shape[2:]
    heads = torch.arange(num_heads, device=cache.device).view(-1, 1)
    slots = gather.slots.view(-1, 1, _TILE) * num_heads + heads
    found = cache.view(-1, dim).index_select(0, slots.reshape(-1)).float()
    return found.view(gather.num_tiles, gather.num_rows, num_heads, _TILE, dim)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    group: QueryGroup,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """One group: ``query [R * n, Hq, Dk]`` over ``[num_tiles, R, Hkv, 64, D]``."""
    num_rows, num_tiles, num_kv_heads = group.num_rows, group.num_tiles, keys.shape[2]
    num_queries = query.shape[0] // num_rows
    num_q_heads, k_dim = query.shape[1:]
    group_size = num_q_heads // num_kv_heads
    batch, used = num_rows * num_kv_heads, num_queries * group_size
    # [R * Hkv, n * G, Dk]: the query heads of a KV head stand as further queries.
    q = query.view(num_rows, num_queries, num_kv_heads, group_size, k_dim).transpose(1, 2)
    q = q.reshape(batch, used, k_dim).float() * scale
    if used < _MIN_ROWS:
        q = F.pad(q, (0, 0, 0, _MIN_ROWS - used))

    scores = q.new_empty(num_tiles, batch, q.shape[1], _TILE)
    for tile in range(num_tiles):
        k = keys[tile].view(batch, _TILE, k_dim)
        torch.bmm(q, k.transpose(1, 2), out=scores[tile])
    real = scores[:, :, :used].view(
        num_tiles, num_rows, num_kv_heads, num_queries, group_size, _TILE
    )
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    real.masked_fill_(group.hidden, _NEG_INF)
    highest = scores.amax((0, 3))
    sink = None
    if sinks is not None:
        per_head = sinks.float().view(1, num_kv_heads, 1, group_size)
        sink = per_head.expand(num_rows, -1, num_queries, -1).reshape(batch, used)
        if used < _MIN_ROWS:
            sink = F.pad(sink, (0, _MIN_ROWS - used))
        highest = torch.maximum(highest, sink)
    weights = scores.sub_(highest.unsqueeze(2)).exp_()
    sums = weights.sum(-1)
    total = torch.zeros_like(highest)
    mixed = q.new_zeros(batch, q.shape[1], values.shape[4])
    for tile in range(num_tiles):
        total += sums[tile]
        mixed += torch.bmm(weights[tile], values[tile].view(batch, _TILE, -1))
    if sink is not None:
        total += (sink - highest).exp_()
    mixed /= total.unsqueeze(2)
    mixed = mixed[:, :used].view(num_rows, num_kv_heads, num_queries, group_size, -1)
    return mixed.transpose(1, 2).reshape(num_rows * num_queries, num_q_heads, -1)
