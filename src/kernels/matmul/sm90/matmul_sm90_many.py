"""Warp-specialised matmul of many bfloat16 rows for Hopper, with or without a gate.

Persistent programs compute tile after tile of 128 rows by 256 rows of the weight. A producer warp
keeps the stages of shared memory filled (TMA), including those of the next tile. Each of two
consumer warpgroups multiplies 64 of the tile's rows by all its weights. One float32 accumulator
runs over all of K, 16 summands per instruction, so any tile has the bits of :mod:`.matmul_sm90` and
of cuBLAS without split-K.

In the epilogue, which is long with a gate, a warpgroup would not multiply. So the epilogue is
deferred. The rounded sums stay in registers, half as many as the accumulators. They are gated and
stored piece by piece in the next tile, each piece concurrently with a stage's matmuls. ptxas allows
that as long as only matmuls touch the accumulator. Otherwise it emits warning C7515, and every
matmul is waited for.

With a gate, a tile has 128 rows of the gate's weight and the same rows of up's, so a thread has
gate and up of the same output.

Unlike :mod:`.matmul_sm90` this kernel reads nothing before the previous kernel has ended. With many
rows that would hide little latency, and so the previous kernel may write the weight
(:mod:`..quantized.dispatch_int4`).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device import count_sms
from ...fused.rounding import silu_of_bfloat16
from ..matmul import tile_begin
from ..tiles import MANY_ROWS, MANY_WEIGHT_ROWS, count_many_tiles, fits_many_rows
from .matmul_sm90 import describe

STAGES = gl.constexpr(4)  # of 64 summands
OUT_BUFFERS = gl.constexpr(2)  # per warpgroup, 64 rows by 64 outputs each
_ROWS = gl.constexpr(MANY_ROWS)
_WIDE = gl.constexpr(MANY_WEIGHT_ROWS)
_BAND = gl.constexpr(16)  # tiles of rows


@gluon.jit
def place(tile, num_rows, N: gl.constexpr, PART: gl.constexpr, X_ROWS: gl.constexpr):
    """(index of the tile of X_ROWS rows, first output) of a tile of PART outputs. Tiles are ordered
    in bands of row tiles, so that concurrent tiles share both operands."""
    num_row_tiles = (num_rows + X_ROWS - 1) // X_ROWS
    num_in_band = _BAND * ((N + PART - 1) // PART)
    top = tile // num_in_band * _BAND
    height = gl.minimum(num_row_tiles - top, _BAND)
    return top + tile % num_in_band % height, tile % num_in_band // height * PART


@gluon.jit
def next_stage(slot, phase, STEP: gl.constexpr, NUM_STAGES: gl.constexpr):
    """``slot`` and its barrier's phase after STEP more stages."""
    wraps = slot == NUM_STAGES - STEP
    return gl.where(wraps, 0, slot + STEP), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _load(ring, N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr):
    """Producer warp: keep the stages filled, with 64 summands each."""
    x_smem, w_smem, full, empty, x_desc, w_desc, num_rows, num_tiles = ring
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, PART, _ROWS)
        for step in range(K // 64):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, (_ROWS + _WIDE) * 128)
            for half in gl.static_range(2):
                target = x_smem.index(slot * 2 + half)
                at = [tile_begin(row_tile * 2 + half, num_rows, 64), step * 64]
                tma.async_copy_global_to_shared(x_desc, at, bar, target)
            target = w_smem.index(slot)
            target = target._reinterpret(gl.bfloat16, w_desc.block_type.shape, w_desc.layout)
            tma.async_copy_global_to_shared(w_desc, [0, begin, step * 64], bar, target)
            slot, phase = next_stage(slot, phase, 1, STAGES)


@gluon.jit
def packed(x):
    """Float32 columns, rounded to bfloat16, two per int32."""
    even, odd = x.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
    return pair(even, odd)


@gluon.jit
def pair(even, odd):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1
    )


@gluon.jit
def unpacked(pairs):
    """Even and odd columns as float32."""
    even = (pairs << 16).to(gl.float32, bitcast=True)
    return even, (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _halves(x):
    """The left and the right half of columns, without moving registers between threads."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _part(x, i: gl.constexpr, WIDE: gl.constexpr):
    """Part ``i`` of parts of ``WIDE`` columns."""
    HALF: gl.constexpr = x.shape[1] // 2
    if x.shape[1] == WIDE:
        found = x
    elif i * WIDE < HALF:
        found = _part(_halves(x)[0], i, WIDE)
    else:
        found = _part(_halves(x)[1], i - HALF // WIDE, WIDE)
    return found


@gluon.jit
def _gated(sums, i: gl.constexpr):
    """Part ``i`` of silu(gate) * up, 32 outputs; each operation is rounded."""
    gate, up = _halves(sums)
    even, odd = unpacked(_part(gate, i, 16))
    even, odd = unpacked(pair(silu_of_bfloat16(even), silu_of_bfloat16(odd)))
    even_up, odd_up = unpacked(_part(up, i, 16))
    return pair(even * even_up, odd * odd_up)


@gluon.jit
def _store_async(pairs, buffer, out_desc, first, begin):
    """Store 64 outputs of 64 rows. TMA clips the box at the last row."""
    tma.store_wait(OUT_BUFFERS - 1)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    buffer._reinterpret(gl.int32, [64, 32], LAYOUT).store(pairs)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [first, begin], buffer)


@gluon.jit
def _finish_part(
    i: gl.constexpr, sums, before, out_smem, out_desc, first, begin, HALF: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Store part ``i`` of 64 sums. With a gate these give 32 outputs, which are stored every second
    time together with ``before``. Returns the next part's ``before``."""
    PIECE: gl.constexpr = i // HALVES
    buffer = out_smem.index(HALF * OUT_BUFFERS + PIECE % OUT_BUFFERS)
    if HALVES == 1:
        _store_async(_part(sums, i, 32), buffer, out_desc, first, begin + PIECE * 64)
        after = before
    else:
        after = _gated(sums, i)
        if i % 2:
            pairs = gl.join(before, after).permute([0, 2, 1]).reshape([64, 32])
            _store_async(pairs, buffer, out_desc, first, begin + PIECE * 64)
    return after


@gluon.jit
def _add(x_smem, w_smem, slot, total, HALF: gl.constexpr, FROM_ZERO: gl.constexpr):
    """total plus the matmul of a stage, or that matmul alone, without waiting for it."""
    return warpgroup_mma(
        x_smem.index(slot * 2 + HALF),
        w_smem.index(slot).permute((1, 0)),
        total,
        use_acc=not FROM_ZERO,
        is_async=True,
    )


@gluon.jit
def _multiply(
    shared, HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr, HALVES: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: multiply 64 rows of each tile."""
    x_smem, w_smem, out_smem, full, empty, out_desc, num_rows, num_tiles = shared
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDE, 16])
    PARTS: gl.constexpr = _WIDE // 64
    slot = 0
    phase = 0
    zeros = gl.zeros([64, _WIDE], gl.float32, SUM)
    sums = packed(zeros)
    # Before the first tile: beyond all rows.
    first = num_rows + 64
    column = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, PART, _ROWS)
        mbarrier.wait(full.index(slot), phase)
        total = _add(x_smem, w_smem, slot, zeros, HALF, True)
        last = slot
        slot, phase = next_stage(slot, phase, 1, STAGES)
        before = sums
        for i in gl.static_range(PARTS):
            # This wait keeps matmuls before the code that overlaps with them: ptxas reorders the
            # code between two branches.
            mbarrier.wait(full.index(slot), phase)
            before = _finish_part(i, sums, before, out_smem, out_desc, first, column, HALF, HALVES)
            total = _add(x_smem, w_smem, slot, total, HALF, False)
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index(last), count=1)
            last = slot
            slot, phase = next_stage(slot, phase, 1, STAGES)
        for _ in range(PARTS + 1, K // 64):
            mbarrier.wait(full.index(slot), phase)
            total = _add(x_smem, w_smem, slot, total, HALF, False)
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index(last), count=1)
            last = slot
            slot, phase = next_stage(slot, phase, 1, STAGES)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(last), count=1)
        sums = packed(total)
        first = tile_begin(row_tile * 2 + HALF, num_rows, 64)
        column = begin
    before = sums
    for i in gl.static_range(PARTS):
        before = _finish_part(i, sums, before, out_smem, out_desc, first, column, HALF, HALVES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def many_rows_kernel(
    x_desc,  # [M, K], boxes [64, 64]
    w_desc,  # [HALVES, N, K], boxes [HALVES, 256 / HALVES, 64]
    out_desc,  # [M, N], boxes [64, 64]
    num_rows,
    N: gl.constexpr, K: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T``, with two HALVES ``silu(gate) * up``. Grid: up to one program per
    multiprocessor; they share ceil(N * HALVES / 256) * ceil(M / 128) tiles.

    No constant depends on the number of rows: one build serves all."""
    tl.extra.cuda.gdc_launch_dependents()
    PART: gl.constexpr = _WIDE // HALVES  # outputs of a tile
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    num_tiles = (num_rows + _ROWS - 1) // _ROWS * ((N + PART - 1) // PART)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, 64, 64], OPERAND)
    w_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _WIDE, 64], OPERAND)
    out_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * OUT_BUFFERS, 64, 64], OPERAND)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    tl.extra.cuda.gdc_wait()
    ring = (x_smem, w_smem, full, empty, x_desc, w_desc, num_rows, num_tiles)
    shared = (x_smem, w_smem, out_smem, full, empty, out_desc, num_rows, num_tiles)
    gl.warp_specialize(
        [
            (_multiply, (shared, 0, N, K, HALVES, PART)),
            (_multiply, (shared, 1, N, K, HALVES, PART)),
            (_load, (ring, N, K, PART)),
        ],
        [4, 1],
        [240, 24],
    )


def matmul_many(x: Tensor, weight: Tensor, has_gate: bool = False) -> Tensor:
    """``x @ weight.T``, rounded; one launch.

    Args:
        x: bfloat16 ``[M, K]`` on a Hopper GPU; rows are whole 16-byte units and may be strided.
        weight: bfloat16 ``[N, K]``, or ``[2 N, K]`` (gate, then up), with the same conditions.
        has_gate: whether to return ``silu(gate) * up``, each operation rounded.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: shapes do not match each other or the kernel.
    """
    (num_rows, k_size), halves = x.shape, 2 if has_gate else 1
    num_outs = len(weight) // halves
    if weight.shape[1] != k_size or not fits_many_rows(num_outs, k_size):
        raise ValueError(
            f"x {list(x.shape)} or the kernel does not suit weight {list(weight.shape)}"
        )
    out = x.new_empty(num_rows, num_outs)
    if num_rows == 0:
        return out
    num_tiles = count_many_tiles(num_rows, num_outs, has_gate)
    many_rows_kernel[(min(num_tiles, count_sms(x.device)),)](
        describe(x, 64, 64),
        describe(weight, MANY_WEIGHT_ROWS // halves, 64, halves=halves),
        describe(out, 64, 64),
        num_rows,
        N=num_outs,
        K=k_size,
        HALVES=halves,
        num_warps=4,  # of the first warpgroup; the others are its workers
        launch_pdl=True,
    )
    return out
