"""The walk of a step's rows through their positions: where a recurrent state is read, the order of
tokens, and where the state is written.

A single row updates its slots in place: the state of a large model is megabytes, and a copy costs
as much as a token. Rows with small states are processed together in a copy, token by token, because
there the number of calls determines the time. A recurrence must compute the same bits for a row in
both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Tokens = slice | Tensor
Advance = Callable[[Tensor, Tokens], None]
"""Advances ``states [R, ...]`` in place by tokens in time order: R at a time, one per row. Tokens
are a slice, or int64 ``[n]``."""

# Largest state, in elements, for which rows are processed together. Delta rule, 16 rows of one
# token, compared with one row at a time: 4,096 elements (H 4, K and V 32) take an eighth of the
# time, 32,768 two thirds, 524,288 six times as long.
_MAX_GATHERED_ELEMENTS = 1 << 15


class StepRows(NamedTuple):
    """The rows of a step and their slots: see :mod:`.ops`.

    Attributes:
        query_starts: int32 ``[B + 1]``. context_lens: int32 ``[B]``.
        state_tables: int32 ``[R, M]``, R >= B. table_rows: int32 ``[B]``, the row of
            ``state_tables`` for each row. interval: positions per entry.
        num_drafts: int32 ``[B]``, the draft tokens at the end of each row, fewer than its tokens;
            None or ``[0]`` if no row has any.
    """

    query_starts: Tensor
    context_lens: Tensor
    state_tables: Tensor
    table_rows: Tensor
    interval: int
    num_drafts: Tensor | None

    @property
    def drafts(self) -> Tensor | None:
        """``num_drafts``; None if no row has any."""
        return None if self.num_drafts is None or not len(self.num_drafts) else self.num_drafts

    def arguments(self, num_tokens: int) -> tuple[Tensor | int | None, ...]:
        """Arguments ``starts`` to ``table_stride`` of the kernels that process whole rows."""
        num_rows, stride = len(self.context_lens), self.state_tables.stride(0)
        return *self[:4], self.drafts, num_rows, num_tokens, self.interval, stride


class Stretch(NamedTuple):
    """Consecutive tokens ``[begin, end)`` of a row whose positions are in one interval.

    Attributes:
        source: the slot of the state before them; -1 if they begin at position 0.
        slot: the slot for the state after them; -1 for draft tokens, whose state is not kept.
    """

    begin: int
    end: int
    source: int
    slot: int


def stretches(rows: StepRows) -> list[list[Stretch]]:
    """The stretches of each row that has tokens, in order. Draft tokens are the last one."""
    interval, tables = rows.interval, rows.state_tables
    width = tables.shape[1]
    parts: list[tuple[int, int, int, int]] = []  # number, begin, end and position
    entries: list[int] = []  # of the flat tables, two per part
    drafts: list[tuple[int, Stretch]] = []  # with the number of the row
    num = -1
    for row, (begin, last), context, num_drafts in zip(
        rows.table_rows.tolist(),
        pairwise(rows.query_starts.tolist()),
        rows.context_lens.tolist(),
        [0] * len(rows.context_lens) if rows.drafts is None else rows.drafts.tolist(),
        strict=True,
    ):
        position, end = context - (last - begin), last - num_drafts
        num += begin < last
        if num_drafts:
            drafts.append((num, Stretch(end, last, -1, -1)))
        while begin < end:
            index = position // interval
            stop = min(end, begin + (index + 1) * interval - position)
            parts.append((num, begin, stop, position))
            entries += (row * width + max(position - 1, 0) // interval, row * width + index)
            position += stop - begin
            begin = stop
    slots: list[int] = (
        tables.reshape(-1).index_select(0, torch.tensor(entries, device=tables.device)).tolist()
        if entries
        else []
    )
    found: list[list[Stretch]] = [[] for _ in range(num + 1)]
    for (num, begin, stop, position), source, slot in zip(
        parts, slots[::2], slots[1::2], strict=True
    ):
        found[num].append(Stretch(begin, stop, source if position else -1, slot))
    for num, stretch in drafts:
        found[num].append(stretch)
    return found


def walk(states: Tensor, rows: StepRows, advance: Advance) -> None:
    """Advance the states of all rows over their tokens, and write them to their slots.

    Args:
        states: ``[num_slots + 1, ...]``, changed in place.
    """
    found = stretches(rows)
    if len(found) == 1 or states[0].numel() > _MAX_GATHERED_ELEMENTS:
        for parts in found:
            _walk_alone(states, parts, advance)
    elif found:
        _walk_together(states, found, advance)


def load(states: Tensor, sources: list[int]) -> Tensor:
    """A copy ``[R, ...]`` of the states in slots; zeros for -1."""
    index = torch.tensor(sources, device=states.device)
    if min(sources) >= 0:
        return states.index_select(0, index)
    loaded = states.index_select(0, index.clamp(min=0))
    loaded[index < 0] = 0
    return loaded


def save(states: Tensor, slots: list[int], values: Tensor) -> None:
    """Write ``values [R, ...]`` into the slots."""
    states.index_copy_(0, torch.tensor(slots, device=states.device), values)


def as_tokens(numbers: list[int], device: torch.device) -> Tokens:
    """A slice if they are consecutive, else a tensor."""
    first, last = numbers[0], numbers[-1]
    if numbers == list(range(first, last + 1)):
        return slice(first, last + 1)
    return torch.tensor(numbers, device=device)


def batches(tokens: Tokens, num_rows: int, most: int) -> Iterator[Tokens]:
    """Tokens for :data:`Advance` in batches of ``most``, rounded to whole time steps."""
    step = num_rows * max(1, most // num_rows)
    if isinstance(tokens, slice):
        for begin in range(tokens.start, tokens.stop, step):
            yield slice(begin, min(begin + step, tokens.stop))
    else:
        yield from tokens.split(step)


def wide(x: Tensor, tokens: Tokens) -> Tensor:
    """``x [T, ...]`` of some tokens, float32 and contiguous. Sums along the last dimension have
    another order if it is strided, and a single token may be contiguous where two are not."""
    return x[tokens].float().contiguous()


def _walk_alone(states: Tensor, parts: list[Stretch], advance: Advance) -> None:
    last = 0
    for begin, end, source, slot in parts:
        if slot < 0:
            advance(states[last : last + 1].clone(), slice(begin, end))
            continue
        last = slot
        if source < 0:
            states[slot].zero_()
        elif source != slot:
            states[slot].copy_(states[source])
        advance(states[slot : slot + 1], slice(begin, end))


def _walk_together(states: Tensor, found: list[list[Stretch]], advance: Advance) -> None:
    # Longest first, so that the rows with remaining tokens are always the first ones.
    found = sorted(found, key=lambda parts: parts[0].begin - parts[-1].end)
    begins = [parts[0].begin for parts in found]
    lengths = [parts[-1].end - parts[0].begin for parts in found]
    writes: dict[int, list[tuple[int, int]]] = {}  # number of tokens taken -> (rank, slot)
    for rank, parts in enumerate(found):
        for part in parts:
            kept = writes.setdefault(part.end - begins[rank], [])
            if part.slot >= 0:
                kept.append((rank, part.slot))

    work = load(states, [parts[0].source for parts in found])
    time = 0
    for end in sorted(writes):
        num_rows = sum(length > time for length in lengths)
        tokens = [begin + j for j in range(time, end) for begin in begins[:num_rows]]
        advance(work[:num_rows], as_tokens(tokens, states.device))
        ranks = [rank for rank, _ in writes[end]]
        time = end
        if ranks:
            done = as_tokens(ranks, states.device)
            save(states, [slot for _, slot in writes[end]], work[done])
