"""Matmul of FP8 rows and an FP8 weight on a Hopper GPU: the entry, and the kernel for few rows.

The two kernels compute the bits of :mod:`..quantized.matmul_fp8`. They support weights whose
outputs share their scales in whole blocks of 128, or have one scale each for all inputs.
:mod:`.matmul_fp8_sm90_many` has the kernel for many rows.

The kernel for few rows prefetches its weight, as :mod:`.matmul_sm90` does for bfloat16. A group of
128 inputs is one row of the 128-byte swizzle: an *atom* of shared memory, and four instructions of
the matrix unit that begin from zero. While the unit works on one group, the result of the preceding
group is multiplied by its scales and added to the float32 accumulators.

Rows of x are the right operand of the unit and 64 or 128 outputs its left. If a program owns fewer
outputs, the rest of the operand is whatever follows in shared memory, and its results are
discarded.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ...device import triggers_dependents_late
from ...fused.e4m3_groups import GROUP, QuantizedRows
from ..matmul import tile_begin
from ..quantized.quantized_weight import BLOCK
from ..quantized.tiles_fp8 import FewTile, ManyTile
from .matmul_fp8_sm90_many import launch_many_rows, product_of_group
from .matmul_sm90 import (
    describe,
    load_rows_async,
    load_stage_async,
    load_weights_async,
    stages_ahead,
    store_outputs,
)


@gluon.jit
def _added(total, part, factors):
    """total + part * factors, with ``factors`` per column, rounded once."""
    return gl.fma(part, factors[None, :] + gl.zeros_like(part), total)


@gluon.jit
def _add_stage(
    smem, scales, slot, group, total,
    ATOMS: gl.constexpr, W_PIECES: gl.constexpr, X_PIECES: gl.constexpr, X_FROM: gl.constexpr,
    SUM: gl.constexpr, LEFT: gl.constexpr, X_ROWS: gl.constexpr,
):  # fmt: skip
    """total plus the groups of a stage, in order."""
    w = slot * ATOMS * W_PIECES
    x = X_FROM + slot * ATOMS * X_PIECES
    parts = ()
    for i in gl.static_range(ATOMS):
        part = product_of_group(smem, w + i * W_PIECES, x + i * X_PIECES, SUM, LEFT, X_ROWS)
        parts = parts + (part,)  # noqa: RUF005 - Gluon has no star
    factors = scales._reinterpret(gl.float32, scales.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(ATOMS):
        part = warpgroup_mma_wait(ATOMS - 1 - i, deps=(parts[i],))
        total = _added(total, part, factors.index(group + i).load(gl.SliceLayout(0, SUM)))
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
    LATE_TRIGGER: gl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T``. Grid: ``(N / PART * ceil(M / X_ROWS),)``."""
    if not LATE_TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: gl.constexpr = K // (128 * ATOMS)
    W_PIECES: gl.constexpr = PART // 8  # per atom
    X_PIECES: gl.constexpr = X_ROWS // 8
    X_FROM: gl.constexpr = STAGES * ATOMS * W_PIECES
    LEFT: gl.constexpr = 128 if PART > 64 else 64
    NUM_WARPS: gl.constexpr = LEFT // 16
    # The operand of the last atom reads LEFT rows from its first row on.
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
    tl.extra.cuda.gdc_wait()
    if LATE_TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    load_weights_async(smem, bars, w_desc, begin, ATOMS * W_PIECES, BYTES, PREFETCH_STAGES, STAGES)
    load_rows_async(smem, bars, x_desc, begin_m, X_FROM, ATOMS * X_PIECES)
    slot = 0
    m = begin_m + gl.arange(0, X_ROWS, gl.SliceLayout(0, LINES))
    mask = (g < K // 128)[:, None] & (m < num_rows)[None, :]
    factors = gl.load(x_scales + g[:, None] * num_rows + m[None, :], mask=mask, other=0.0)
    scales.store(factors * of_outputs[:, None])

    total = gl.zeros([LEFT, X_ROWS], gl.float32, SUM)
    if STEPS == STAGES:  # no place is loaded twice
        for step in range(STEPS):
            mbarrier.wait(bars.index(step), 0)
            total = _add_stage(
                smem, scales, step, step * ATOMS, total,
                ATOMS, W_PIECES, X_PIECES, X_FROM, SUM, LEFT, X_ROWS,
            )  # fmt: skip
    else:
        phase = 0
        for step in range(STEPS):
            mbarrier.wait(bars.index(slot), phase)
            total = _add_stage(
                smem, scales, slot, step * ATOMS, total,
                ATOMS, W_PIECES, X_PIECES, X_FROM, SUM, LEFT, X_ROWS,
            )  # fmt: skip
            then = step + STAGES
            load_stage_async(
                smem, bars, slot, then, then < STEPS, w_desc, x_desc, begin, begin_m,
                ATOMS * W_PIECES, X_FROM, ATOMS * X_PIECES, BYTES,
            )  # fmt: skip
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
    if W_GROUPS == 1:
        n = begin + gl.arange(0, LEFT, gl.SliceLayout(1, SUM))
        of_output = gl.load(w_scales + n // SHARED, mask=n < N, other=0.0)
        total = total * of_output[:, None]
    store_outputs(total, out, begin, begin_m, num_rows, N, 1, PART, X_ROWS)


def matmul(
    x: QuantizedRows, weight: Tensor, scales: Tensor, *, shared: int, tile: FewTile | ManyTile
) -> Tensor:
    """``x @ weight.T``, rounded to bfloat16; one launch.

    Args:
        x: quantised rows ``[M, K]``, on a Hopper GPU.
        weight: e4m3 ``[N, K]``, contiguous. It must not be written by a kernel that may still run
            when the previous one ends.
        scales: float32 ``[N / 128, K / 128]`` with ``shared`` 128, or ``[ceil(N / shared), 1]``.
        shared: outputs that share a row of ``scales``. tile: a tile that fits the shape.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: the tile does not fit.
    """
    (num_rows, k_size), num_outs = x.values.shape, len(weight)
    if not tile.fits(num_outs, k_size):
        raise ValueError(f"{tile} does not fit {num_rows} x {k_size} by {num_outs} x {k_size}")
    out = torch.empty(num_rows, num_outs, dtype=torch.bfloat16, device=weight.device)
    if num_rows == 0:
        return out
    if isinstance(tile, ManyTile):
        launch_many_rows(x, weight, scales, out, shared=shared, tile=tile)
        return out
    x_rows, atoms = 8 if num_rows <= 8 else tile.x_rows, tile.atoms
    few_rows_kernel[(num_outs // tile.part * -(-num_rows // x_rows),)](
        describe(x.values, x_rows, BLOCK, atoms=atoms),
        describe(weight, tile.part, BLOCK, atoms=atoms),
        x.scales, scales, out, num_rows,
        N=num_outs, K=k_size, PART=tile.part, X_ROWS=x_rows, ATOMS=atoms, STAGES=tile.stages,
        PREFETCH_STAGES=stages_ahead(num_rows, num_outs, k_size, atoms, tile.stages),
        GROUPS=triton.next_power_of_2(k_size // BLOCK),
        W_GROUPS=scales.shape[1], SHARED=shared, LATE_TRIGGER=triggers_dependents_late(num_rows),
        num_warps=4 if tile.part <= 64 else 8,
        enable_fp_fusion=False,
        launch_pdl=True,
    )  # fmt: skip
    return out


def gated_matmul(
    x: QuantizedRows, weight: Tensor, scales: Tensor, *, tile: ManyTile
) -> QuantizedRows:
    """``silu(gate) * up`` of the halves of ``x @ weight.T``, each operation rounded to bfloat16,
    quantised; one launch.

    Args:
        x: quantised rows ``[M, K]``, on a Hopper GPU.
        weight: e4m3 ``[2 N, K]`` (gate, then up), contiguous.
        scales: float32 ``[2 N / 128, K / 128]``.
        tile: a tile of 128 outputs that fits the shape.

    Returns:
        Quantised rows ``[M, N]``, with the bits of :func:`..fused.quantize_rows.act_mul_quantize`.

    Raises:
        ValueError: the tile does not fit.
    """
    (num_rows, k_size), num_outs = x.values.shape, len(weight) // 2
    if num_outs % GROUP or tile.part != GROUP or not tile.fits(num_outs, k_size):
        raise ValueError(f"a weight of {2 * num_outs} x {k_size} does not suit {tile}")
    out_scales = x.scales.new_empty(num_outs // GROUP, num_rows)
    out = QuantizedRows(x.values.new_empty(num_rows, num_outs), out_scales)
    if num_rows > 0:
        launch_many_rows(x, weight, scales, out, shared=BLOCK, tile=tile)
    return out
