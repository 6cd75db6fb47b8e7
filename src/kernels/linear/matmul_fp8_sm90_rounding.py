"""Matmul of a few bfloat16 rows and an FP8 weight for Hopper that rounds its rows to FP8 itself.

As :mod:`.matmul_fp8_sm90_few`, but every program rounds all of its rows, as
:mod:`..fused.quantize_rows` does and to the same bits, while its weights are under way: with a few
rows that takes less than one more kernel to wait for. Each row of x stands in several of the eight
that the matrix unit multiplies at least.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..fused.quantize_rows import SMALLEST_SCALE
from .matmul_fp8_sm90_few import add_stage, request_weights, scales_of_rows, stage_of
from .matmul_sm90 import store_outputs

MAX_ROWS = 4


@gluon.jit
def _round_rows(
    smem, scales, x, w_scales, num_rows, x_stride,
    K: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr, FROM: gl.constexpr,
    W_GROUPS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Rounded rows into shared memory, eight for a group, and their scales times the weight's."""
    GROUPS: gl.constexpr = CHUNK // 128
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LINE: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, NUM_WARPS, 1], [2, 1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LINE))
    GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LINE))
    row = gl.arange(0, ROWS, ROW)
    group = gl.arange(0, GROUPS, GROUP)
    k = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, LINE)))
    mask = (row < num_rows)[:, None, None]
    for begin in gl.static_range(0, K, CHUNK):
        at = (begin + group * 128)[None, :, None] + k[None, None, :]
        at = x + row[:, None, None] * x_stride + at
        numbers = gl.load(at, mask=mask, other=0.0).to(gl.float32)
        largest = gl.max(gl.abs(numbers), 2)
        of_rows = tl.div_rn(
            largest, gl.full([ROWS, GROUPS], 448.0, gl.float32, largest.type.layout)
        )
        of_rows = gl.maximum(of_rows, SMALLEST_SCALE)
        y = tl.div_rn(numbers, of_rows[:, :, None] + gl.zeros_like(numbers)).to(gl.float8e4nv)
        # The same rows several times.
        y = y.permute([1, 0, 2]).reshape([GROUPS, 1, ROWS, 128])
        y = y.broadcast_to([GROUPS, 8 // ROWS, ROWS, 128]).reshape([GROUPS * 8, 128])
        target = smem.index(FROM + begin // 128)
        target._reinterpret(gl.float8e4nv, [GROUPS * 8, 128], OPERAND).store(y)
        if W_GROUPS > 1:
            of_rows = of_rows * gl.load(w_scales + begin // 128 + group)[None, :]
        of_rows = of_rows.permute([1, 0]).reshape([GROUPS, 1, ROWS])
        of_rows = of_rows.broadcast_to([GROUPS, 8 // ROWS, ROWS]).reshape([GROUPS, 8])
        scales.slice(begin // 128, GROUPS).store(of_rows)


@gluon.jit(do_not_specialize=["num_rows"])
def rounding_kernel(
    x,  # bfloat16 [M, K]
    w_desc,  # [K / 128, 1, N, 128], boxes [ATOMS, 1, PART, 128]
    w_scales,  # float32 [N / 128, K / 128], or [ceil(N / SHARED), 1]
    out,  # bfloat16 [M, N], contiguous
    num_rows,
    x_stride,
    N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr,
    ROWS: gl.constexpr,  # M, padded to a power of two; at most 8
    CHUNK: gl.constexpr,  # channels of a row that are rounded at a time
    ATOMS: gl.constexpr, STAGES: gl.constexpr,
    PREFETCH_STAGES: gl.constexpr,  # stages of weights loaded before the wait
    GROUPS: gl.constexpr,  # K / 128, padded to a power of two
    W_GROUPS: gl.constexpr, SHARED: gl.constexpr,
    LATE_TRIGGER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T``. Grid: ``(N / PART,)``."""
    if PDL and not LATE_TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: gl.constexpr = K // (128 * ATOMS)
    W_PIECES: gl.constexpr = PART // 8  # of an atom
    X_FROM: gl.constexpr = STAGES * ATOMS * W_PIECES
    LEFT: gl.constexpr = 128 if PART > 64 else 64
    NUM_WARPS: gl.constexpr = LEFT // 16
    X_END: gl.constexpr = X_FROM + K // 128
    W_END: gl.constexpr = X_FROM - W_PIECES + LEFT // 8
    PIECES: gl.constexpr = X_END if X_END > W_END else W_END
    BYTES: gl.constexpr = ATOMS * PART * 128
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, 8, 32])

    begin = gl.program_id(0) * PART
    smem = gl.allocate_shared_memory(gl.float8e4nv, [PIECES, 8, 128], OPERAND)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scales = gl.allocate_shared_memory(
        gl.float32, [GROUPS, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    request_weights(smem, bars, w_desc, begin, ATOMS * W_PIECES, BYTES, 0, PREFETCH_STAGES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
    request_weights(smem, bars, w_desc, begin, ATOMS * W_PIECES, BYTES, PREFETCH_STAGES, STAGES)
    _round_rows(
        smem, scales, x, w_scales + begin // SHARED * W_GROUPS, num_rows, x_stride,
        K, ROWS, CHUNK, X_FROM, W_GROUPS, NUM_WARPS,
    )  # fmt: skip
    fence_async_shared()

    total = gl.zeros([LEFT, 8], gl.float32, SUM)
    slot = 0
    phase = 0
    for step in range(STEPS):
        bar = bars.index(slot)
        mbarrier.wait(bar, phase)
        total = add_stage(
            smem, scales, slot * ATOMS * W_PIECES, X_FROM + step * ATOMS, step * ATOMS, total,
            ATOMS, W_PIECES, 1, SUM, LEFT, 8, GROUPS, 1, PART,
        )  # fmt: skip
        if STEPS > STAGES:
            then = step + STAGES
            go = then < STEPS
            mbarrier.expect(bar, BYTES, pred=go)
            target = stage_of(smem, slot, 0, ATOMS * W_PIECES, w_desc)
            tma.async_copy_global_to_shared(
                w_desc, [then * ATOMS, 0, begin, 0], bar, target, pred=go
            )
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    if W_GROUPS == 1:
        total = total * scales_of_rows(w_scales, begin, N, 1, PART, SHARED, SUM)[:, None]
    store_outputs(total, out, begin, 0, num_rows, N, 1, PART, 8)
