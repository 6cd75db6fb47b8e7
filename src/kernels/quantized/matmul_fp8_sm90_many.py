"""Matmul of many FP8 rows and an FP8 weight for Hopper, by specialised warps.

A program computes tile after tile. One warp keeps the stages of shared memory filled, the next
tile's too; each warpgroup multiplies 64 of the rows, by itself, and gives the stages back. While
the matrix unit works for one, the other multiplies what it got by its scales and adds it up, or
stores. Rows of x are on the left of the unit, so that a thread has two of them, and with them two
scales. The bits are those of :mod:`.matmul_fp8`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ..linear.row_tiles import tile_begin
from .matmul_fp8_sm90_few import product_of_group, stage_of


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
def _load(
    smem, full, empty, x_desc, w_desc, num_rows, num_tiles,
    N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr, X_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Keeps the stages filled, a group in each."""
    X_PIECES: gl.constexpr = X_ROWS // 8
    PIECES: gl.constexpr = X_PIECES + PART // 8
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, PART, X_ROWS)
        for group in range(K // 128):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, PIECES * 1024)
            for half in gl.static_range(2):
                target = stage_of(smem, slot, half * X_PIECES // 2, PIECES, x_desc)
                first = tile_begin(row_tile * 2 + half, num_rows, X_ROWS // 2)
                tma.async_copy_global_to_shared(x_desc, [first, group * 128], bar, target)
            target = stage_of(smem, slot, X_PIECES, PIECES, w_desc)
            tma.async_copy_global_to_shared(w_desc, [begin, group * 128], bar, target)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _added(total, part, factors):
    """total + part * factors, ``factors`` for each row, with one rounding."""
    return gl.fma(part, factors[:, None] + gl.zeros_like(part), total)


@gluon.jit
def _store(
    total, w_scales, out, first, begin, num_rows,
    N: gl.constexpr, W_GROUPS: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """The sums of 64 rows from ``first`` on, multiplied by scales that outputs have for all inputs,
    and rounded."""
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
def _sums(
    smem, full, empty, x_scales, w_scales, num_rows, first, begin, slot, phase,
    HALF: gl.constexpr, K: gl.constexpr, PART: gl.constexpr, X_ROWS: gl.constexpr,
    STAGES: gl.constexpr, W_GROUPS: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """64 rows by PART outputs, two groups at a time; and the next slot and phase."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    X_PIECES: gl.constexpr = X_ROWS // 8
    PIECES: gl.constexpr = X_PIECES + PART // 8
    m = first + gl.arange(0, 64, gl.SliceLayout(1, SUM))
    mask = m < num_rows
    x_at = x_scales + m
    w_at = w_scales + begin // SHARED * W_GROUPS
    total = gl.zeros([64, PART], gl.float32, SUM)
    for group in range(0, K // 128, 2):
        of_a = gl.load(x_at + group * num_rows, mask=mask, other=0.0)
        of_b = gl.load(x_at + (group + 1) * num_rows, mask=mask, other=0.0)
        if W_GROUPS > 1:
            of_a = of_a * gl.load(w_at + group)
            of_b = of_b * gl.load(w_at + group + 1)
        at = slot * PIECES
        mbarrier.wait(full.index(slot), phase)
        a = product_of_group(smem, at + HALF * 8, at + X_PIECES, SUM, 64, PART)
        at += PIECES
        mbarrier.wait(full.index(slot + 1), phase)
        b = product_of_group(smem, at + HALF * 8, at + X_PIECES, SUM, 64, PART)
        a = warpgroup_mma_wait(1, deps=(a,))
        mbarrier.arrive(empty.index(slot), count=1)
        total = _added(total, a, of_a)
        b = warpgroup_mma_wait(0, deps=(b,))
        mbarrier.arrive(empty.index(slot + 1), count=1)
        total = _added(total, b, of_b)
        slot += 2
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return total, slot, phase


@gluon.jit
def _multiply(
    smem, full, empty, x_scales, w_scales, out, num_rows, num_tiles,
    HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr,
    X_ROWS: gl.constexpr, STAGES: gl.constexpr, W_GROUPS: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """64 rows of each tile."""
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, PART, X_ROWS)
        first = tile_begin(row_tile * 2 + HALF, num_rows, 64)
        total, slot, phase = _sums(
            smem, full, empty, x_scales, w_scales, num_rows, first, begin, slot, phase,
            HALF, K, PART, X_ROWS, STAGES, W_GROUPS, SHARED,
        )  # fmt: skip
        _store(total, w_scales, out, first, begin, num_rows, N, W_GROUPS, SHARED)


@gluon.jit(do_not_specialize=["num_rows"])
def many_rows_kernel(
    x_desc,  # [M, K], boxes [X_ROWS / 2, 128]
    w_desc,  # [N, K], boxes [PART, 128]
    x_scales,  # float32 [K / 128, M]
    w_scales,  # float32 [N / 128, K / 128], or [ceil(N / SHARED), 1]
    out,  # bfloat16 [M, N], contiguous
    num_rows,
    N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr,
    X_ROWS: gl.constexpr,  # 128: 64 for each of two warpgroups
    STAGES: gl.constexpr, W_GROUPS: gl.constexpr, SHARED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T``. Grid: a program for each multiprocessor at most; they share
    N / PART * ceil(M / X_ROWS) tiles. Numbers of groups and of stages are even."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PIECES: gl.constexpr = (X_ROWS + PART) // 8
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    num_tiles = (num_rows + X_ROWS - 1) // X_ROWS * (N // PART)
    smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PIECES, 8, 128], OPERAND)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    smem, full, empty, x_scales, w_scales, out, num_rows, num_tiles,
                    0, N, K, PART, X_ROWS, STAGES, W_GROUPS, SHARED,
                ),
            ),
            (
                _multiply,
                (
                    smem, full, empty, x_scales, w_scales, out, num_rows, num_tiles,
                    1, N, K, PART, X_ROWS, STAGES, W_GROUPS, SHARED,
                ),
            ),
            (
                _load,
                (
                    smem, full, empty, x_desc, w_desc, num_rows, num_tiles,
                    N, K, PART, X_ROWS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
