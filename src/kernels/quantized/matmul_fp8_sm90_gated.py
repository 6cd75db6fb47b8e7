"""Matmul of many FP8 rows and an FP8 weight with a gate for Hopper, which applies the gate and
quantises the result: ``silu(gate) * up``, rounded to e4m3 with a scale for each 128 channels.

As :mod:`.matmul_fp8_sm90_many`, whose bits the sums have, with tiles twice as wide: 128 rows of x
by 128 rows of the gate's weight and the same ones of up's. A thread has both of an output, and four
threads have a row's group of 128 outputs: gate and up, which else go to memory and back in
bfloat16, stay in registers.

A warpgroup has float32 sums of 64 rows by 256, which leaves registers for the product of one half
and one group only: while a warpgroup adds one up, the matrix unit works for the other. One is two
groups ahead, so that it stores while the other still multiplies.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ..fused.e4m3_groups import GROUP, quantized
from ..linear.matmul_sm90_many import silu_of_bfloat16
from ..linear.row_tiles import tile_begin
from .matmul_fp8_sm90_few import product_of_group, stage_of
from .matmul_fp8_sm90_many import place

_GROUP = gl.constexpr(GROUP)
_STAGES = gl.constexpr(4)  # of a group of summands
_ROWS = gl.constexpr(128)  # of x, in a tile
_PART = gl.constexpr(128)  # outputs of a tile
_X_PIECES = gl.constexpr(16)  # of a stage, 1 KiB each
_W_PIECES = gl.constexpr(16)  # the gate's; up's follow
_PIECES = gl.constexpr(48)
_LEAD = gl.constexpr(2)  # groups by which the first warpgroup is ahead of the second


@gluon.jit
def _next(slot, phase):
    wraps = slot == _STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _load(smem, full, empty, x_desc, w_desc, num_rows, num_tiles, N: gl.constexpr, K: gl.constexpr):
    """Keeps the stages filled, a group in each."""
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, _PART, _ROWS)
        for group in range(K // 128):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, _PIECES * 1024)
            for half in gl.static_range(2):
                target = stage_of(smem, slot, half * _X_PIECES // 2, _PIECES, x_desc)
                first = tile_begin(row_tile * 2 + half, num_rows, _ROWS // 2)
                tma.async_copy_global_to_shared(x_desc, [first, group * 128], bar, target)
            target = stage_of(smem, slot, _X_PIECES, _PIECES, w_desc)
            tma.async_copy_global_to_shared(w_desc, [0, begin, group * 128], bar, target)
            slot, phase = _next(slot, phase)


@gluon.jit
def _added(total, part, factors):
    """total + part * factors, ``factors`` for each row, with one rounding. Here and now: LLVM moves
    a plain fma behind all that is issued or waited for, where both products would be alive."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [part, gl.expand_dims(factors, 1), total],
        gl.float32,
        False,
        1,
    )


@gluon.jit
def _sums(
    smem, full, empty, lead, x_scales, w_scales, num_rows, first, begin, slot, phase, is_first,
    HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """64 rows by 128 outputs of gate and up; and the next slot and phase."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _PART, 32])
    GROUPS: gl.constexpr = K // 128
    OTHER: gl.constexpr = N // 128 * GROUPS  # from the gate's scales to up's
    m = first + gl.arange(0, 64, gl.SliceLayout(1, SUM))
    mask = m < num_rows
    x_at = x_scales + m
    w_at = w_scales + begin // 128 * GROUPS
    gate = gl.zeros([64, _PART], gl.float32, SUM)
    up = gl.zeros([64, _PART], gl.float32, SUM)
    # Scales are loaded a group ahead: nothing waits for them.
    of_rows = gl.load(x_at, mask=mask, other=0.0)
    of_gate = gl.load(w_at)
    of_up = gl.load(w_at + OTHER)
    for group in range(GROUPS):
        then = gl.minimum(group + 1, GROUPS - 1)
        next_of_rows = gl.load(x_at + then * num_rows, mask=mask, other=0.0)
        next_of_gate = gl.load(w_at + then)
        next_of_up = gl.load(w_at + then + OTHER)
        x = slot * _PIECES + HALF * 8
        w = slot * _PIECES + _X_PIECES
        mbarrier.wait(full.index(slot), phase)
        part = product_of_group(smem, x, w, SUM, 64, _PART)
        part = warpgroup_mma_wait(0, deps=(part,))
        gate = _added(gate, part, of_rows * of_gate)
        # Waited for already; the branch keeps the sums before the next product.
        mbarrier.wait(full.index(slot), phase)
        part = product_of_group(smem, x, w + _W_PIECES, SUM, 64, _PART)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(slot), count=1)
        if HALF == 0:
            mbarrier.arrive(lead, count=1, pred=is_first & (group == _LEAD - 1))
        up = _added(up, part, of_rows * of_up)
        of_rows = next_of_rows
        of_gate = next_of_gate
        of_up = next_of_up
        slot, phase = _next(slot, phase)
    return gate, up, slot, phase


@gluon.jit
def _pair(even, odd):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1
    )


@gluon.jit
def _pairs(x):
    """Columns of float32, rounded to bfloat16 and two per int32."""
    even, odd = x.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
    return _pair(even, odd)


@gluon.jit
def _unpacked(pairs):
    """Even and odd columns, as float32."""
    even = (pairs << 16).to(gl.float32, bitcast=True)
    return even, (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _gated(gate, up):
    """``silu(gate) * up`` as float32, every operation rounded to bfloat16."""
    even, odd = _unpacked(_pairs(gate))
    activated = _pair(silu_of_bfloat16(even), silu_of_bfloat16(odd))
    product = gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [activated, _pairs(up)], gl.int32, True, 1
    )
    even, odd = _unpacked(product)
    results = gl.join(even, odd).reshape(gate.shape)
    return gl.convert_layout(results, gate.type.layout, assert_trivial=True)


@gluon.jit
def _multiply(shared, HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    """64 rows of each tile."""
    smem, out_smem, full, empty, lead, tensors, num_rows, num_tiles = shared
    x_scales, w_scales, out_desc, out_scales = tensors
    slot = 0
    phase = 0
    if HALF == 1:
        mbarrier.wait(lead, 0)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, _PART, _ROWS)
        first = tile_begin(row_tile * 2 + HALF, num_rows, 64)
        gate, up, slot, phase = _sums(
            smem, full, empty, lead, x_scales, w_scales, num_rows, first, begin, slot, phase,
            tile == gl.program_id(0), HALF, N, K,
        )  # fmt: skip
        values, scales = quantized(_gated(gate, up))
        m = first + gl.arange(0, 64, scales.type.layout)
        gl.store(out_scales + begin // _GROUP * num_rows + m, scales, mask=m < num_rows)
        # Before the buffer is written again. TMA leaves out what lies beyond the last row.
        tma.store_wait(0)
        out_smem.index(HALF).store(values)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [first, begin], out_smem.index(HALF))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def gated_rows_kernel(
    x_desc,  # e4m3 [M, K], boxes [64, 128]
    w_desc,  # e4m3 [2, N, K], boxes [2, 128, 128]
    out_desc,  # e4m3 [M, N], boxes [64, 128]
    x_scales,  # float32 [K / 128, M]
    w_scales,  # float32 [2 * N / 128, K / 128]
    out_scales,  # float32 [N / 128, M]
    num_rows,
    N: gl.constexpr, K: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``out * out_scales = silu(x @ weight[0].T) * (x @ weight[1].T)``. Grid: up to a program per
    multiprocessor; they share N / 128 * ceil(M / 128) tiles. K is 256 at least."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gl.static_assert(K >= _LEAD * 128)
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    num_tiles = (num_rows + _ROWS - 1) // _ROWS * (N // _PART)
    smem = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES * _PIECES, 8, 128], OPERAND)
    out_smem = gl.allocate_shared_memory(gl.float8e4nv, [2, 64, _PART], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(_STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    mbarrier.init(lead, count=1)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_wait()
    tensors = (x_scales, w_scales, out_desc, out_scales)
    shared = (smem, out_smem, full, empty, lead, tensors, num_rows, num_tiles)
    gl.warp_specialize(
        [
            (_multiply, (shared, 0, N, K)),
            (_multiply, (shared, 1, N, K)),
            (_load, (smem, full, empty, x_desc, w_desc, num_rows, num_tiles, N, K)),
        ],
        [4, 1],
        [240, 24],
    )
