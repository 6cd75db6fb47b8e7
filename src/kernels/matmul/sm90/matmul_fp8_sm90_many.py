"""Warp-specialised matmul of many FP8 rows and an FP8 weight for Hopper.

A program computes tile after tile. Two producer warps keep the stages of shared memory filled,
including those of the next tile. Each of two or three consumer warpgroups multiplies 64 of the rows
and releases the stages. While the matrix unit works for one warpgroup, another scales and adds its
results, or stores. Rows of x are the left operand of the unit, so a thread has two of them, and two
scales. The bits are those of :mod:`..quantized.matmul_fp8`.

A stage holds a group of 128 inputs: 64 rows of x per consumer warpgroup, rows of the weight, and
the scales of both. One warp fills it by TMA, and another loads scales by ``cp.async``; its barrier
counts both. When consumer warpgroups loaded scales themselves, the next matmul waited as long as
memory takes (docs/notes/fp8.md).

With a gate (two HALVES), the kernel applies it and quantises the result: ``silu(gate) * up``,
rounded to e4m3 with a scale per 128 channels. A tile has 128 outputs, which share a scale. A
warpgroup computes 64 of them, both gate and up, and then the other 64. So it has no more
accumulators at a time than without a gate, and a thread has gate and up of the same output. Gate
and up stay in registers and are never stored to memory.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device import count_sms
from ...fused.e4m3_groups import QuantizedRows, quantized
from ...fused.rounding import silu_of_bfloat16
from ..matmul import tile_begin
from ..quantized.quantized_weight import BLOCK
from ..quantized.tiles_fp8 import ManyTile
from .matmul_sm90 import describe, stage_of
from .matmul_sm90_many import next_stage, packed, pair, place, unpacked

_LANES = gl.constexpr(32)  # of the warp that loads scales; each arrives for its own


@gluon.jit
def product_of_group(
    smem, left, right, SUM: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    """Start the matmul of one group, from zero; ``left`` and ``right`` are the operands' places."""
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    return warpgroup_mma(
        smem.index(left)._reinterpret(gl.float8e4nv, [LEFT, 128], OPERAND),
        smem.index(right)._reinterpret(gl.float8e4nv, [RIGHT, 128], OPERAND).permute((1, 0)),
        gl.zeros([LEFT, RIGHT], gl.float32, SUM),
        use_acc=False,
        is_async=True,
    )


@gluon.jit
def _allocate_stages(WARPGROUPS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr):
    """(operands, scales of rows, scales of the weight, barriers of full stages, of empty stages). A
    stage has 64 rows of x per consumer warpgroup and PART rows of the weight."""
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
def _load_operands(
    stages, x_desc, w_desc, num_rows, num_tiles,
    N: gl.constexpr, K: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Producer warp: keep the stages filled, one group in each. In a gated tile (two HALVES) the
    first 64 outputs come first, each time 64 rows of the gate's weight and of up's."""
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
def _load_scales(
    stages, scales, num_rows, num_tiles,
    N: gl.constexpr, K: gl.constexpr, W_GROUPS: gl.constexpr, SHARED: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Producer warp: load the scales of the operands; for a gated tile two scales of the weight.
    This is a separate warp, because small tiles waited for a warp that loaded both."""
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


@gluon.jit
def _factors(
    stages, slot, WARPGROUP: gl.constexpr, ROW: gl.constexpr, W_GROUPS: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """The scales of a group's matmul for each of 64 rows, for the gate and for up; without a gate
    the same twice."""
    _, x_smem, w_smem, full, _ = stages
    rows = x_smem.index(slot * (x_smem.shape[0] // full.shape[0]) + WARPGROUP).load(ROW)
    scales = w_smem.index(slot)
    if W_GROUPS == 1:
        factors = rows
    else:
        factors = rows * scales.slice(0, 1).load(ROW)
    if HALVES == 1:
        of_up = factors
    else:
        of_up = rows * scales.slice(_LANES // 2, 1).load(ROW)
    return factors, of_up


@gluon.jit
def _added(total, part, factors):
    """total + part * factors, with ``factors`` per row, rounded once."""
    return gl.fma(part, factors[:, None] + gl.zeros_like(part), total)


@gluon.jit
def _both_added(total, up, part, factors, HALVES: gl.constexpr):
    """:func:`_added` for all accumulators. With two HALVES the right half of ``part`` belongs to
    up."""
    if HALVES == 1:
        total = _added(total, part, factors[0])
    else:
        left, right = part.reshape([64, 2, part.shape[1] // 2]).permute((0, 2, 1)).split()
        left = gl.convert_layout(left, total.type.layout, assert_trivial=True)
        right = gl.convert_layout(right, up.type.layout, assert_trivial=True)
        total = _added(total, left, factors[0])
        up = _added(up, right, factors[1])
    return total, up


@gluon.jit
def _sums(
    stages, slot, phase,
    WARPGROUP: gl.constexpr, K: gl.constexpr, PART: gl.constexpr, W_GROUPS: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """64 rows by PART / HALVES outputs, of the gate and of up; and the next slot and phase. With
    two warpgroups, each has two matmuls in flight; with three, each has one, because registers
    allow no more."""
    smem, x_smem, _, full, empty = stages
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART // HALVES, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, HALF)
    STAGES: gl.constexpr = full.shape[0]
    WARPGROUPS: gl.constexpr = x_smem.shape[0] // STAGES
    PAIR: gl.constexpr = 4 - WARPGROUPS  # matmuls in flight: 2 with two warpgroups, 1 with three
    PIECES: gl.constexpr = smem.shape[0] // STAGES
    X: gl.constexpr = WARPGROUP * 8
    W: gl.constexpr = WARPGROUPS * 8
    total = gl.zeros([64, PART // HALVES], gl.float32, HALF)
    up = gl.zeros([64, PART // HALVES], gl.float32, HALF)
    for _ in range(0, K // 128, PAIR):
        parts = ()
        factors = ()
        for i in gl.static_range(PAIR):
            at = slot * PIECES + i * PIECES
            mbarrier.wait(full.index(slot + i), phase)
            part = product_of_group(smem, at + X, at + W, SUM, 64, PART)
            parts = parts + (part,)  # noqa: RUF005 - Gluon has no star
            found = _factors(stages, slot + i, WARPGROUP, ROW, W_GROUPS, HALVES)
            factors = factors + (found,)  # noqa: RUF005
        for i in gl.static_range(PAIR):
            part = warpgroup_mma_wait(PAIR - 1 - i, deps=(parts[i],))
            mbarrier.arrive(empty.index(slot + i), count=1)
            total, up = _both_added(total, up, part, factors[i], HALVES)
        slot, phase = next_stage(slot, phase, PAIR, STAGES)
    return total, up, slot, phase


@gluon.jit
def _gated(gate, up):
    """Pairs of ``silu(gate) * up``, each operation rounded to bfloat16."""
    even, odd = unpacked(packed(gate))
    activated = pair(silu_of_bfloat16(even), silu_of_bfloat16(odd))
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [activated, packed(up)], gl.int32, True, 1
    )


@gluon.jit
def _together(first, second):
    """Pairs ``[64, 32]`` of the first 64 outputs and of the others, as float32 ``[64, 128]``."""
    even, odd = unpacked(first)
    left = gl.join(even, odd).reshape([64, 64])
    even, odd = unpacked(second)
    right = gl.join(even, odd).reshape([64, 64])
    return gl.join(left, right).permute((0, 2, 1)).reshape([64, 128])


@gluon.jit
def _store(
    total, w_scales, out, first, begin, num_rows,
    N: gl.constexpr, W_GROUPS: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Multiply the sums of 64 rows from ``first`` on by the scales that outputs have for all
    inputs, round and store them."""
    WIDE: gl.constexpr = total.shape[1]
    SUM: gl.constexpr = total.type.layout
    if W_GROUPS == 1:
        n = begin + gl.arange(0, WIDE, gl.SliceLayout(0, SUM))
        total = total * gl.load(w_scales + n // SHARED)[None, :]
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
    result = gl.convert_layout(total.to(gl.bfloat16), LINE)
    m = first + gl.arange(0, 64, gl.SliceLayout(1, LINE))
    n_out = begin + gl.arange(0, WIDE, gl.SliceLayout(0, LINE))
    target = out + m.to(gl.int64)[:, None] * N + n_out[None, :]
    gl.store(target, result, mask=(m < num_rows)[:, None] & (n_out < N)[None, :])


@gluon.jit
def _multiply(
    work,
    WARPGROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr,
    W_GROUPS: gl.constexpr, SHARED: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: multiply 64 rows of each tile."""
    stages, results, num_rows, num_tiles = work
    _, x_smem, _, full, _ = stages
    if HALVES == 2:
        buffers, out_desc, out_scales = results
        buffer = buffers.index(WARPGROUP)
        halves = buffer._reinterpret(
            gl.int32, [64, PART // 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    WARPGROUPS: gl.constexpr = x_smem.shape[0] // full.shape[0]
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, PART, 64 * WARPGROUPS)
        first = tile_begin(row_tile * WARPGROUPS + WARPGROUP, num_rows, 64)
        total, up, slot, phase = _sums(
            stages, slot, phase, WARPGROUP, K, PART, W_GROUPS, HALVES
        )  # fmt: skip
        if HALVES == 1:
            out, w_scales = results
            _store(total, w_scales, out, first, begin, num_rows, N, W_GROUPS, SHARED)
        else:
            # Before the buffer is written again. TMA clips the box at the last row.
            tma.store_wait(0)
            halves.store(_gated(total, up))
            total, up, slot, phase = _sums(
                stages, slot, phase, WARPGROUP, K, PART, W_GROUPS, HALVES
            )  # fmt: skip
            second = _gated(total, up)
            values, scales = quantized(_together(halves.load(second.type.layout), second))
            m = first + gl.arange(0, 64, scales.type.layout)
            gl.store(out_scales + begin // PART * num_rows + m, scales, mask=m < num_rows)
            buffer.store(values)
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [first, begin], buffer)
    if HALVES == 2:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def many_rows_kernel(
    x_desc,  # e4m3 [M, K], boxes [64, 128]
    w_desc,  # e4m3 [N, K], boxes [PART, 128]; with a gate [2, N, K], boxes [2, 64, 128]
    out_desc,  # e4m3 [M, N], boxes [64, 128]; None without a gate
    x_scales,  # float32 [K / 128, M]
    w_scales,  # float32 [N / 128, K / 128], or [ceil(N / SHARED), 1]; with a gate of 2 N outputs
    out,  # bfloat16 [M, N], contiguous; None with a gate
    out_scales,  # float32 [N / 128, M]; None without a gate
    num_rows,
    N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr,
    X_ROWS: gl.constexpr,  # 128 or 192: 64 for each of two or three warpgroups
    STAGES: gl.constexpr, W_GROUPS: gl.constexpr, SHARED: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T``, or with two HALVES ``out * out_scales = silu(x @ weight[0].T) * (x @
    weight[1].T)``. No constant depends on the number of rows.

    Grid: at most one program per multiprocessor; they share N / PART * ceil(M / X_ROWS) tiles. With
    two warpgroups, the numbers of groups and of stages are even."""
    tl.extra.cuda.gdc_launch_dependents()
    WARPGROUPS: gl.constexpr = X_ROWS // 64
    num_tiles = (num_rows + X_ROWS - 1) // X_ROWS * (N // PART)
    stages = _allocate_stages(WARPGROUPS, PART, STAGES)
    if HALVES == 1:
        results = (out, w_scales)
    else:
        buffers = gl.allocate_shared_memory(gl.float8e4nv, [WARPGROUPS, 64, PART], out_desc.layout)
        results = (buffers, out_desc, out_scales)
    tl.extra.cuda.gdc_wait()
    work = (stages, results, num_rows, num_tiles)
    scales = (x_scales, w_scales)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, N, K, PART, W_GROUPS, SHARED, HALVES)),
                (_multiply, (work, 1, N, K, PART, W_GROUPS, SHARED, HALVES)),
                (_load_operands, (stages, x_desc, w_desc, num_rows, num_tiles, N, K, HALVES)),
                (
                    _load_scales,
                    (stages, scales, num_rows, num_tiles, N, K, W_GROUPS, SHARED, HALVES),
                ),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, N, K, PART, W_GROUPS, SHARED, HALVES)),
                (_multiply, (work, 1, N, K, PART, W_GROUPS, SHARED, HALVES)),
                (_multiply, (work, 2, N, K, PART, W_GROUPS, SHARED, HALVES)),
                (_load_operands, (stages, x_desc, w_desc, num_rows, num_tiles, N, K, HALVES)),
                (
                    _load_scales,
                    (stages, scales, num_rows, num_tiles, N, K, W_GROUPS, SHARED, HALVES),
                ),
            ],
            [4, 4, 1, 1],
            [160, 160, 32, 32],
        )


def launch_many_rows(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    out: Tensor | QuantizedRows,
    *,
    shared: int,
    tile: ManyTile,
) -> None:
    """Write ``x @ weight.T``, or quantised ``silu(gate) * up``, to ``out`` ``[M, N]``.

    Args:
        x: quantised rows ``[M, K]``, M above 0.
        weight: e4m3 ``[N, K]``; ``[2 N, K]`` (gate, then up) if ``out`` is quantised.
        scales, shared, tile: see :func:`.matmul_fp8_sm90.matmul`.
    """
    num_rows, k_size = x.values.shape
    gated = out if isinstance(out, QuantizedRows) else None
    halves = 1 if gated is None else 2
    num_outs = len(weight) // halves
    num_tiles = -(-num_rows // tile.x_rows) * (num_outs // tile.part)
    many_rows_kernel[(min(num_tiles, count_sms(weight.device)),)](
        describe(x.values, 64, BLOCK),
        describe(weight, tile.part // halves, BLOCK, halves=0 if gated is None else 2),
        None if gated is None else describe(gated.values, 64, BLOCK),
        x.scales, scales, out if gated is None else None, None if gated is None else gated.scales,
        num_rows,
        N=num_outs, K=k_size, PART=tile.part, X_ROWS=tile.x_rows, STAGES=tile.stages,
        W_GROUPS=scales.shape[1], SHARED=shared, HALVES=halves,
        num_warps=4,  # of the first warpgroup; the others are its workers
        enable_fp_fusion=False,
        launch_pdl=True,
    )  # fmt: skip
