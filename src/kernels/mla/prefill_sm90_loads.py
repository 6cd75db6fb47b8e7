"""The loading warp of Hopper's latent prefill, and how programs claim tiles of lines.

Queries of a tile of lines lie one behind another in memory, 64 rows of R + P elements; vectors come
as parts of a block, up to 64 slots by 64 elements. Both through TMA. See :mod:`.prefill_sm90`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


class Batch(NamedTuple):
    """The rows, as all kernels are given them, and tiles of lines."""

    starts: Any
    contexts: Any
    num_tokens: Any
    num_rows: Any
    num_tiles: Any


class LineTile(NamedTuple):
    """A tile of lines.

    Attributes:
        row: in the batch; behind the last one are the tokens of padding.
        begin, num_queries: the row's first token, and how many it has.
        first: the tile's first line in the row.
        start, last: position of the row's first query, and the last that a line sees.
        attends, pads: whether there is anything to compute, or zeros to write.
    """

    row: Any
    begin: Any
    num_queries: Any
    first: Any
    start: Any
    last: Any
    attends: Any
    pads: Any


class Barriers(NamedTuple):
    """Pairs: what is waited for has come (full), and its place is free again (empty).

    Attributes:
        full, empty: of the ring: a group of panels, a slot.
        q_full, q_empty: queries. p_full, p_empty: weights. t_full, t_empty: the number of a tile.
    """

    full: Any
    empty: Any
    q_full: Any
    q_empty: Any
    p_full: Any
    p_empty: Any
    t_full: Any
    t_empty: Any


LINES = gl.constexpr(64)  # of a tile: queries x heads
STEP_N = gl.constexpr(64)  # vectors of a step, a tile of :mod:`.tiles`


@gluon.jit
def _row_of(starts, num_rows, tile, H: gl.constexpr, NUM_WARPS: gl.constexpr):
    """As :func:`.prefill._row_of`; each warp for itself."""
    WIDTH: gl.constexpr = 128
    LAYOUT: gl.constexpr = gl.BlockedLayout([WIDTH // 32], [32], [NUM_WARPS], [0])
    count = 0
    for first in range(0, num_rows + 1, WIDTH):
        i = first + gl.arange(0, WIDTH, LAYOUT)
        begins = gl.load(starts + i, mask=i <= num_rows, other=0) * H // LINES + i
        count += gl.sum(((begins <= tile) & (i <= num_rows)).to(gl.int32), 0)
    return count - 1


@gluon.jit
def tile_of(tile, batch, H: gl.constexpr, SINGLES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The :class:`LineTile` of a number below ``num_tiles``."""
    row = _row_of(batch.starts, batch.num_rows, tile, H, NUM_WARPS)
    is_row = row < batch.num_rows
    begin = gl.load(batch.starts + row)
    end = gl.load(batch.starts + row + 1, mask=is_row, other=0)
    end = gl.where(is_row, end, batch.num_tokens)
    num_queries = end - begin
    behind = tile - (begin * H // LINES + row)
    # The last tile first, which sees the most.
    first = ((num_queries * H + LINES - 1) // LINES - 1 - behind) * LINES
    exists = first >= 0
    attends = exists & is_row
    if not SINGLES:  # rows of one query are the decode kernel's
        attends = attends & (num_queries != 1)
    start = gl.load(batch.contexts + row, mask=is_row, other=0) - num_queries
    last = start + gl.minimum((first + LINES - 1) // H, num_queries - 1)
    return LineTile(
        row, begin, num_queries, first, start, last, attends, exists & (row == batch.num_rows)
    )


@gluon.jit
def _slot_of(table, position, last, PAGE: gl.constexpr, ROWS: gl.constexpr):
    # Behind the end of the context: its last block once more.
    position = gl.minimum(position, last)
    block = gl.load(table + position // PAGE)
    return block * PAGE + position % PAGE // ROWS * ROWS


@gluon.jit
def _load_queries(desc, first_line, target, bar):
    PANELS: gl.constexpr = target.shape[0]
    mbarrier.expect(bar, PANELS * (LINES * 64 * 2))
    for panel in gl.static_range(PANELS):
        at = [first_line, panel * 64]
        tma.async_copy_global_to_shared(desc, at, bar, target.index(panel))


@gluon.jit
def _load_panels(desc, slot_id, ring, entry, bar, part: gl.constexpr, first, COUNT: gl.constexpr):
    """COUNT panels from ``first`` on, of the slots of a part of a block."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    PARTS: gl.constexpr = STEP_N // ROWS
    for i in gl.static_range(COUNT):
        target = ring.index(entry + first + i)
        parts = target._reinterpret(ring.dtype, [PARTS, ROWS, 64], desc.layout)
        at = [slot_id, (first + i) * 64]
        tma.async_copy_global_to_shared(desc, at, bar, parts.index(part))


@gluon.jit
def load_step(
    desc, table, start, last, ring, slot, bars, phase,
    PAGE: gl.constexpr, PANELS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The vectors of the step at ``start`` into a slot of the ring, once it is empty."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    PARTS: gl.constexpr = STEP_N // ROWS
    GROUPS: gl.constexpr = PANELS // GROUP
    # Before the wait, beside which they arrive.
    first = _slot_of(table, start, last, PAGE, ROWS)
    if PARTS > 1:
        second = _slot_of(table, start + ROWS, last, PAGE, ROWS)
    if PARTS > 2:
        third = _slot_of(table, start + 2 * ROWS, last, PAGE, ROWS)
        fourth = _slot_of(table, start + 3 * ROWS, last, PAGE, ROWS)
    mbarrier.wait(bars.empty.index(slot), phase)
    for group in gl.static_range(GROUPS):
        bar = bars.full.index(slot * GROUPS + group)
        mbarrier.expect(bar, GROUP * (STEP_N * 64 * 2))
        _load_panels(desc, first, ring, slot * PANELS, bar, 0, group * GROUP, GROUP)
        if PARTS > 1:
            _load_panels(desc, second, ring, slot * PANELS, bar, 1, group * GROUP, GROUP)
        if PARTS > 2:
            _load_panels(desc, third, ring, slot * PANELS, bar, 2, group * GROUP, GROUP)
            _load_panels(desc, fourth, ring, slot * PANELS, bar, 3, group * GROUP, GROUP)


@gluon.jit
def _claim(counter):
    """How many tiles were claimed before this one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, LAYOUT)
    ones = gl.full([32], 1, gl.int32, LAYOUT)
    before = gl.atomic_add(counter + lanes, ones, mask=lanes == 0, sem="relaxed")
    return gl.sum(gl.where(lanes == 0, before, 0), 0)


@gluon.jit
def _hand_on(tile, tile_smem, bars, count):
    """Hand a tile's number, the ``count``-th, to the warpgroups, once they have the one before."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(bars.t_empty, (count & 1) ^ 1)
    tile_smem.store(gl.full([32], 0, gl.int32, LAYOUT) + tile)
    mbarrier.arrive(bars.t_full, count=1)


@gluon.jit
def next_tile(tile_smem, bars, count):
    """The ``count``-th number that :func:`produce` hands on; ``num_tiles`` behind the last."""
    mbarrier.wait(bars.t_full, count & 1)
    numbers = tile_smem.load(gl.BlockedLayout([1], [32], [4], [0]))
    mbarrier.arrive(bars.t_empty, count=1)
    return gl.max(numbers, 0)


@gluon.jit
def produce(
    q_desc, c_desc, batch, counter, tables, table_rows, table_stride, q_smem, ring, tile_smem, bars,
    H: gl.constexpr, SINGLES: gl.constexpr, PAGE: gl.constexpr, PANELS: gl.constexpr,
    GROUP: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Claims tiles, and loads the queries of each and its vectors step by step. ``PANELS`` of 64
    elements make a vector, and ``GROUP`` panels have a barrier."""
    done = 0  # steps of all tiles
    tiles = 0
    count = 0
    number = gl.program_id(0)
    while number < batch.num_tiles:
        tile = tile_of(number, batch, H, SINGLES, 1)
        if tile.attends | tile.pads:
            _hand_on(number, tile_smem, bars, count)
            count += 1
        if tile.attends:
            table_row = gl.load(table_rows + tile.row)
            table = tables + table_row.to(gl.int64) * table_stride
            mbarrier.wait(bars.q_empty, (tiles & 1) ^ 1)
            _load_queries(q_desc, tile.begin * H + tile.first, q_smem, bars.q_full)
            tiles += 1
            for step in range(tile.last // STEP_N + 1):
                slot = done % SLOTS
                phase = (done // SLOTS & 1) ^ 1
                load_step(
                    c_desc, table, step * STEP_N, tile.last, ring, slot, bars, phase, PAGE, PANELS,
                    GROUP,
                )  # fmt: skip
                done += 1
        number = gl.num_programs(0) + _claim(counter)
    _hand_on(batch.num_tiles, tile_smem, bars, count)
