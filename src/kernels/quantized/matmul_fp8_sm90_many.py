"""Matmul of many FP8 rows and an FP8 weight for Hopper, by specialised warps.

A program computes tile after tile. Two warps keep the stages of shared memory filled, the next
tile's too; each warpgroup, of two or three, multiplies 64 of the rows, by itself, and gives the
stages back. While the matrix unit works for one, another multiplies what it got by its scales and
adds it up, or stores. Rows of x are on the left of the unit, so that a thread has two of them, and
with them two scales. The bits are those of :mod:`.matmul_fp8`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ..linear.matmul import tile_begin
from .matmul_fp8_sm90_few import product_of_group
from .matmul_fp8_sm90_stages import (
    allocate_stages,
    load_operands,
    load_scales,
    next_stage,
    place,
    scales_of_rows,
)


@gluon.jit
def added(total, part, factors):
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
def _factors(
    stages, slot, WARPGROUP: gl.constexpr, ROW: gl.constexpr, W_GROUPS: gl.constexpr
):  # fmt: skip
    """What a group's product is multiplied by, for each of 64 rows."""
    _, _, w_smem, _, _ = stages
    factors = scales_of_rows(stages, slot, WARPGROUP, ROW)
    if W_GROUPS > 1:
        factors = factors * w_smem.index(slot).slice(0, 1).load(ROW)
    return factors


@gluon.jit
def _sums(
    stages, slot, phase,
    WARPGROUP: gl.constexpr, K: gl.constexpr, PART: gl.constexpr, W_GROUPS: gl.constexpr,
):  # fmt: skip
    """64 rows by PART outputs; and the next slot and phase. Of two warpgroups each has two products
    under way, of three one: there are no registers for more, and none is missed."""
    smem, x_smem, _, full, empty = stages
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, SUM)
    STAGES: gl.constexpr = full.shape[0]
    WARPGROUPS: gl.constexpr = x_smem.shape[0] // STAGES
    PAIR: gl.constexpr = 4 - WARPGROUPS  # products under way: 2 with two warpgroups, 1 with three
    PIECES: gl.constexpr = smem.shape[0] // STAGES
    X: gl.constexpr = WARPGROUP * 8
    W: gl.constexpr = WARPGROUPS * 8
    total = gl.zeros([64, PART], gl.float32, SUM)
    for _ in range(0, K // 128, PAIR):
        at = slot * PIECES
        mbarrier.wait(full.index(slot), phase)
        a = product_of_group(smem, at + X, at + W, SUM, 64, PART)
        of_a = _factors(stages, slot, WARPGROUP, ROW, W_GROUPS)
        if PAIR == 2:
            other = slot + 1
            at += PIECES
            mbarrier.wait(full.index(other), phase)
            b = product_of_group(smem, at + X, at + W, SUM, 64, PART)
            of_b = _factors(stages, other, WARPGROUP, ROW, W_GROUPS)
        a = warpgroup_mma_wait(PAIR - 1, deps=(a,))
        mbarrier.arrive(empty.index(slot), count=1)
        total = added(total, a, of_a)
        if PAIR == 2:
            b = warpgroup_mma_wait(0, deps=(b,))
            mbarrier.arrive(empty.index(other), count=1)
            total = added(total, b, of_b)
        slot, phase = next_stage(slot, phase, PAIR, STAGES)
    return total, slot, phase


@gluon.jit
def _multiply(
    work,
    WARPGROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr,
    W_GROUPS: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """64 rows of each tile."""
    stages, w_scales, out, num_rows, num_tiles = work
    _, x_smem, _, full, _ = stages
    WARPGROUPS: gl.constexpr = x_smem.shape[0] // full.shape[0]
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, PART, 64 * WARPGROUPS)
        first = tile_begin(row_tile * WARPGROUPS + WARPGROUP, num_rows, 64)
        total, slot, phase = _sums(stages, slot, phase, WARPGROUP, K, PART, W_GROUPS)
        _store(total, w_scales, out, first, begin, num_rows, N, W_GROUPS, SHARED)


@gluon.jit(do_not_specialize=["num_rows"])
def many_rows_kernel(
    x_desc,  # [M, K], boxes [64, 128]
    w_desc,  # [N, K], boxes [PART, 128]
    x_scales,  # float32 [K / 128, M]
    w_scales,  # float32 [N / 128, K / 128], or [ceil(N / SHARED), 1]
    out,  # bfloat16 [M, N], contiguous
    num_rows,
    N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr,
    X_ROWS: gl.constexpr,  # 128 or 192: 64 for each of two or three warpgroups
    STAGES: gl.constexpr, W_GROUPS: gl.constexpr, SHARED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T``. Grid: a program for each multiprocessor at most; they share
    N / PART * ceil(M / X_ROWS) tiles. With two warpgroups numbers of groups and of stages are
    even."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WARPGROUPS: gl.constexpr = X_ROWS // 64
    num_tiles = (num_rows + X_ROWS - 1) // X_ROWS * (N // PART)
    stages = allocate_stages(WARPGROUPS, PART, STAGES)
    if PDL:
        tl.extra.cuda.gdc_wait()
    work = (stages, w_scales, out, num_rows, num_tiles)
    scales = (x_scales, w_scales)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, N, K, PART, W_GROUPS, SHARED)),
                (_multiply, (work, 1, N, K, PART, W_GROUPS, SHARED)),
                (load_operands, (stages, x_desc, w_desc, num_rows, num_tiles, N, K, 1)),
                (load_scales, (stages, scales, num_rows, num_tiles, N, K, W_GROUPS, SHARED, 1)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, N, K, PART, W_GROUPS, SHARED)),
                (_multiply, (work, 1, N, K, PART, W_GROUPS, SHARED)),
                (_multiply, (work, 2, N, K, PART, W_GROUPS, SHARED)),
                (load_operands, (stages, x_desc, w_desc, num_rows, num_tiles, N, K, 1)),
                (load_scales, (stages, scales, num_rows, num_tiles, N, K, W_GROUPS, SHARED, 1)),
            ],
            [4, 4, 1, 1],
            [160, 160, 32, 32],
        )
