"""The layout of a step for :mod:`.reference`: the cache slots that each row reads, and its
masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# Rows of very different lengths form separate groups. Padding grows a group by at most this factor.
_MAX_PADDING_RATIO = 2.0
# Queries that share one explicit mask; bounds the mask of a long chunk to 512 x context.
_QUERY_TILE = 512


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one query each, of similar context, attended as one batch.

    Attributes:
        tokens: the indices of their queries: a slice if consecutive, else int64 ``[R]``.
        slots: flat cache slots to gather, int64 ``[R * L]``; L is the longest context in view.
        bias: ``[R, 1, 1, L]`` of 0 and -inf, or None if all R contexts have length L. With slopes
            it has a bias per query head: ``[R, Hq, 1, L]``.
    """

    tokens: slice | Tensor
    slots: Tensor
    bias: Tensor | None
    num_rows: int


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Consecutive queries ``[begin, end)`` of one row and the cache slots that they read.

    Attributes:
        slots: flat cache slots, int64 ``[L]``, in order of position.
        mask: bool ``[end - begin, L]``, True where attended; None means causal from position 0.
    """

    begin: int
    end: int
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The layout of one step for one window, chunk and set of slopes."""

    groups: tuple[DecodeGroup, ...]
    tiles: tuple[QueryTile, ...]
    num_tokens: int
    slopes: Tensor | None


def first_seen(position: int, window: int, chunk: int) -> int:
    """The first position that the query at ``position`` sees."""
    by_window = position - window + 1 if window else 0
    return max(0, by_window, position // chunk * chunk if chunk else 0)


def grouped_by_length(rows: list[int], lengths: list[int]) -> list[list[int]]:
    """Split row numbers into groups of which none is padded beyond ``_MAX_PADDING_RATIO``."""
    if not rows:
        return []
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(rows, key=lambda r: -lengths[r]):
        if not groups or lengths[row] * _MAX_PADDING_RATIO < longest:
            groups.append([])
            longest = lengths[row]
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def build_layout(
    query: Tensor,
    cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    window: int = 0,
    chunk: int = 0,
    slopes: Sequence[float] | None = None,
) -> AttentionLayout:
    """Build the layout of a step: the slots that each row gathers, and its masks.

    Args:
        query: gives the dtype of the additive masks. cache: ``[blocks, block size, ..]``.
        query_starts: int32 ``[B + 1]``; row b's queries are tokens ``[starts[b], starts[b + 1])``.
        context_lens: int32 ``[B]``, number of positions that each row's last query sees, its own
            included.
        block_tables: int32 ``[rows, M]``; entries past a row's context are not read.
        table_rows: int32 ``[B]``, the row of ``block_tables`` that holds each row's table.
        window: number of positions that a query sees, its own included; 0 means all.
        chunk: size of the chunks; a query sees only its own chunk; 0 means all.
        slopes: ALiBi slope per query head, or None.
    """
    starts: list[int] = query_starts.tolist()
    contexts: list[int] = context_lens.tolist()
    device, block_size = block_tables.device, cache.shape[1]
    tables = block_tables[table_rows]
    num_queries = [end - begin for begin, end in pairwise(starts)]
    decode = [row for row, n in enumerate(num_queries) if n == 1]
    seen = [c - first_seen(c - 1, window, chunk) for c in contexts]
    factors = None if slopes is None else torch.tensor(slopes, device=device)

    groups = []
    for rows in grouped_by_length(decode, seen):
        lengths = torch.tensor([seen[row] for row in rows], device=device).unsqueeze(1)
        last = torch.tensor([contexts[row] - 1 for row in rows], device=device).unsqueeze(1)
        longest = max(seen[row] for row in rows)
        offsets = torch.arange(longest, device=device)
        positions = torch.minimum(last - (lengths - 1) + offsets, last)
        index = torch.tensor(rows, device=device)
        table = tables if len(rows) == len(tables) else tables[index]
        blocks = table.gather(1, positions // block_size).long()
        bias = None
        if min(seen[row] for row in rows) < longest:
            bias = torch.zeros(len(rows), longest, dtype=query.dtype, device=device)
            bias.masked_fill_(offsets >= lengths, float("-inf"))
            bias = bias[:, None, None, :]
        if factors is not None:
            sloped = (positions - last).float()[:, None, None, :] * factors.view(1, -1, 1, 1)
            bias = sloped if bias is None else sloped + bias
        first = starts[rows[0]]
        tokens: slice | Tensor = slice(first, first + len(rows))
        if any(starts[row] != first + i for i, row in enumerate(rows)):
            tokens = torch.tensor([starts[row] for row in rows], device=device)
        slots = (blocks * block_size + positions % block_size).reshape(-1)
        groups.append(DecodeGroup(tokens, slots, bias, len(rows)))

    tiles: list[QueryTile] = []
    for row, n in enumerate(num_queries):
        if n > 1:
            tiles.extend(
                _query_tiles(starts[row], n, contexts[row], tables[row], block_size, window, chunk)
            )
    return AttentionLayout(tuple(groups), tuple(tiles), starts[-1], factors)


def _query_tiles(
    begin: int,
    num_queries: int,
    context_len: int,
    table: Tensor,
    block_size: int,
    window: int,
    chunk: int,
) -> list[QueryTile]:
    start = context_len - num_queries
    positions = torch.arange(context_len, device=table.device)
    slots = table[positions // block_size].long() * block_size + positions % block_size
    if start == 0 and first_seen(num_queries - 1, window, chunk) == 0:
        return [QueryTile(begin, begin + num_queries, slots, None)]
    tiles = []
    for a in range(0, num_queries, _QUERY_TILE):
        b = min(a + _QUERY_TILE, num_queries)
        low = first_seen(start + a, window, chunk)
        keys = positions[low : start + b]
        queries = positions[start + a : start + b].unsqueeze(1)
        mask = keys <= queries
        if window:
            mask &= keys > queries - window
        if chunk:
            mask &= keys >= queries // chunk * chunk
        tiles.append(QueryTile(begin + a, begin + b, slots[low : start + b], mask))
    return tiles
