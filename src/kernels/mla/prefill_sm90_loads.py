"""Loads of Hopper's latent prefill, and how programs share the tiles of lines.

Queries of a tile of lines lie one behind another in memory, 64 rows of R + P elements; vectors come
as parts of a block, up to 64 slots by 64 elements. Both through TMA. See :mod:`.prefill_sm90`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

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
def tile_of(
    turn, starts, contexts, num_tokens, num_rows, num_tiles, H: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """A program's tile of its ``turn``: row, its first token, its queries, the tile's first line,
    the position of the row's first query, the last position that a line sees, and whether there is
    anything to compute. Beyond the last row are the tokens of padding.

    Programs take turns there and back, for the tiles of a row become shorter.
    """
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    tile = turn * num_programs
    tile += gl.where(turn % 2 == 0, program, num_programs - 1 - program)
    row = _row_of(starts, num_rows, tile, H, NUM_WARPS)
    begin = gl.load(starts + row)
    end = gl.load(starts + row + 1, mask=row < num_rows, other=0)
    end = gl.where(row < num_rows, end, num_tokens)
    num_queries = end - begin
    behind = tile - (begin * H // LINES + row)
    # The last tile first, which sees the most.
    first = ((num_queries * H + LINES - 1) // LINES - 1 - behind) * LINES
    exists = (tile < num_tiles) & (first >= 0)
    # Rows of one query are the decode kernel's.
    attends = exists & (row < num_rows) & (num_queries != 1)
    context = gl.load(contexts + row, mask=row < num_rows, other=0)
    start = context - num_queries
    last = start + gl.minimum((first + LINES - 1) // H, num_queries - 1)
    pads = exists & (row == num_rows)
    return row, begin, num_queries, first, start, last, attends, pads


@gluon.jit
def _slot_of(table, position, last, PAGE: gl.constexpr, ROWS: gl.constexpr):
    # Behind the end of the context: its last block once more.
    position = gl.minimum(position, last)
    block = gl.load(table + position // PAGE)
    return block * PAGE + position % PAGE // ROWS * ROWS


@gluon.jit
def load_queries(desc, first_line, target, bar):
    """Start loading the queries of 64 lines, all in panels of 64 elements."""
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
def seek(
    cursor, starts, contexts, tables, table_stride, num_tokens, num_rows, num_tiles, num_turns,
    H: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The step behind ``cursor``, of the next tile if that was a tile's last: ``(turn, step, last,
    row, slot)``, the slot of its first vector. Beyond the last tile the turn is ``num_turns``."""
    turn, step, last, row, _ = cursor
    step += 1
    if step * STEP_N > last:
        step = 0
        found = False
        while (turn < num_turns) & (found == 0):
            turn += 1
            row, begin, num_queries, first, start, last, attends, pads = tile_of(
                turn, starts, contexts, num_tokens, num_rows, num_tiles, H, 4
            )
            found = attends & (turn < num_turns)
    slot_id = 0
    if turn < num_turns:
        table = tables + row.to(gl.int64) * table_stride
        slot_id = _slot_of(table, step * STEP_N, last, PAGE, ROWS)
    return turn, step, last, row, slot_id


@gluon.jit
def load_step(
    desc, cursor, tables, table_stride, ring, slot, full,
    PAGE: gl.constexpr, PANELS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Start loading the vectors at a cursor: ``PANELS`` of 64 elements each, of which ``GROUP``
    have a barrier."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    PARTS: gl.constexpr = STEP_N // ROWS
    GROUPS: gl.constexpr = PANELS // GROUP
    _, step, last, row, slot_id = cursor
    for group in gl.static_range(GROUPS):
        mbarrier.expect(full.index(slot * GROUPS + group), GROUP * (STEP_N * 64 * 2))
    for part in gl.static_range(PARTS):
        if part > 0:
            table = tables + row.to(gl.int64) * table_stride
            slot_id = _slot_of(table, step * STEP_N + part * ROWS, last, PAGE, ROWS)
        for group in gl.static_range(GROUPS):
            bar = full.index(slot * GROUPS + group)
            _load_panels(desc, slot_id, ring, slot * PANELS, bar, part, group * GROUP, GROUP)
