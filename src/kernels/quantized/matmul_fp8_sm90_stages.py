"""The stages of shared memory through which FP8 matmuls of many rows for Hopper get their operands.

A stage holds a group of 128 inputs: 64 rows of x for each warpgroup that multiplies, rows of the
weight, and the scales of both. Two warps fill it, one by TMA and one, with scales, by ``cp.async``;
its barrier counts both. Warpgroups that loaded scales themselves held up the product behind them
for as long as memory takes (docs/notes/fp8.md).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..linear.matmul import tile_begin
from .matmul_fp8_sm90_few import stage_of

_LANES = gl.constexpr(32)  # of the warp that loads scales; each arrives when its own are there


@gluon.jit
def place(tile, num_rows, N: gl.constexpr, PART: gl.constexpr, X_ROWS: gl.constexpr):
    """(which tile of rows, first output) of a tile. They go in bands of 16 tiles of rows, so that
    what runs at a time shares both operands."""
    BAND: gl.constexpr = 16
    num_row_tiles = (num_rows + X_ROWS - 1) // X_ROWS
    num_a_band = BAND * (N // PART)
    top = tile // num_a_band * BAND
    height = gl.minimum(num_row_tiles - top, BAND)
    return top + tile % num_a_band % height, tile % num_a_band // height * PART


@gluon.jit
def next_stage(slot, phase, STEP: gl.constexpr, STAGES: gl.constexpr):
    """Of ``slot`` and its barrier's phase, STEP stages on."""
    wraps = slot == STAGES - STEP
    return gl.where(wraps, 0, slot + STEP), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def allocate_stages(WARPGROUPS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr):
    """(operands, scales of rows, of the weight, barriers of full stages, of empty ones): 64 rows of
    x for each warpgroup and PART of the weight a stage."""
    PIECES: gl.constexpr = WARPGROUPS * 8 + PART // 8
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PIECES, 8, 128], OPERAND)
    x_smem = gl.allocate_shared_memory(gl.float32, [STAGES * WARPGROUPS, 64], LINES)
    w_smem = gl.allocate_shared_memory(gl.float32, [STAGES, _LANES], LINES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1 + _LANES)
        mbarrier.init(empty.index(slot), count=WARPGROUPS)
    fence_async_shared()
    x_smem = x_smem._reinterpret(gl.float32, x_smem.shape, FLAT)
    w_smem = w_smem._reinterpret(gl.float32, w_smem.shape, FLAT)
    return smem, x_smem, w_smem, full, empty


@gluon.jit
def scales_of_rows(stages, slot, WARPGROUP: gl.constexpr, ROW: gl.constexpr):
    """Of a warpgroup's 64 rows of a full stage."""
    _, x_smem, _, full, _ = stages
    return x_smem.index(slot * (x_smem.shape[0] // full.shape[0]) + WARPGROUP).load(ROW)


@gluon.jit
def load_operands(
    stages, x_desc, w_desc, num_rows, num_tiles,
    N: gl.constexpr, K: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Keeps the stages filled, a group in each. Of a gated tile, of two HALVES, the first 64
    outputs come first, each time 64 rows of the gate's weight and of up's."""
    smem, x_smem, _, full, empty = stages
    STAGES: gl.constexpr = full.shape[0]
    WARPGROUPS: gl.constexpr = x_smem.shape[0] // STAGES
    PIECES: gl.constexpr = smem.shape[0] // STAGES
    PART: gl.constexpr = PIECES * 8 - WARPGROUPS * 64
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, PART, WARPGROUPS * 64)
        for step in range(HALVES * (K // 128)):
            group = step % (K // 128)
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, PIECES * 1024)
            for part in gl.static_range(WARPGROUPS):
                target = stage_of(smem, slot, part * 8, PIECES, x_desc)
                first = tile_begin(row_tile * WARPGROUPS + part, num_rows, 64)
                tma.async_copy_global_to_shared(x_desc, [first, group * 128], bar, target)
            target = stage_of(smem, slot, WARPGROUPS * 8, PIECES, w_desc)
            if HALVES == 1:
                tma.async_copy_global_to_shared(w_desc, [begin, group * 128], bar, target)
            else:
                at = [0, begin + step // (K // 128) * 64, group * 128]
                tma.async_copy_global_to_shared(w_desc, at, bar, target)
            slot, phase = next_stage(slot, phase, 1, STAGES)


@gluon.jit
def load_scales(
    stages, scales, num_rows, num_tiles,
    N: gl.constexpr, K: gl.constexpr, W_GROUPS: gl.constexpr, SHARED: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """The scales of what :func:`load_operands` loads; of a gated tile's weight, two. A warp of its
    own: one that did both was what small tiles waited for."""
    smem, x_smem, w_smem, full, empty = stages
    x_scales, w_scales = scales
    STAGES: gl.constexpr = full.shape[0]
    WARPGROUPS: gl.constexpr = x_smem.shape[0] // STAGES
    PART: gl.constexpr = smem.shape[0] // STAGES * 8 - WARPGROUPS * 64
    LANES: gl.constexpr = gl.BlockedLayout([1], [_LANES], [1], [0])
    rows = gl.arange(0, 64, LANES)
    which = gl.arange(0, _LANES, LANES) // (_LANES // 2) * (HALVES - 1)
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, PART, WARPGROUPS * 64)
        w_at = w_scales + (begin // SHARED + which * (N // SHARED)) * W_GROUPS
        for step in range(HALVES * (K // 128)):
            group = step % (K // 128)
            mbarrier.wait(empty.index(slot), phase)
            for part in gl.static_range(WARPGROUPS):
                m = tile_begin(row_tile * WARPGROUPS + part, num_rows, 64) + rows
                async_copy.async_copy_global_to_shared(
                    x_smem.index(slot * WARPGROUPS + part),
                    x_scales + group * num_rows + m,
                    mask=m < num_rows,
                )
            if W_GROUPS > 1:
                async_copy.async_copy_global_to_shared(w_smem.index(slot), w_at + group)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot, phase = next_stage(slot, phase, 1, STAGES)
