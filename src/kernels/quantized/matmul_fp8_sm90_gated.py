"""Matmul of many FP8 rows and an FP8 weight with a gate for Hopper, which applies the gate and
quantises the result: ``silu(gate) * up``, rounded to e4m3 with a scale for each 128 channels.

As :mod:`.matmul_fp8_sm90_many`, whose bits the sums have. A tile has 128 outputs, which share a
scale; a warpgroup computes 64 of them, of the gate and of up, and then the other 64. So it has no
more sums at a time than without a gate, and a thread has both of an output: gate and up, which else
go to memory and back in bfloat16, stay in registers, and what is ready waits in shared memory.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device import count_sms
from ..fused.e4m3_groups import GROUP, QuantizedRows, empty_rows, quantized
from ..linear.matmul import tile_begin
from ..linear.matmul_sm90_many import (
    next_stage,
    packed,
    pair,
    place,
    silu_of_bfloat16,
    unpacked,
)
from .matmul_fp8_sm90_few import product_of_group
from .matmul_fp8_sm90_many import (
    added,
    allocate_stages,
    load_operands,
    load_scales,
    scales_of_rows,
)
from .tiles_fp8 import ManyTile

_PART = gl.constexpr(128)  # outputs of a tile, and rows of the weight in a stage: 64 of gate and up
NUM_WARPS = 4  # of the first warpgroup; the others are its workers
X_BOX = [64, GROUP]  # of a warpgroup
WEIGHT_BOX = [2, 64, GROUP]
OUT_BOX = [64, GROUP]  # of a warpgroup


@gluon.jit
def _factors(stages, slot, WARPGROUP: gl.constexpr, ROW: gl.constexpr):
    """What a group's product is multiplied by, for each of 64 rows: of the gate, and of up."""
    _, _, w_smem, _, _ = stages
    of_rows = scales_of_rows(stages, slot, WARPGROUP, ROW)
    scales = w_smem.index(slot)
    return of_rows * scales.slice(0, 1).load(ROW), of_rows * scales.slice(16, 1).load(ROW)


@gluon.jit
def _both_added(gate, up, part, of_gate, of_up):
    """:func:`.added` for the halves of ``part [64, 128]``."""
    a, b = part.reshape([64, 2, 64]).permute((0, 2, 1)).split()
    a = gl.convert_layout(a, gate.type.layout, assert_trivial=True)
    b = gl.convert_layout(b, up.type.layout, assert_trivial=True)
    return added(gate, a, of_gate), added(up, b, of_up)


@gluon.jit
def _sums(stages, slot, phase, WARPGROUP: gl.constexpr, K: gl.constexpr):
    """64 rows by 64 outputs of gate and up; and the next slot and phase."""
    smem, x_smem, _, full, empty = stages
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _PART, 32])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _PART // 2, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, HALF)
    STAGES: gl.constexpr = full.shape[0]
    WARPGROUPS: gl.constexpr = x_smem.shape[0] // STAGES
    PAIR: gl.constexpr = 4 - WARPGROUPS  # products under way: 2 with two warpgroups, 1 with three
    PIECES: gl.constexpr = smem.shape[0] // STAGES
    X: gl.constexpr = WARPGROUP * 8
    W: gl.constexpr = WARPGROUPS * 8
    gate = gl.zeros([64, _PART // 2], gl.float32, HALF)
    up = gl.zeros([64, _PART // 2], gl.float32, HALF)
    for _ in range(0, K // 128, PAIR):
        at = slot * PIECES
        mbarrier.wait(full.index(slot), phase)
        a = product_of_group(smem, at + X, at + W, SUM, 64, _PART)
        a_gate, a_up = _factors(stages, slot, WARPGROUP, ROW)
        if PAIR == 2:
            other = slot + 1
            at += PIECES
            mbarrier.wait(full.index(other), phase)
            b = product_of_group(smem, at + X, at + W, SUM, 64, _PART)
            b_gate, b_up = _factors(stages, other, WARPGROUP, ROW)
        a = warpgroup_mma_wait(PAIR - 1, deps=(a,))
        mbarrier.arrive(empty.index(slot), count=1)
        gate, up = _both_added(gate, up, a, a_gate, a_up)
        if PAIR == 2:
            b = warpgroup_mma_wait(0, deps=(b,))
            mbarrier.arrive(empty.index(other), count=1)
            gate, up = _both_added(gate, up, b, b_gate, b_up)
        slot, phase = next_stage(slot, phase, PAIR, STAGES)
    return gate, up, slot, phase


@gluon.jit
def _gated(gate, up):
    """Pairs of ``silu(gate) * up``, every operation rounded to bfloat16."""
    even, odd = unpacked(packed(gate))
    activated = pair(silu_of_bfloat16(even), silu_of_bfloat16(odd))
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [activated, packed(up)], gl.int32, True, 1
    )


@gluon.jit
def _together(first, second):
    """Pairs ``[64, 32]`` of the first 64 outputs and of the others as float32 ``[64, 128]``."""
    even, odd = unpacked(first)
    left = gl.join(even, odd).reshape([64, 64])
    even, odd = unpacked(second)
    right = gl.join(even, odd).reshape([64, 64])
    return gl.join(left, right).permute((0, 2, 1)).reshape([64, 128])


@gluon.jit
def _multiply(work, WARPGROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    """64 rows of each tile."""
    stages, buffers, out_desc, out_scales, num_rows, num_tiles = work
    _, x_smem, _, full, _ = stages
    buffer = buffers.index(WARPGROUP)
    halves = buffer._reinterpret(
        gl.int32, [64, _PART // 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    WARPGROUPS: gl.constexpr = x_smem.shape[0] // full.shape[0]
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row_tile, begin = place(tile, num_rows, N, _PART, 64 * WARPGROUPS)
        first = tile_begin(row_tile * WARPGROUPS + WARPGROUP, num_rows, 64)
        gate, up, slot, phase = _sums(stages, slot, phase, WARPGROUP, K)
        # Before the buffer is written again. TMA leaves out what lies beyond the last row.
        tma.store_wait(0)
        halves.store(_gated(gate, up))
        gate, up, slot, phase = _sums(stages, slot, phase, WARPGROUP, K)
        second = _gated(gate, up)
        results = _together(halves.load(second.type.layout), second)
        values, scales = quantized(results)
        m = first + gl.arange(0, 64, scales.type.layout)
        gl.store(out_scales + begin // _PART * num_rows + m, scales, mask=m < num_rows)
        buffer.store(values)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [first, begin], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def gated_rows_kernel(
    x_desc,  # e4m3 [M, K], boxes [64, 128]
    w_desc,  # e4m3 [2, N, K], boxes [2, 64, 128]
    out_desc,  # e4m3 [M, N], boxes [64, 128]
    x_scales,  # float32 [K / 128, M]
    w_scales,  # float32 [2 * N / 128, K / 128]
    out_scales,  # float32 [N / 128, M]
    num_rows,
    N: gl.constexpr, K: gl.constexpr,
    X_ROWS: gl.constexpr,  # 128 or 192: 64 for each of two or three warpgroups
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``out * out_scales = silu(x @ weight[0].T) * (x @ weight[1].T)``. Grid: up to a program per
    multiprocessor; they share N / 128 * ceil(M / X_ROWS) tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WARPGROUPS: gl.constexpr = X_ROWS // 64
    num_tiles = (num_rows + X_ROWS - 1) // X_ROWS * (N // _PART)
    stages = allocate_stages(WARPGROUPS, _PART, STAGES)
    buffers = gl.allocate_shared_memory(gl.float8e4nv, [WARPGROUPS, 64, _PART], out_desc.layout)
    if PDL:
        tl.extra.cuda.gdc_wait()
    work = (stages, buffers, out_desc, out_scales, num_rows, num_tiles)
    scales = (x_scales, w_scales)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, N, K)),
                (_multiply, (work, 1, N, K)),
                (load_operands, (stages, x_desc, w_desc, num_rows, num_tiles, N, K, 2)),
                (load_scales, (stages, scales, num_rows, num_tiles, N, K, K // 128, 128, 2)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, N, K)),
                (_multiply, (work, 1, N, K)),
                (_multiply, (work, 2, N, K)),
                (load_operands, (stages, x_desc, w_desc, num_rows, num_tiles, N, K, 2)),
                (load_scales, (stages, scales, num_rows, num_tiles, N, K, K // 128, 128, 2)),
            ],
            [4, 4, 1, 1],
            [160, 160, 32, 32],
        )


def layout_of(box: list[int]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, 8, len(box))


def constants_of(num_outs: int, k_size: int, tile: ManyTile, overlap: bool) -> dict[str, object]:
    """Nothing in them depends on the number of rows.

    Raises:
        ValueError: the shape does not suit the kernel.
    """
    if num_outs % GROUP or tile.part != GROUP or not tile.fits(num_outs, k_size):
        raise ValueError(f"a weight of {2 * num_outs} x {k_size} does not suit {tile}")
    return {
        "N": num_outs,
        "K": k_size,
        "X_ROWS": tile.x_rows,
        "STAGES": tile.stages,
        "PDL": overlap,
    }


def gated_matmul(
    x: QuantizedRows, weight: Tensor, scales: Tensor, *, tile: ManyTile, overlap: bool = True
) -> QuantizedRows:
    """``silu(gate) * up`` of the halves of ``x @ weight.T``, every operation rounded to bfloat16,
    quantised; one launch.

    Args:
        x: of ``[M, K]``, on a Hopper GPU.
        weight: e4m3 ``[2 N, K]`` (gate, then up), contiguous.
        scales: float32 ``[2 N / 128, K / 128]``.
        tile: of 128 outputs, that fits the shape.
        overlap: whether to start before the kernel before has ended, and wait for it there.

    Returns:
        Of ``[M, N]``: the bits of :func:`..fused.quantize_rows.act_mul_quantize`.

    Raises:
        ValueError: the tile does not fit.
    """
    (num_rows, k_size), num_outs = x.values.shape, len(weight) // 2
    constants = constants_of(num_outs, k_size, tile, overlap)
    out = empty_rows(num_rows, num_outs, weight.device)
    if num_rows == 0:
        return out
    x_desc = TensorDescriptor(x.values, [num_rows, k_size], [k_size, 1], X_BOX, layout_of(X_BOX))
    w_desc = TensorDescriptor(
        weight, [2, num_outs, k_size], [num_outs * k_size, k_size, 1],
        WEIGHT_BOX, layout_of(WEIGHT_BOX),
    )  # fmt: skip
    out_desc = TensorDescriptor(
        out.values, [num_rows, num_outs], [num_outs, 1], OUT_BOX, layout_of(OUT_BOX)
    )
    num_tiles = -(-num_rows // tile.x_rows) * (num_outs // GROUP)
    gated_rows_kernel[(min(num_tiles, count_sms(weight.device)),)](
        x_desc, w_desc, out_desc, x.scales, scales, out.scales, num_rows,
        **constants,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )  # fmt: skip
    return out
