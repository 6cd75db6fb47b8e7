"""Matmul of few FP8 rows and an FP8 weight for Hopper that loads its weight before the wait.

As :mod:`..linear.matmul_sm90` is for bfloat16, and with the bits of :mod:`.matmul_fp8`. A group of
128 inputs is one row of the 128-byte swizzle: an *atom* of shared memory, and four instructions of
the matrix unit that begin from zero. While the unit works on one group, the group before is
multiplied by its scales and added to the float32 sums.

Rows are on the right of the unit and 64 outputs or 128 on its left; where a program owns fewer, the
others of the operand are whatever lies behind in shared memory, and what comes of them is dropped.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..linear.matmul import tile_begin
from ..linear.matmul_sm90 import load_weights_async, stage_of, store_outputs


@gluon.jit
def product_of_group(
    smem, left, right, SUM: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    """The matmul of one group, from zero, not waited for; ``left`` and ``right`` say where."""
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    return warpgroup_mma(
        smem.index(left)._reinterpret(gl.float8e4nv, [LEFT, 128], OPERAND),
        smem.index(right)._reinterpret(gl.float8e4nv, [RIGHT, 128], OPERAND).permute((1, 0)),
        gl.zeros([LEFT, RIGHT], gl.float32, SUM),
        use_acc=False,
        is_async=True,
    )


@gluon.jit
def _added(total, part, factors):
    """total + part * factors, ``factors`` for each column, with one rounding."""
    return gl.fma(part, factors[None, :] + gl.zeros_like(part), total)


@gluon.jit
def _add_stage(
    smem, scales, slot, group, total,
    ATOMS: gl.constexpr, W_PIECES: gl.constexpr, X_PIECES: gl.constexpr, X_FROM: gl.constexpr,
    SUM: gl.constexpr, LEFT: gl.constexpr, X_ROWS: gl.constexpr,
):  # fmt: skip
    """total and the groups of a stage, up to four, in order."""
    w = slot * ATOMS * W_PIECES
    x = X_FROM + slot * ATOMS * X_PIECES
    COLUMN: gl.constexpr = gl.SliceLayout(0, SUM)
    a = product_of_group(smem, w, x, SUM, LEFT, X_ROWS)
    if ATOMS >= 2:
        b = product_of_group(smem, w + W_PIECES, x + X_PIECES, SUM, LEFT, X_ROWS)
    if ATOMS == 4:
        c = product_of_group(smem, w + 2 * W_PIECES, x + 2 * X_PIECES, SUM, LEFT, X_ROWS)
        d = product_of_group(smem, w + 3 * W_PIECES, x + 3 * X_PIECES, SUM, LEFT, X_ROWS)
    factors = scales._reinterpret(gl.float32, scales.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))
    a = warpgroup_mma_wait(ATOMS - 1, deps=(a,))
    total = _added(total, a, factors.index(group).load(COLUMN))
    if ATOMS >= 2:
        b = warpgroup_mma_wait(ATOMS - 2, deps=(b,))
        total = _added(total, b, factors.index(group + 1).load(COLUMN))
    if ATOMS == 4:
        c = warpgroup_mma_wait(1, deps=(c,))
        total = _added(total, c, factors.index(group + 2).load(COLUMN))
        d = warpgroup_mma_wait(0, deps=(d,))
        total = _added(total, d, factors.index(group + 3).load(COLUMN))
    return total


@gluon.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x_desc,  # [K / 128, M, 128], boxes [ATOMS, X_ROWS, 128]
    w_desc,  # [K / 128, N, 128], boxes [ATOMS, PART, 128]
    x_scales,  # float32 [K / 128, M]
    w_scales,  # float32 [N / 128, K / 128], or [ceil(N / SHARED), 1]
    out,  # bfloat16 [M, N], contiguous
    num_rows,
    N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr, X_ROWS: gl.constexpr,
    ATOMS: gl.constexpr, STAGES: gl.constexpr,
    PREFETCH_STAGES: gl.constexpr,  # stages of weights loaded before the wait
    GROUPS: gl.constexpr,  # K / 128, padded to a power of two
    W_GROUPS: gl.constexpr, SHARED: gl.constexpr,
    LATE_TRIGGER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T``. Grid: ``(N / PART * ceil(M / X_ROWS),)``."""
    if PDL and not LATE_TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: gl.constexpr = K // (128 * ATOMS)
    W_PIECES: gl.constexpr = PART // 8  # of an atom
    X_PIECES: gl.constexpr = X_ROWS // 8
    X_FROM: gl.constexpr = STAGES * ATOMS * W_PIECES
    LEFT: gl.constexpr = 128 if PART > 64 else 64
    NUM_WARPS: gl.constexpr = LEFT // 16
    # The last atom's operand reads LEFT rows from its first on.
    X_END: gl.constexpr = X_FROM + STAGES * ATOMS * X_PIECES
    W_END: gl.constexpr = X_FROM - W_PIECES + LEFT // 8
    PIECES: gl.constexpr = X_END if X_END > W_END else W_END
    BYTES: gl.constexpr = ATOMS * (PART + X_ROWS) * 128
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, X_ROWS, 32])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [NUM_WARPS, 1], [1, 0])

    num_row_tiles = (num_rows + X_ROWS - 1) // X_ROWS
    begin_m = tile_begin(gl.program_id(0) % num_row_tiles, num_rows, X_ROWS)
    begin = gl.program_id(0) // num_row_tiles * PART
    smem = gl.allocate_shared_memory(gl.float8e4nv, [PIECES, 8, 128], OPERAND)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scales = gl.allocate_shared_memory(
        gl.float32, [GROUPS, X_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    load_weights_async(smem, bars, w_desc, begin, ATOMS * W_PIECES, BYTES, 0, PREFETCH_STAGES)
    g = gl.arange(0, GROUPS, gl.SliceLayout(1, LINES))
    of_outputs = gl.full([GROUPS], 1.0, gl.float32, gl.SliceLayout(1, LINES))
    if W_GROUPS > 1:
        at = w_scales + begin // SHARED * W_GROUPS
        of_outputs = gl.load(at + g, mask=g < W_GROUPS, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
    load_weights_async(smem, bars, w_desc, begin, ATOMS * W_PIECES, BYTES, PREFETCH_STAGES, STAGES)
    for slot in gl.static_range(STAGES):
        target = stage_of(smem, slot, X_FROM, ATOMS * X_PIECES, x_desc)
        tma.async_copy_global_to_shared(
            x_desc, [slot * ATOMS, begin_m, 0], bars.index(slot), target
        )
    m = begin_m + gl.arange(0, X_ROWS, gl.SliceLayout(0, LINES))
    mask = (g < K // 128)[:, None] & (m < num_rows)[None, :]
    factors = gl.load(x_scales + g[:, None] * num_rows + m[None, :], mask=mask, other=0.0)
    scales.store(factors * of_outputs[:, None])

    total = gl.zeros([LEFT, X_ROWS], gl.float32, SUM)
    if STEPS == STAGES:  # nothing is loaded twice into a place
        for step in range(STEPS):
            mbarrier.wait(bars.index(step), 0)
            total = _add_stage(
                smem, scales, step, step * ATOMS, total,
                ATOMS, W_PIECES, X_PIECES, X_FROM, SUM, LEFT, X_ROWS,
            )  # fmt: skip
    else:
        slot = 0
        phase = 0
        for step in range(STEPS):
            bar = bars.index(slot)
            mbarrier.wait(bar, phase)
            total = _add_stage(
                smem, scales, slot, step * ATOMS, total,
                ATOMS, W_PIECES, X_PIECES, X_FROM, SUM, LEFT, X_ROWS,
            )  # fmt: skip
            then = step + STAGES
            go = then < STEPS
            mbarrier.expect(bar, BYTES, pred=go)
            target = stage_of(smem, slot, 0, ATOMS * W_PIECES, w_desc)
            tma.async_copy_global_to_shared(w_desc, [then * ATOMS, begin, 0], bar, target, pred=go)
            target = stage_of(smem, slot, X_FROM, ATOMS * X_PIECES, x_desc)
            tma.async_copy_global_to_shared(
                x_desc, [then * ATOMS, begin_m, 0], bar, target, pred=go
            )
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
    if W_GROUPS == 1:
        n = begin + gl.arange(0, LEFT, gl.SliceLayout(1, SUM))
        of_output = gl.load(w_scales + n // SHARED, mask=n < N, other=0.0)
        total = total * of_output[:, None]
    store_outputs(total, out, begin, begin_m, num_rows, N, 1, PART, X_ROWS)
