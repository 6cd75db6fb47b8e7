"""Matmul of many FP8 rows and an FP8 weight for Hopper, in tiles of 128 rows by 256 rows of the
weight, with or without a gate.

As :mod:`.matmul_fp8_sm90_many`, with its bits, and a tile twice as wide: a multiplication takes
three quarters of the bytes from L2 and nine tenths from shared memory, which are what bounds those
kernels. A warpgroup has float32 sums of 64 rows by 256, so there is room for the product of one
half and one group only: while a warpgroup adds one up, the matrix unit works for the other.

With a gate the two halves are 128 rows of the gate and the same ones of up, so that a thread has
both of an output, and four threads have a row's group of 128 outputs: ``silu(gate) * up`` is
rounded to e4m3 and stored with its scales, as :mod:`..fused.quantize_rows` would of stored results.
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
from .matmul_fp8_sm90_few import product_of_group, stage_of
from .matmul_sm90_many import silu_of_bfloat16

_GROUP = gl.constexpr(GROUP)
_ROWS = gl.constexpr(128)
_PIECES = gl.constexpr((128 + 256) // 8)  # of a stage, 1 KiB each


@gluon.jit
def _place(tile, num_rows, N: gl.constexpr, PART: gl.constexpr, BAND: gl.constexpr):
    """(first row of x, first output) of a tile. They go in bands of tiles of rows, so that what
    runs at a time shares both operands."""
    num_row_tiles = (num_rows + _ROWS - 1) // _ROWS
    num_in_band = BAND * (N // PART)
    top = tile // num_in_band * BAND
    height = gl.minimum(num_row_tiles - top, BAND)
    return (top + tile % num_in_band % height) * _ROWS, tile % num_in_band // height * PART


@gluon.jit
def _load(
    ring, N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr,
):  # fmt: skip
    """Keeps the stages filled, a group in each."""
    smem, full, empty, x_desc, w_desc, num_rows, num_tiles = ring
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        begin_m, begin = _place(tile, num_rows, N, PART, BAND)
        for group in range(K // 128):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, _PIECES * 1024)
            target = stage_of(smem, slot, 0, _PIECES, x_desc)
            tma.async_copy_global_to_shared(x_desc, [begin_m, group * 128], bar, target)
            target = stage_of(smem, slot, 16, _PIECES, w_desc)
            tma.async_copy_global_to_shared(w_desc, [0, begin, group * 128], bar, target)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _product(smem, at, half: gl.constexpr, HALF: gl.constexpr, SUM: gl.constexpr):
    """Of 64 rows of a stage and a half of its weights; waited for."""
    part = product_of_group(smem, at + HALF * 8, at + 16 + half * 16, SUM, 64, 128)
    return warpgroup_mma_wait(0, deps=(part,))


@gluon.jit
def _added(total, part, factors):
    """total + part * factors, ``factors`` for each row, with one rounding. Here and now: LLVM moves
    a plain fma behind all that is issued or waited for, where both products would be alive."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, gl.expand_dims(factors, 1), total],
        gl.float32, False, 1,
    )  # fmt: skip


@gluon.jit
def _sums(
    smem, full, empty, lead, x_scales, w_scales, num_rows, first, begin, slot, phase, is_first,
    HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """64 rows by twice 128 outputs; and the next slot and phase."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    GROUPS: gl.constexpr = K // 128
    # Between the rows of scales of the two halves.
    OTHER: gl.constexpr = (N // 128 if HALVES == 2 else 1) * GROUPS
    m = first + gl.arange(0, 64, gl.SliceLayout(1, SUM))
    mask = m < num_rows
    x_at = x_scales + m
    w_at = w_scales + begin // 128 * GROUPS
    left = gl.zeros([64, 128], gl.float32, SUM)
    right = gl.zeros([64, 128], gl.float32, SUM)
    # Scales are loaded a group ahead: nothing waits for them.
    of_rows = gl.load(x_at, mask=mask, other=0.0)
    of_left = gl.load(w_at)
    of_right = gl.load(w_at + OTHER)
    for group in range(GROUPS):
        then = gl.minimum(group + 1, GROUPS - 1)
        next_of_rows = gl.load(x_at + then * num_rows, mask=mask, other=0.0)
        next_of_left = gl.load(w_at + then)
        next_of_right = gl.load(w_at + then + OTHER)
        at = slot * _PIECES
        mbarrier.wait(full.index(slot), phase)
        part = _product(smem, at, 0, HALF, SUM)
        left = _added(left, part, of_rows * of_left)
        mbarrier.wait(full.index(slot), phase)
        part = _product(smem, at, 1, HALF, SUM)
        mbarrier.arrive(empty.index(slot), count=1)
        if HALF == 0 and LAG > 0:
            mbarrier.arrive(lead, count=1, pred=is_first & (group == LAG - 1))
        right = _added(right, part, of_rows * of_right)
        of_rows = next_of_rows
        of_left = next_of_left
        of_right = next_of_right
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return left, right, slot, phase


@gluon.jit
def _halves(x):
    """The left and the right half of columns; registers stay where they are."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


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
def _store_async(part, buffer, out_desc, first, begin, BUFFERS: gl.constexpr):
    """Store 64 rows by 128 bytes. TMA leaves out what lies beyond the last row."""
    tma.store_wait(BUFFERS - 1)
    buffer.store(part)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [first, begin], buffer)


@gluon.jit
def _store(
    left, right, out_smem, out_desc, first, begin, HALF: gl.constexpr, BUFFERS: gl.constexpr
):
    """The sums of 64 rows from ``first`` on, rounded."""
    parts = _halves(left.to(gl.bfloat16)) + _halves(right.to(gl.bfloat16))
    for i in gl.static_range(4):
        buffer = out_smem.index(HALF * BUFFERS + i % BUFFERS)
        _store_async(parts[i], buffer, out_desc, first, begin + i * 64, BUFFERS)


@gluon.jit
def _store_gated(
    gate, up, out_smem, out_desc, out_scales, first, begin, num_rows, HALF: gl.constexpr
):
    """``silu(gate) * up`` of 64 rows and a group of outputs, every operation rounded, as e4m3."""
    even, odd = _unpacked(_pairs(gate))
    activated = _pair(silu_of_bfloat16(even), silu_of_bfloat16(odd))
    product = gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [activated, _pairs(up)], gl.int32, True, 1
    )
    even, odd = _unpacked(product)
    results = gl.join(even, odd).reshape([64, 128])
    values, scales = quantized(gl.convert_layout(results, gate.type.layout, assert_trivial=True))
    m = first + gl.arange(0, 64, scales.type.layout)
    gl.store(out_scales + begin // _GROUP * num_rows + m, scales, mask=m < num_rows)
    _store_async(values, out_smem.index(HALF), out_desc, first, begin, 1)


@gluon.jit
def _multiply(
    shared, HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """64 rows of each tile."""
    (
        smem,
        full,
        empty,
        lead,
        x_scales,
        w_scales,
        out_smem,
        out_desc,
        out_scales,
        num_rows,
        num_tiles,
    ) = shared
    PART: gl.constexpr = 256 // HALVES
    slot = 0
    phase = 0
    if HALF == 1 and LAG > 0:
        mbarrier.wait(lead, 0)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        begin_m, begin = _place(tile, num_rows, N, PART, BAND)
        first = begin_m + HALF * 64
        left, right, slot, phase = _sums(
            smem, full, empty, lead, x_scales, w_scales, num_rows, first, begin, slot, phase,
            tile == gl.program_id(0), HALF, N, K, HALVES, STAGES, LAG,
        )  # fmt: skip
        if HALVES == 2:
            _store_gated(left, right, out_smem, out_desc, out_scales, first, begin, num_rows, HALF)
        else:
            _store(left, right, out_smem, out_desc, first, begin, HALF, BUFFERS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def wide_rows_kernel(
    x_desc,  # [M, K], boxes [128, 128]
    w_desc,  # [HALVES, N, K], boxes [HALVES, 256 / HALVES, 128]
    x_scales,  # float32 [K / 128, M]
    w_scales,  # float32 [HALVES * N / 128, K / 128]
    out_desc,  # bfloat16 [M, N], boxes [64, 64]; with a gate e4m3, [64, 128]
    out_scales,  # float32 [N / 128, M], with a gate
    num_rows,
    N: gl.constexpr, K: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,  # of a warpgroup's results
    BAND: gl.constexpr,
    LAG: gl.constexpr,  # groups by which one warpgroup is ahead of the other, or 0
    PDL: gl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T``, with two HALVES ``silu(gate) * up``. Grid: up to a program per
    multiprocessor; they share N * HALVES / 256 * ceil(M / 128) tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PART: gl.constexpr = 256 // HALVES  # outputs of a tile
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    num_tiles = (num_rows + _ROWS - 1) // _ROWS * (N // PART)
    smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * _PIECES, 8, 128], OPERAND)
    out_smem = gl.allocate_shared_memory(
        out_desc.dtype, [2 * BUFFERS, 64, 128 // out_desc.dtype.primitive_bitwidth * 8],
        out_desc.layout,
    )  # fmt: skip
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(lead, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_wait()
    ring = (smem, full, empty, x_desc, w_desc, num_rows, num_tiles)
    shared = (
        smem, full, empty, lead, x_scales, w_scales, out_smem, out_desc, out_scales, num_rows,
        num_tiles,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (shared, 0, N, K, HALVES, STAGES, BUFFERS, BAND, LAG)),
            (_multiply, (shared, 1, N, K, HALVES, STAGES, BUFFERS, BAND, LAG)),
            (_load, (ring, N, K, PART, STAGES, BAND)),
        ],
        [4, 1],
        [240, 24],
    )
