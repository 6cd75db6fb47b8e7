"""The warps of Hopper's latent prefill: a producer warp, a warpgroup that computes weights, and two
that sum values; see :mod:`.prefill_sm90`.

Queries of a tile of lines are contiguous in memory, 64 rows of R + P elements. Vectors come as
parts of a block, up to 64 slots by 64 elements. Both are loaded through TMA.

The arithmetic is that of :func:`.tiles.attend_vectors`, operation by operation, because the bits
depend on it. Lines are rows here and columns there.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..attention.online_softmax import begins_split, count_at_most
from ..attention.prefill_sm90_consumer import (
    fold_factors,
    fold_sums,
    sides,
    times,
    weigh,
)


class Batch(NamedTuple):
    """The rows, as passed to all kernels, and the tiles of lines."""

    starts: Any
    contexts: Any
    num_tokens: Any
    num_rows: Any
    num_tiles: Any


class LineTile(NamedTuple):
    """A tile of lines.

    Attributes:
        row: index in the batch; the tokens of padding form one more row.
        begin, num_queries: the row's first token, and its number of tokens.
        first: the tile's first line in the row.
        start, last: position of the row's first query, and the last that a line sees.
        attends, pads: whether there is attention to compute, or zeros to write.
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
    """Pairs of barriers: data has arrived (full), and its place may be overwritten (empty).

    Attributes:
        full, empty: of the ring: per group of panels, and per slot.
        q_full, q_empty: of queries. p_full, p_empty: of weights. t_full, t_empty: of tile numbers.
    """

    full: Any
    empty: Any
    q_full: Any
    q_empty: Any
    p_full: Any
    p_empty: Any
    t_full: Any
    t_empty: Any


@gluon.jit
def barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """NUM barriers in shared memory, with COUNT arrivals each."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


LINES = gl.constexpr(64)  # of a tile: queries x heads
STEP_N = gl.constexpr(64)  # vectors of a step, a tile of :mod:`.tiles`


@gluon.jit
def _offsets_of_warp(WIDTH: gl.constexpr):
    """:func:`..attention.online_softmax.offsets_of` for the producer warp."""
    return gl.arange(0, WIDTH, gl.BlockedLayout([WIDTH // 32], [32], [1], [0]))


@gluon.jit
def _offsets_of_each_warp(WIDTH: gl.constexpr):
    """The same for a warpgroup, each warp separately."""
    return gl.arange(0, WIDTH, gl.BlockedLayout([WIDTH // 32], [32], [4], [0]))


@gluon.jit
def tile_of(tile, batch, H: gl.constexpr, SINGLES: gl.constexpr, OFFSETS: gl.constexpr):
    """The :class:`LineTile` with a number below ``num_tiles``."""
    row = count_at_most(batch.starts, batch.num_rows, tile, H, LINES, True, 128, OFFSETS) - 1
    is_row = row < batch.num_rows
    begin = gl.load(batch.starts + row)
    end = gl.load(batch.starts + row + 1, mask=is_row, other=0)
    end = gl.where(is_row, end, batch.num_tokens)
    num_queries = end - begin
    behind = tile - (begin * H // LINES + row)
    # The last tile, which sees the most, comes first.
    first = ((num_queries * H + LINES - 1) // LINES - 1 - behind) * LINES
    exists = first >= 0
    attends = exists & is_row
    if not SINGLES:  # the decode kernel serves rows of one query
        attends = attends & (num_queries != 1)
    start = gl.load(batch.contexts + row, mask=is_row, other=0) - num_queries
    last = start + gl.minimum((first + LINES - 1) // H, num_queries - 1)
    return LineTile(
        row, begin, num_queries, first, start, last, attends, exists & (row == batch.num_rows)
    )


@gluon.jit
def _slot_of(table, position, last, PAGE: gl.constexpr, ROWS: gl.constexpr):
    # After the end of the context, load its last block again.
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
    """COUNT panels from ``first`` on, for the slots of a part of a block."""
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
    """Load the vectors of the step at ``start`` into a slot of the ring, once it is empty."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    PARTS: gl.constexpr = STEP_N // ROWS
    GROUPS: gl.constexpr = PANELS // GROUP
    # Block ids are loaded before the wait, so that the loads overlap with it.
    slots = ()
    for i in gl.static_range(PARTS):
        slot_id = _slot_of(table, start + i * ROWS, last, PAGE, ROWS)
        slots = slots + (slot_id,)  # type: ignore[assignment]  # noqa: RUF005 (no star in Triton)
    mbarrier.wait(bars.empty.index(slot), phase)
    for group in gl.static_range(GROUPS):
        bar = bars.full.index(slot * GROUPS + group)
        mbarrier.expect(bar, GROUP * (STEP_N * 64 * 2))
        for i in gl.static_range(PARTS):
            _load_panels(desc, slots[i], ring, slot * PANELS, bar, i, group * GROUP, GROUP)


@gluon.jit
def _claim(counter):
    """Number of tiles claimed before this one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, LAYOUT)
    ones = gl.full([32], 1, gl.int32, LAYOUT)
    before = gl.atomic_add(counter + lanes, ones, mask=lanes == 0, sem="relaxed")
    return gl.sum(gl.where(lanes == 0, before, 0), 0)


@gluon.jit
def _hand_on(tile, tile_smem, bars, count):
    """Pass the ``count``-th tile number to the warpgroups, once they have read the preceding
    one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(bars.t_empty, (count & 1) ^ 1)
    tile_smem.store(gl.full([32], 0, gl.int32, LAYOUT) + tile)
    mbarrier.arrive(bars.t_full, count=1)


@gluon.jit
def next_tile(tile_smem, bars, count):
    """The ``count``-th number that :func:`produce` passes on; ``num_tiles`` after the last."""
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
    """Claim tiles, and load the queries of each and its vectors step by step. ``PANELS`` of 64
    elements form a vector, and ``GROUP`` panels share a barrier."""
    done = 0  # steps of all tiles
    tiles = 0
    count = 0
    number = gl.program_id(0)
    while number < batch.num_tiles:
        tile = tile_of(number, batch, H, SINGLES, _offsets_of_warp)
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


@gluon.constexpr_function
def needs_scratch(R):
    """Whether a warpgroup's registers cannot hold its half of the values twice."""
    return R > 256


@gluon.jit
def weigh_vectors(
    q_smem, ring, p_smem, line_smem, tile_smem, bars, batch, factor, splits,
    H: gl.constexpr, SINGLES: gl.constexpr, PANELS: gl.constexpr, GROUP: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Pass on each step's weights in the model's dtype with the current maxima, and after the last
    step the reciprocals of the weights' sums."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_N, 16])
    MASS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    GROUPS: gl.constexpr = PANELS // GROUP
    dtype: gl.constexpr = ring.dtype
    ones = gl.full([STEP_N, 8], 1.0, dtype, gl.DotOperandLayout(1, MASS, 2))
    lines = gl.arange(0, LINES, gl.SliceLayout(1, S))
    offsets = gl.arange(0, STEP_N, gl.SliceLayout(0, S))
    done = 0
    tiles = 0
    count = 0
    number = next_tile(tile_smem, bars, count)
    while number < batch.num_tiles:
        tile = tile_of(number, batch, H, SINGLES, _offsets_of_each_warp)
        last = tile.last
        if tile.attends:
            positions = gl.minimum(tile.start + (tile.first + lines) // H, last)
            whole = tile.start + tile.first // H  # up to here every line sees all vectors
            row_max = gl.full([LINES], float("-inf"), gl.float32, gl.SliceLayout(1, S))
            total_row_max = row_max
            row_sum = gl.zeros([LINES, 8], gl.float32, MASS)
            total_row_sum = row_sum
            mbarrier.wait(bars.q_full, tiles & 1)
            for step in range(last // STEP_N + 1):
                slot = done % SLOTS
                phase = done // SLOTS & 1
                scores = gl.zeros([LINES, STEP_N], gl.float32, S)
                for panel in gl.static_range(PANELS):
                    if panel % GROUP == 0:
                        mbarrier.wait(bars.full.index(slot * GROUPS + panel // GROUP), phase)
                    keys = ring.index(slot * PANELS + panel).permute((1, 0))
                    scores = warpgroup_mma(
                        q_smem.index(panel), keys, scores, use_acc=panel > 0, is_async=True
                    )
                scores = warpgroup_mma_wait(0, deps=(scores,))
                if step * STEP_N + (STEP_N - 1) > whole:
                    visible = offsets[None, :] <= (positions - step * STEP_N)[:, None]
                    scores = gl.where(visible, scores, float("-inf"))
                if (step * STEP_N > 0) & begins_split(step * STEP_N, splits):
                    total_row_max, a, b = fold_factors(total_row_max, row_max, factor)
                    total_row_sum = fold_sums(total_row_sum, row_sum, a, b)
                    row_max = gl.full_like(row_max, float("-inf"))
                    row_sum = gl.zeros_like(row_sum)
                row_max, rescale, weights = weigh(scores, row_max, factor)
                weights = weights.to(dtype)
                mbarrier.wait(bars.p_empty, ((done + tiles) & 1) ^ 1)
                p_smem.store(weights)
                line_smem.store(row_max)
                mbarrier.arrive(bars.p_full, count=1)
                wide = gl.convert_layout(weights, gl.DotOperandLayout(0, S, 2))
                narrow = gl.convert_layout(
                    wide, gl.DotOperandLayout(0, MASS, 2), assert_trivial=True
                )
                row_sum = mma_v2(narrow, ones, times(row_sum, rescale))
                done += 1
            mbarrier.arrive(bars.q_empty, count=1)
            total_row_max, a, b = fold_factors(total_row_max, row_max, factor)
            total_row_sum = fold_sums(total_row_sum, row_sum, a, b)
            mbarrier.wait(bars.p_empty, ((done + tiles) & 1) ^ 1)
            line_smem.store(1.0 / gl.max(total_row_sum, 1))
            mbarrier.arrive(bars.p_full, count=1)
            tiles += 1
        count += 1
        number = next_tile(tile_smem, bars, count)


@gluon.jit
def _pieces(left, right):
    """Two accumulators ``[M, N]`` as pieces of 64 columns: the amount that a thread folds at a
    time."""
    if left.shape[1] == 64:
        return left, right
    else:  # noqa: RET505 (what is not compiled may have another type)
        a, b = sides(left)
        c, d = sides(right)
        return a, b, c, d


@gluon.jit
def _by_thread(piece):
    """``piece [64, 64]`` as ``[1024, 4]``, with the elements of one thread per row."""
    warps = piece.reshape([4, 2, 8, 8, 4, 2]).permute([0, 3, 2, 4, 1, 5])
    return warps.reshape([1024, 4])


@gluon.jit
def _by_line(values):
    """The inverse of :func:`_by_thread`."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    warps = values.reshape([4, 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5])
    return gl.convert_layout(warps.reshape([64, 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def _folded(piece, scratch, has_total, a, b):
    """A piece folded into the corresponding piece of the total, which is at ``scratch`` if given;
    and the addresses of each thread's part of it."""
    layout: gl.constexpr = _by_thread(piece).type.layout
    offsets = gl.arange(0, 1024, gl.SliceLayout(1, layout))[:, None] * 4
    target = scratch + (offsets + gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :])
    mask = gl.full([1024, 4], 1, gl.int1, layout) & has_total
    total = gl.load(target, mask=mask, other=0.0, cache_modifier=".cg")
    return fold_sums(_by_line(total), piece, a, b), target


@gluon.jit
def sum_values(
    WARPGROUP: gl.constexpr,
    ring, p_smem, line_smem, tile_smem, bars, batch, out, scratch, factor, splits,
    H: gl.constexpr, SINGLES: gl.constexpr, R: gl.constexpr, PANELS: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Sum half of the values for all lines. Threads keep the accumulators of a split in registers.
    The sums of the splits before it are in ``scratch`` if registers do not suffice."""
    D: gl.constexpr = R // 4  # values per instruction: ptxas supports no 256 with so many threads
    PIECES: gl.constexpr = 2 * D // 64
    HAS_SCRATCH: gl.constexpr = needs_scratch(R)
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LINE: gl.constexpr = gl.SliceLayout(1, A)
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    PANEL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = ring.dtype
    scratch += (gl.program_id(0) * R + WARPGROUP * (2 * D)) * LINES
    done = 0
    tiles = 0
    count = 0
    number = next_tile(tile_smem, bars, count)
    while number < batch.num_tiles:
        tile = tile_of(number, batch, H, SINGLES, _offsets_of_each_warp)
        last = tile.last
        lines = tile.first + gl.arange(0, LINES, gl.SliceLayout(1, PIECE))
        dims = WARPGROUP * (2 * D) + gl.arange(0, 64, gl.SliceLayout(0, PIECE))
        is_line = (lines < tile.num_queries * H)[:, None]
        target = out + ((tile.begin * H + lines).to(gl.int64) * R)[:, None] + dims[None, :]
        if tile.attends:
            left = gl.zeros([LINES, D], gl.float32, A)
            right = left
            row_max = gl.full([LINES], float("-inf"), gl.float32, LINE)
            total_row_max = row_max
            has_total = False
            total_left = left  # used if registers suffice
            total_right = left
            for step in range(last // STEP_N + 1):
                slot = done % SLOTS
                mbarrier.wait(bars.p_full, (done + tiles) & 1)
                weights = p_smem.load(gl.DotOperandLayout(0, A, 2))
                new_row_max = line_smem.load(LINE)
                mbarrier.arrive(bars.p_empty, count=1)
                if (step * STEP_N > 0) & begins_split(step * STEP_N, splits):
                    total_row_max, a, b = fold_factors(total_row_max, row_max, factor)
                    if HAS_SCRATCH:
                        pieces = _pieces(left, right)
                        for i in gl.static_range(PIECES):
                            total, places = _folded(
                                pieces[i], scratch + i * (64 * LINES), has_total, a, b
                            )
                            gl.store(places, _by_thread(total), cache_modifier=".cg")
                        has_total = True
                    else:
                        total_left = fold_sums(total_left, left, a, b)
                        total_right = fold_sums(total_right, right, a, b)
                    row_max = gl.full_like(row_max, float("-inf"))
                    left = gl.zeros_like(left)
                    right = gl.zeros_like(right)
                base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
                rescale = gl.exp2((row_max - base) * factor)
                row_max = new_row_max
                panel = slot * PANELS + WARPGROUP * PIECES
                if step * STEP_N + (STEP_N - 1) > last:
                    # Vectors of unused slots may be NaN, but values must be finite.
                    exists = step * STEP_N + gl.arange(0, STEP_N, gl.SliceLayout(1, PANEL)) <= last
                    for i in gl.static_range(PIECES):
                        part = ring.index(panel + i)
                        values = part.load(PANEL)
                        part.store(gl.where(exists[:, None], values, gl.zeros_like(values)))
                    fence_async_shared()
                first_values = ring.index(panel)
                second_values = ring.index(panel + PIECES // 2)
                if D > 64:
                    first_values = first_values._reinterpret(dtype, [STEP_N, D], ring.layout)
                    second_values = second_values._reinterpret(dtype, [STEP_N, D], ring.layout)
                left = times(left, rescale)
                right = times(right, rescale)
                left = warpgroup_mma(weights, first_values, left, is_async=True)
                right = warpgroup_mma(weights, second_values, right, is_async=True)
                left, right = warpgroup_mma_wait(0, deps=(left, right))
                mbarrier.arrive(bars.empty.index(slot), count=1)
                done += 1
            mbarrier.wait(bars.p_full, (done + tiles) & 1)
            reciprocal = line_smem.load(LINE)
            mbarrier.arrive(bars.p_empty, count=1)
            tiles += 1
            total_row_max, a, b = fold_factors(total_row_max, row_max, factor)
            if not HAS_SCRATCH:
                left = fold_sums(total_left, left, a, b)
                right = fold_sums(total_right, right, a, b)
            pieces = _pieces(left, right)
            for i in gl.static_range(PIECES):
                total = pieces[i]
                if HAS_SCRATCH:
                    total, _ = _folded(total, scratch + i * (64 * LINES), has_total, a, b)
                gl.store(target + i * 64, times(total, reciprocal).to(dtype), mask=is_line)
        if tile.pads:
            zeros = gl.zeros([LINES, 64], dtype, PIECE)
            for i in gl.static_range(PIECES):
                gl.store(target + i * 64, zeros, mask=is_line)
        count += 1
        number = next_tile(tile_smem, bars, count)
