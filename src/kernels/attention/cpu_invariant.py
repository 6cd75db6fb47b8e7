"""Batch-invariant paged attention on a CPU: the same bits however steps are scheduled.

The keys of a row are read in tiles of 64 positions, counted from position 0, and every matmul has
the shape of a tile. A score is one sum over the head dimension. The weighted values of a tile are
one sum over its 64 positions, and tiles are added in order. The maximum has no order. Positions
that a query must not see (later positions, those left of a window, whole tiles that only pad a
group) have probability 0 and add an exact zero. So neither padding nor grouping changes the bits,
and a position gets the same bits in a long prompt as in a decode step.

Matmuls are batched, with a multiple of four rows. MKL has one order of summation for all of those
(see :mod:`..matmul.cpu.invariant`), and other orders where a thread gets one to three rows. Values
of few elements (1, 5, 7 ...) have still other orders; :mod:`.cpu_trial` chooses an
:class:`AttentionRecipe` for the sizes of a model.

As in :mod:`.reference`, everything that depends only on the batch is computed once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import e4m3, fixed_order
from ..arguments import AttentionParams, PagedKV
from ..device import MKL_ROW_UNIT
from .reference_layout import first_seen, grouped_by_length

TILE = 64
_QUERY_TILE = 128
# The most elements that the tiles' shares of an output may have before they are added.
_PART_ELEMENTS = 1 << 18
_NEG_INF = float("-inf")


class AttentionRecipe(NamedTuple):
    """How matmuls are called. A named tuple, because a graph can contain one.

    Attributes:
        unit: queries, keys and values are padded with zeros to a multiple of this many elements.
        is_fixed_order: whether matmuls use :mod:`..fixed_order` instead of a library.
    """

    unit: int = 1
    is_fixed_order: bool = False


PLAIN = AttentionRecipe()


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Queries that are attended as one batch: n consecutive queries of each of R rows.

    Attributes:
        tokens: their indices, int64 ``[R * n]`` or a slice.
        num_rows: R.
        num_tiles: how many of the gathered tiles they read.
        first_hidden: before this tile, every query sees all positions.
        hidden: bool ``[num_tiles - first_hidden, R, n, 1, 64]``, True where a query must not see.
        distances: float32 ``[num_tiles, R, n, 1, 64]``, positions from query to key, if scores
            depend on them.
    """

    tokens: slice | Tensor
    num_rows: int
    num_tiles: int
    first_hidden: int
    hidden: Tensor
    distances: Tensor | None


@dataclass(frozen=True, slots=True)
class Gather:
    """Cache slots of R rows and the queries that read them.

    Attributes:
        slots: int64 ``[num_tiles * R * 64]``: tile outermost, then row, then position.
        buffers: memory for the gathered slots, reused by all layers. New memory per layer would
            cost more than the gather.
    """

    slots: Tensor
    groups: tuple[QueryGroup, ...]
    buffers: dict[tuple[object, ...], Tensor]


@dataclass(frozen=True, slots=True)
class AlignedLayout:
    """The layout of one step for one window, chunk and set of slopes."""

    gathers: tuple[Gather, ...]
    num_tokens: int
    slopes: Tensor | None


def build_layout(
    cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    window: int = 0,
    chunk: int = 0,
    slopes: Sequence[float] | None = None,
) -> AlignedLayout:
    """Arguments as in :func:`.reference_layout.build_layout`."""
    starts: list[int] = query_starts.tolist()
    contexts: list[int] = context_lens.tolist()
    device, block_size = block_tables.device, cache.shape[1]
    tables = block_tables[table_rows]
    num_queries = [end - begin for begin, end in pairwise(starts)]
    decode = [row for row, n in enumerate(num_queries) if n == 1]
    # The first tile that the first query of a row sees, and the number of tiles up to its last.
    lows = [
        first_seen(c - n, window, chunk) // TILE for c, n in zip(contexts, num_queries, strict=True)
    ]
    counts = [-(-c // TILE) - low for c, low in zip(contexts, lows, strict=True)]

    def gather(rows: list[int], tiles: list[tuple[int, int]]) -> Gather:
        """``tiles``: ranges of the rows' queries, counted from each row's first."""
        num_tiles = max(counts[row] for row in rows)
        index = torch.tensor(rows, device=device)
        low = torch.tensor([lows[row] for row in rows], device=device)
        last = torch.tensor([contexts[row] - 1 for row in rows], device=device)
        offsets = torch.arange(num_tiles * TILE, device=device).view(num_tiles, 1, TILE)
        positions = low.view(1, -1, 1) * TILE + offsets
        # Positions after the last are not settled: the code reads the last position there and hides
        # it.
        settled = torch.minimum(positions, last.view(1, -1, 1))
        blocks = tables[index.view(1, -1, 1), settled // block_size].long()
        slots = (blocks * block_size + settled % block_size).reshape(-1)
        groups = []
        for a, b in tiles:
            ends = [contexts[row] - num_queries[row] + b for row in rows]
            seen = max(-(-e // TILE) - lows[row] for e, row in zip(ends, rows, strict=True))
            first = torch.tensor([e - (b - a) for e in ends], device=device)
            queries = (first[:, None] + torch.arange(b - a, device=device))[None, :, :, None]
            # Without a window or chunk, hidden positions come after the first query.
            begin_hidden = 0
            if not window and not chunk:
                begin_hidden = min(
                    (e - (b - a) + 1) // TILE - lows[row] for e, row in zip(ends, rows, strict=True)
                )
            keys = positions[begin_hidden:seen, :, None, :]
            hidden = keys > queries
            if window:
                hidden |= keys <= queries - window
            if chunk:
                hidden |= keys < queries // chunk * chunk
            distances = None
            if slopes is not None:
                distances = (positions[:seen, :, None, :] - queries).float()[:, :, :, None, :]
            begin = starts[rows[0]] + a
            tokens: slice | Tensor = slice(begin, begin + len(rows) * (b - a))
            if any(starts[row] + a != begin + i for i, row in enumerate(rows)):
                tokens = torch.tensor([starts[row] for row in rows], device=device)
            groups.append(
                QueryGroup(
                    tokens, len(rows), seen, begin_hidden, hidden[:, :, :, None, :], distances
                )
            )
        return Gather(slots, tuple(groups), {})

    gathers = [gather(rows, [(0, 1)]) for rows in grouped_by_length(decode, counts)]
    for row, n in enumerate(num_queries):
        if n > 1:
            tiles = [(a, min(a + _QUERY_TILE, n)) for a in range(0, n, _QUERY_TILE)]
            gathers.append(gather([row], tiles))
    factors = None if slopes is None else torch.tensor(slopes, device=device)
    return AlignedLayout(tuple(gathers), starts[-1], factors)


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    layout: AlignedLayout,
    params: AttentionParams,
    v_dim: int = 0,
    recipe: AttentionRecipe = PLAIN,
) -> Tensor:
    """Attention of ``query [T, Hq, Dk]``; returns ``[T, Hq, Dv]``, computed in float32.

    Tokens that belong to no row (padding) get zeros.

    Args:
        v_cache: None if the values are the first ``v_dim`` elements of the keys.
        params: with ``indices``, int32 ``[T, K]``: of the positions in view, those that each query
            sees, or -1. Layouts must start at position 0. ``layout`` has the other masks and the
            slopes.
        recipe: from :func:`.cpu_trial.choose_recipe` for these sizes.
    """
    num_q_heads = query.shape[1]
    if v_cache is not None:
        v_dim = e4m3.head_dim(v_cache)
    out = query.new_empty(query.shape[0], num_q_heads, v_dim)
    out[layout.num_tokens :] = 0
    for gather in layout.gathers:
        keys = gathered("keys", k_cache, gather)
        values = keys[..., :v_dim] if v_cache is None else gathered("values", v_cache, gather)
        keys, values = _filled(keys, recipe.unit), _filled(values, recipe.unit)
        for group in gather.groups:
            queries = _filled(query[group.tokens], recipe.unit)
            mixed = _attend(queries, keys, values, group, layout.slopes, params, recipe)
            out[group.tokens] = mixed[..., :v_dim].to(out.dtype)
    return out


def paged_attention(query: Tensor, kv: PagedKV, params: AttentionParams) -> Tensor:
    """Compute layout and attention; shapes as in :mod:`..ops`."""
    masks = params.window, params.chunk, params.alibi_slopes
    layout = build_layout(kv.k_cache, *kv[2:], *masks)
    return attend(query, kv.k_cache, kv.v_cache, layout, params)


def _filled(x: Tensor, unit: int) -> Tensor:
    """``x [.., D]`` padded with zeros to a multiple of ``unit`` elements."""
    missing = -x.shape[-1] % unit
    return F.pad(x, (0, missing)) if missing else x


def _bmm(left: Tensor, right: Tensor, out: Tensor, is_fixed_order: bool) -> None:
    if is_fixed_order:
        out.copy_(fixed_order.bmm(left, right))
    else:
        torch.bmm(left, right, out=out)


def _unseen(indices: Tensor, group: QueryGroup) -> Tensor:
    """Bool ``[num_tiles, R, n, 1, 64]``, True at positions that are not among a query's indices
    ``[R * n, K]``."""
    num_positions = group.num_tiles * TILE
    unseen = indices.new_ones(len(indices), num_positions + 1, dtype=torch.bool)
    at = torch.where(indices < 0, num_positions, indices).long()
    unseen = unseen.scatter_(1, at, False)[:, :num_positions]
    unseen = unseen.reshape(group.num_rows, -1, group.num_tiles, TILE)
    return unseen.permute(2, 0, 1, 3).unsqueeze(3)


def gathered(which: str, cache: Tensor, gather: Gather) -> Tensor:
    """``[num_tiles * R, 64, Hkv, D]``, contiguous, float32. Valid until the next call with the same
    ``which``."""
    num_heads, dim = cache.shape[2:]
    key = (which, num_heads, dim, cache.dtype)
    if key not in gather.buffers:
        gather.buffers[key] = cache.new_empty(gather.slots.shape[0], num_heads * dim)
    # Gather whole slots: gathering per head costs 1.5 to 3 times as much.
    flat = cache.view(-1, num_heads * dim)
    found = torch.index_select(flat, 0, gather.slots, out=gather.buffers[key])
    found = found.view(-1, TILE, num_heads, dim)
    return e4m3.decode_rows(found) if e4m3.are_rows(cache) else found.float()


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    group: QueryGroup,
    slopes: Tensor | None,
    params: AttentionParams,
    recipe: AttentionRecipe,
) -> Tensor:
    """One group: ``query [R * n, Hq, Dk]`` over ``[num_tiles or more * R, 64, Hkv, D]``."""
    softcap, sinks, is_fixed_order = params.softcap, params.sinks, recipe.is_fixed_order
    num_rows, num_tiles, num_kv_heads = group.num_rows, group.num_tiles, keys.shape[2]
    num_matmuls = num_tiles * num_rows
    num_queries = query.shape[0] // num_rows
    num_q_heads, k_dim = query.shape[1:]
    group_size = num_q_heads // num_kv_heads
    used = num_queries * group_size
    missing = -used % MKL_ROW_UNIT
    # [Hkv, R, n * G, Dk]: the query heads of a KV head are treated as additional queries.
    q = query.view(num_rows, num_queries, num_kv_heads, group_size, k_dim).permute(2, 0, 1, 3, 4)
    q = q.reshape(num_kv_heads, num_rows, used, k_dim).float() * params.scale
    if missing:
        q = F.pad(q, (0, 0, 0, missing))
    rows = q.shape[2]

    # The matmuls of a head, for all tiles and rows, are one batch.
    scores = q.new_empty(num_kv_heads, num_tiles, num_rows, rows, TILE)
    every = q.unsqueeze(1).expand(-1, num_tiles, -1, -1, -1)
    every = every.reshape(num_kv_heads, num_matmuls, rows, k_dim)
    per_head = scores.view(num_kv_heads, num_matmuls, rows, TILE)
    keys = keys[:num_matmuls].permute(2, 0, 3, 1)
    for left, right, out in zip(every.unbind(), keys.unbind(), per_head.unbind(), strict=True):
        _bmm(left, right, out, is_fixed_order)
    real = scores[..., :used, :].view(
        num_kv_heads, num_tiles, num_rows, num_queries, group_size, TILE
    )
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if slopes is not None and group.distances is not None:
        # A multiplication and an addition, each rounded, whatever the vector width.
        real += slopes.view(num_kv_heads, 1, 1, 1, group_size, 1) * group.distances
    real[:, group.first_hidden :].masked_fill_(group.hidden, _NEG_INF)
    if params.indices is not None:
        real.masked_fill_(_unseen(params.indices[group.tokens], group), _NEG_INF)
    highest = scores.amax((1, 4))
    sink = None
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, 1, 1, group_size)
        sink = sink.expand(-1, num_rows, num_queries, -1).reshape(num_kv_heads, num_rows, used)
        if missing:
            sink = F.pad(sink, (0, missing))
        highest = torch.maximum(highest, sink)
    scores.sub_(highest[:, None, :, :, None]).exp_()
    total = torch.zeros_like(highest)
    # Tile by tile: the order of one sum over all tiles would depend on their number.
    for share in scores.sum(-1).unbind(1):
        total += share
    mixed = q.new_zeros(num_kv_heads, num_rows, rows, values.shape[3])
    num = max(1, _PART_ELEMENTS // mixed.numel()) * num_rows
    values = values[:num_matmuls].permute(2, 0, 1, 3)
    for left, right in zip(per_head.split(num, 1), values.split(num, 1), strict=True):
        parts = q.new_empty(num_kv_heads, left.shape[1], rows, values.shape[3])
        for head, out in enumerate(parts.unbind()):
            _bmm(left[head], right[head], out, is_fixed_order)
        for part in parts.view(num_kv_heads, -1, *mixed.shape[1:]).unbind(1):
            mixed += part
    if sink is not None:
        total += (sink - highest).exp_()
    mixed /= total.unsqueeze(3)
    mixed = mixed[:, :, :used].view(num_kv_heads, num_rows, num_queries, group_size, -1)
    return mixed.permute(1, 2, 0, 3, 4).reshape(num_rows * num_queries, num_q_heads, -1)
