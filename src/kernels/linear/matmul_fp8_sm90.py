"""Matmul of FP8 rows and an FP8 weight for Hopper that loads its weight before the wait.

As :mod:`.matmul_sm90` is for bfloat16, and with the bits of :mod:`.matmul_fp8`. A group of 128
inputs is one row of the 128-byte swizzle: an *atom* of shared memory, and four instructions of the
matrix unit that begin from zero. While the unit works on one group, the group before is multiplied
by its scales and added to the float32 sums.

Few rows are on the right of the unit and 64 outputs or more on its left; where a program owns
fewer, the others of the operand are whatever lies behind in shared memory, and what comes of them
is dropped. Many rows are on the left, so that a thread has two of them, and with them two scales.

Outputs that share their scales do so by whole blocks of 128, or have one scale for all inputs:
other weights are :mod:`.matmul_fp8`'s.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..fused.quantize_rows import QuantizedRows
from .matmul_fp8_sm90_launch import FewTile, ManyTile, plan_few, plan_many
from .matmul_sm90 import store_outputs


@gluon.jit
def _stage(smem, slot, FROM: gl.constexpr, PIECES: gl.constexpr, desc):
    stage = smem.index(FROM + slot * PIECES)
    return stage._reinterpret(gl.float8e4nv, desc.block_type.shape, desc.layout)


@gluon.jit
def _request_weights(
    smem, bars, w_desc, begin,
    PIECES: gl.constexpr, BYTES: gl.constexpr, FROM: gl.constexpr, TO: gl.constexpr,
):  # fmt: skip
    """Load stages FROM to TO of weights from ``begin`` on, each with a barrier for BYTES."""
    ATOMS: gl.constexpr = w_desc.block_type.shape[0]
    for slot in gl.static_range(FROM, TO):
        mbarrier.init(bars.index(slot), count=1)
    for slot in gl.static_range(FROM, TO):
        mbarrier.expect(bars.index(slot), BYTES)
        target = _stage(smem, slot, 0, PIECES, w_desc)
        at = [slot * ATOMS, begin, 0]
        tma.async_copy_global_to_shared(w_desc, at, bars.index(slot), target)


@gluon.jit
def _product(
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
    a = _product(smem, w, x, SUM, LEFT, X_ROWS)
    if ATOMS >= 2:
        b = _product(smem, w + W_PIECES, x + X_PIECES, SUM, LEFT, X_ROWS)
    if ATOMS == 4:
        c = _product(smem, w + 2 * W_PIECES, x + 2 * X_PIECES, SUM, LEFT, X_ROWS)
        d = _product(smem, w + 3 * W_PIECES, x + 3 * X_PIECES, SUM, LEFT, X_ROWS)
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
    begin_m = gl.program_id(0) % num_row_tiles * X_ROWS
    begin = gl.program_id(0) // num_row_tiles * PART
    smem = gl.allocate_shared_memory(gl.float8e4nv, [PIECES, 8, 128], OPERAND)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scales = gl.allocate_shared_memory(
        gl.float32, [GROUPS, X_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    _request_weights(smem, bars, w_desc, begin, ATOMS * W_PIECES, BYTES, 0, PREFETCH_STAGES)
    g = gl.arange(0, GROUPS, gl.SliceLayout(1, LINES))
    of_outputs = gl.full([GROUPS], 1.0, gl.float32, gl.SliceLayout(1, LINES))
    if W_GROUPS > 1:
        at = w_scales + begin // SHARED * W_GROUPS
        of_outputs = gl.load(at + g, mask=g < W_GROUPS, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
    _request_weights(smem, bars, w_desc, begin, ATOMS * W_PIECES, BYTES, PREFETCH_STAGES, STAGES)
    for slot in gl.static_range(STAGES):
        target = _stage(smem, slot, X_FROM, ATOMS * X_PIECES, x_desc)
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
            target = _stage(smem, slot, 0, ATOMS * W_PIECES, w_desc)
            tma.async_copy_global_to_shared(w_desc, [then * ATOMS, begin, 0], bar, target, pred=go)
            target = _stage(smem, slot, X_FROM, ATOMS * X_PIECES, x_desc)
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


@gluon.jit
def _request(
    smem, bars, x_desc, w_desc, slot, group, begin_m, begin, go,
    X_PIECES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Load a group of both operands into a slot."""
    bar = bars.index(slot)
    mbarrier.expect(bar, PIECES * 1024, pred=go)
    target = _stage(smem, slot, 0, PIECES, x_desc)
    tma.async_copy_global_to_shared(x_desc, [begin_m, group * 128], bar, target, pred=go)
    target = _stage(smem, slot, X_PIECES, PIECES, w_desc)
    tma.async_copy_global_to_shared(w_desc, [begin, group * 128], bar, target, pred=go)


@gluon.jit(do_not_specialize=["num_rows"])
def many_rows_kernel(
    x_desc,  # [M, K], boxes [X_ROWS, 128]
    w_desc,  # [N, K], boxes [PART, 128]
    x_scales,  # float32 [K / 128, M]
    w_scales,  # float32 [N / 128, K / 128], or [ceil(N / SHARED), 1]
    out,  # bfloat16 [M, N], contiguous
    num_rows,
    N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr, X_ROWS: gl.constexpr,
    STAGES: gl.constexpr, W_GROUPS: gl.constexpr, SHARED: gl.constexpr,
    TILES_M: gl.constexpr,  # of rows, that lie beside each other in the grid
    PDL: gl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T``. Grid: ``(N / PART * ceil(M / X_ROWS),)``; K has an even number of
    groups."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GROUPS: gl.constexpr = K // 128
    X_PIECES: gl.constexpr = X_ROWS // 8
    PIECES: gl.constexpr = X_PIECES + PART // 8
    NUM_WARPS: gl.constexpr = X_ROWS // 16
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, PART, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, SUM)

    num_row_tiles = (num_rows + X_ROWS - 1) // X_ROWS
    num_a_band = TILES_M * (N // PART)
    band = gl.program_id(0) // num_a_band
    first = band * TILES_M
    height = gl.minimum(num_row_tiles - first, TILES_M)
    begin_m = (first + gl.program_id(0) % num_a_band % height) * X_ROWS
    begin = gl.program_id(0) % num_a_band // height * PART
    smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PIECES, 8, 128], OPERAND)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for slot in gl.static_range(STAGES):
        _request(
            smem, bars, x_desc, w_desc, slot, slot, begin_m, begin, slot < GROUPS, X_PIECES, PIECES
        )
    m = begin_m + gl.arange(0, X_ROWS, ROW)
    mask = m < num_rows
    x_at = x_scales + m
    w_at = w_scales + begin // SHARED * W_GROUPS
    total = gl.zeros([X_ROWS, PART], gl.float32, SUM)
    slot = 0
    phase = 0
    for group in range(0, GROUPS, 2):
        of_a = gl.load(x_at + group * num_rows, mask=mask, other=0.0)
        of_b = gl.load(x_at + (group + 1) * num_rows, mask=mask, other=0.0)
        if W_GROUPS > 1:
            of_a = of_a * gl.load(w_at + group)
            of_b = of_b * gl.load(w_at + group + 1)
        mbarrier.wait(bars.index(slot), phase)
        a = _product(smem, slot * PIECES, slot * PIECES + X_PIECES, SUM, X_ROWS, PART)
        mbarrier.wait(bars.index(slot + 1), phase)
        at = (slot + 1) * PIECES
        b = _product(smem, at, at + X_PIECES, SUM, X_ROWS, PART)
        a = warpgroup_mma_wait(1, deps=(a,))
        total = gl.fma(a, of_a[:, None] + gl.zeros_like(a), total)
        b = warpgroup_mma_wait(0, deps=(b,))
        then = group + STAGES
        _request(
            smem, bars, x_desc, w_desc, slot, then, begin_m, begin, then < GROUPS,
            X_PIECES, PIECES,
        )  # fmt: skip
        _request(
            smem, bars, x_desc, w_desc, slot + 1, then + 1, begin_m, begin, then < GROUPS,
            X_PIECES, PIECES,
        )  # fmt: skip
        total = gl.fma(b, of_b[:, None] + gl.zeros_like(b), total)
        slot += 2
        if slot == STAGES:
            slot = 0
            phase ^= 1
    if W_GROUPS == 1:
        n = begin + gl.arange(0, PART, gl.SliceLayout(0, SUM))
        of_output = gl.load(w_scales + n // SHARED)
        total = total * of_output[None, :]
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PART, PART // 8], [NUM_WARPS, 1], [1, 0])
    result = gl.convert_layout(total.to(gl.bfloat16), LINE)
    m_out = begin_m + gl.arange(0, X_ROWS, gl.SliceLayout(1, LINE))
    n_out = begin + gl.arange(0, PART, gl.SliceLayout(0, LINE))
    target = out + m_out.to(gl.int64)[:, None] * N + n_out[None, :]
    gl.store(target, result, mask=(m_out < num_rows)[:, None] & (n_out < N)[None, :])


def matmul(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    *,
    shared: int,
    tile: FewTile | ManyTile,
    overlap: bool = True,
) -> Tensor:
    """``x @ weight.T``, rounded to bfloat16; one launch.

    Args:
        x: of ``[M, K]``, on a Hopper GPU.
        weight: e4m3 ``[N, K]``, contiguous. Not written by the kernels before, as far as they have
            not ended when the last one begins.
        scales: float32 ``[N / 128, K / 128]`` with ``shared`` 128, or ``[ceil(N / shared), 1]``.
        tile: one that fits the shape. overlap: whether to start before the kernel before has ended.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: the tile does not fit.
    """
    num_rows, k_size = x.values.shape
    num_outs = len(weight)
    out = torch.empty(num_rows, num_outs, dtype=torch.bfloat16, device=weight.device)
    if num_rows == 0:
        return out
    is_few = isinstance(tile, FewTile)
    plan = plan_few if is_few else plan_many
    launch = plan(num_rows, num_outs, k_size, scales.shape[1], shared, tile, overlap)  # type: ignore[operator]
    kernel = few_rows_kernel if is_few else many_rows_kernel
    kernel[(launch.num_programs,)](
        launch.describe_x(x.values), launch.describe_weight(weight), x.scales, scales, out,
        num_rows, **launch.constants,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )  # fmt: skip
    return out
