"""The kernel of :mod:`pagespec.kernels.gluon_linear`.

A program owns ``part`` rows of the weight (of each half, with a gate), or several such parts, and
``x_rows`` of x. It walks K from 0 to the end with one float32 accumulator a part: wgmma of 64 rows,
the weight on the left, by one or two warpgroups. Where a part has fewer rows than those take, the
others of the operand are whatever lies behind in shared memory, and what comes of them is dropped:
rows of a product do not mix.

Shared memory is one block of 1 KiB pieces (8 rows of 128 bytes, the unit of the 128-byte swizzle):
the stages of the weight, each a ``[atoms, halves, part, 64]`` for each part, then the stages of x,
each ``[atoms, x_rows, 64]``, then what the last operand reads beyond. An atom is 64 summands.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra import libdevice


@gluon.jit
def _weight_stage(smem, slot, PIECES: gl.constexpr, w_desc):
    stage = smem.index(slot * PIECES)
    return stage._reinterpret(gl.bfloat16, w_desc.block_type.shape, w_desc.layout)


@gluon.jit
def _x_stage(smem, slot, FROM: gl.constexpr, PIECES: gl.constexpr, x_desc):
    stage = smem.index(FROM + slot * PIECES)
    return stage._reinterpret(gl.bfloat16, x_desc.block_type.shape, x_desc.layout)


@gluon.jit
def _wait(NUM: gl.constexpr, sums, UNITS: gl.constexpr):
    """The sums, when all but NUM products are done."""
    if UNITS == 1:
        done = (warpgroup_mma_wait(NUM, deps=sums),)
    else:
        done = warpgroup_mma_wait(NUM, deps=sums)
    return done


@gluon.jit
def _add_stage(
    smem,
    slot,
    totals,
    OPERAND: gl.constexpr,
    UNITS: gl.constexpr,
    ATOMS: gl.constexpr,
    W_ROWS: gl.constexpr,
    X_ROWS: gl.constexpr,
    X_FROM: gl.constexpr,
    LEFT: gl.constexpr,
):
    """totals + the products of one stage's atoms, not waited for."""
    for atom in gl.static_range(ATOMS):
        rows = smem.index(X_FROM + (slot * ATOMS + atom) * (X_ROWS // 8))
        rows = rows._reinterpret(gl.bfloat16, [X_ROWS, 64], OPERAND).permute((1, 0))
        sums = ()
        for unit in gl.static_range(UNITS):
            weights = smem.index(((slot * UNITS + unit) * ATOMS + atom) * (W_ROWS // 8))
            weights = weights._reinterpret(gl.bfloat16, [LEFT, 64], OPERAND)
            sums += (warpgroup_mma(weights, rows, totals[unit], is_async=True),)
        totals = sums
    return totals


@gluon.jit
def _store(
    total,
    out,
    num_rows,
    begin,
    begin_m,
    N: gl.constexpr,
    HALVES: gl.constexpr,
    PART: gl.constexpr,
    X_ROWS: gl.constexpr,
    LEFT: gl.constexpr,
    SUM: gl.constexpr,
):
    """The sums of one part of the weight, rounded, with a gate applied."""
    NUM_WARPS: gl.constexpr = LEFT // 16
    WIDE: gl.constexpr = 8 if X_ROWS > 16 else 2  # outputs of a row that a thread stores at once
    result = total.to(gl.bfloat16)
    if HALVES == 2:  # rows lie as [parts, halves, PART]
        PLAIN: gl.constexpr = gl.BlockedLayout(
            [WIDE // 2, 1], [64 // WIDE, WIDE // 2], [1, NUM_WARPS], [0, 1]
        )
        PAIRS: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, 2], [1, 8, 4, 1], [1, 2, NUM_WARPS // 2, 1], [3, 1, 2, 0]
        )
        pairs = result.reshape([LEFT // (2 * PART), 2, PART, X_ROWS]).permute([0, 2, 3, 1])
        gate, up = gl.convert_layout(pairs, PAIRS).split()
        # As triton_activation.silu and _silu_mul of triton_linear round it.
        wide = gate.to(gl.float32)
        activated = tl.div_rn(wide, libdevice.exp(-wide) + 1.0).to(gl.bfloat16)
        product = (activated.to(gl.float32) * up.to(gl.float32)).to(gl.bfloat16)
        result = gl.convert_layout(product.reshape([LEFT // 2, X_ROWS]), PLAIN)
        n = gl.arange(0, LEFT // 2, gl.SliceLayout(1, PLAIN))
        m = begin_m + gl.arange(0, X_ROWS, gl.SliceLayout(0, PLAIN))
    elif WIDE > 2:
        PLAIN: gl.constexpr = gl.BlockedLayout(
            [WIDE, 1], [64 // WIDE, WIDE // 2], [1, NUM_WARPS], [0, 1]
        )
        result = gl.convert_layout(result, PLAIN)
        n = gl.arange(0, LEFT, gl.SliceLayout(1, PLAIN))
        m = begin_m + gl.arange(0, X_ROWS, gl.SliceLayout(0, PLAIN))
    else:
        n = gl.arange(0, LEFT, gl.SliceLayout(1, SUM))
        m = begin_m + gl.arange(0, X_ROWS, gl.SliceLayout(0, SUM))
    mask = (n[:, None] < PART) & (m[None, :] < num_rows)
    gl.store(out + m[None, :] * N + (begin + n)[:, None], result, mask=mask)


@gluon.jit(do_not_specialize=["num_rows"])
def early_kernel(
    x_desc,  # [K / 64, M, 64], boxes [ATOMS, X_ROWS, 64]
    w_desc,  # [K / 64, HALVES, N, 64], boxes [ATOMS, HALVES, PART, 64]
    out,  # [M, N], contiguous
    num_rows,
    N: gl.constexpr,
    K: gl.constexpr,
    HALVES: gl.constexpr,
    PART: gl.constexpr,
    UNITS: gl.constexpr,
    X_ROWS: gl.constexpr,
    ATOMS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: gl.constexpr = K // (64 * ATOMS)
    W_ROWS: gl.constexpr = HALVES * PART
    W_PIECES: gl.constexpr = ATOMS * W_ROWS // 8
    X_PIECES: gl.constexpr = ATOMS * X_ROWS // 8
    X_FROM: gl.constexpr = STAGES * UNITS * W_PIECES
    LEFT: gl.constexpr = 128 if W_ROWS > 64 else 64  # 64 for each warpgroup
    # The last atom's operand reads LEFT rows from its first on.
    X_END: gl.constexpr = X_FROM + STAGES * X_PIECES
    W_END: gl.constexpr = X_FROM - W_ROWS // 8 + LEFT // 8
    PIECES: gl.constexpr = X_END if X_END > W_END else W_END
    BYTES: gl.constexpr = ATOMS * (UNITS * W_ROWS + X_ROWS) * 128
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [LEFT // 16, 1], [16, X_ROWS, 16])

    # Programs that share weights lie beside each other, so that one read from memory serves them.
    num_row_tiles = (num_rows + X_ROWS - 1) // X_ROWS
    begin_m = gl.program_id(0) % num_row_tiles * X_ROWS
    begin = gl.program_id(0) // num_row_tiles * (UNITS * PART)
    smem = gl.allocate_shared_memory(gl.bfloat16, [PIECES, 8, 64], OPERAND)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.expect(bars.index(slot), BYTES)
        for unit in gl.static_range(UNITS):
            target = _weight_stage(smem, slot * UNITS + unit, W_PIECES, w_desc)
            at = [slot * ATOMS, 0, begin + unit * PART, 0]
            tma.async_copy_global_to_shared(w_desc, at, bars.index(slot), target)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for slot in gl.static_range(STAGES):
        target = _x_stage(smem, slot, X_FROM, X_PIECES, x_desc)
        tma.async_copy_global_to_shared(
            x_desc, [slot * ATOMS, begin_m, 0], bars.index(slot), target
        )

    totals = ()
    for _ in gl.static_range(UNITS):
        totals += (gl.zeros([LEFT, X_ROWS], gl.float32, SUM),)
    if STEPS == STAGES:  # nothing is loaded twice into a place, so nothing is waited for but data
        sums = ()
        for unit in gl.static_range(UNITS):
            sums += (warpgroup_mma_init(totals[unit]),)
        for slot in range(STAGES):
            mbarrier.wait(bars.index(slot), 0)
            sums = _add_stage(smem, slot, sums, OPERAND, UNITS, ATOMS, W_ROWS, X_ROWS, X_FROM, LEFT)
        totals = _wait(0, sums, UNITS)
    else:
        slot = 0
        phase = 0
        last = 0
        for step in range(STEPS):
            mbarrier.wait(bars.index(slot), phase)
            sums = _add_stage(
                smem, slot, totals, OPERAND, UNITS, ATOMS, W_ROWS, X_ROWS, X_FROM, LEFT
            )
            # All but this stage's products are done: the stage before is free.
            totals = _wait(ATOMS * UNITS, sums, UNITS)
            then = step + STAGES - 1
            go = (step > 0) & (then < STEPS)
            bar = bars.index(last)
            mbarrier.expect(bar, BYTES, pred=go)
            for unit in gl.static_range(UNITS):
                target = _weight_stage(smem, last * UNITS + unit, W_PIECES, w_desc)
                at = [then * ATOMS, 0, begin + unit * PART, 0]
                tma.async_copy_global_to_shared(w_desc, at, bar, target, pred=go)
            target = _x_stage(smem, last, X_FROM, X_PIECES, x_desc)
            tma.async_copy_global_to_shared(
                x_desc, [then * ATOMS, begin_m, 0], bar, target, pred=go
            )
            last = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        totals = _wait(0, totals, UNITS)
    for unit in gl.static_range(UNITS):
        _store(
            totals[unit],
            out,
            num_rows,
            begin + unit * PART,
            begin_m,
            N,
            HALVES,
            PART,
            X_ROWS,
            LEFT,
            SUM,
        )
