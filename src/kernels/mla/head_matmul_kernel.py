"""Matmul of each head's rows with that head's matrix, as a Triton kernel.

A program computes one tile of one head and runs over the inputs in order with one float32
accumulator. So a row's bits depend neither on the number of rows nor on its place among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.decode_prologue import prefetch
from ..device import overlap_options, vector_strides
from ..fused.rounding import rounded
from .store_kernel import rotated_pairs

_MANY_ROWS = 1024  # enough rows to fill the GPU with larger tiles


@triton.jit
def _prefetch_weight(  # type: ignore[no-untyped-def]
    weight, first, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, W_IN: tl.constexpr,
    W_OUT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Prefetch BLOCK_N columns of a head's weight into L2, one line of 128 bytes at a time."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    if W_IN == 1:
        i = tl.arange(0, triton.next_power_of_2((NUM_IN + LINE - 1) // LINE)) * LINE
        o = first + tl.arange(0, BLOCK_N)
    else:
        i = tl.arange(0, triton.next_power_of_2(NUM_IN))
        o = first + tl.arange(0, (BLOCK_N + LINE - 1) // LINE) * LINE
    i, o = tl.minimum(i, NUM_IN - 1), tl.minimum(o, NUM_OUT - 1)
    prefetch(weight + i[:, None] * W_IN + o[None, :] * W_OUT)


@triton.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=[
        "num_rows", "x_row_stride", "x_head_stride", "cos_stride", "cos_step", "sin_stride",
        "sin_step",
    ],
    do_not_specialize_on_alignment=["cos", "sin"],
)  # fmt: skip
def _head_matmul_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, cos, sin, num_rows,
    x_row_stride,  # in units of STEP elements
    x_head_stride, cos_stride, cos_step, sin_stride, sin_step,
    HEADS: tl.constexpr, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr,
    TAIL: tl.constexpr,  # elements of x after the inputs, copied after the outputs
    ROTATES: tl.constexpr,  # whether pairs of the tail are rotated
    W_HEAD: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr,  # strides of weight
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TAIL_ROWS: tl.constexpr,  # rows per program of the tail
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, h] = [x[t, h, :NUM_IN] @ weight[h], x[t, h, NUM_IN:]]``; if ROTATES, the latter is
    rotated.

    Grid: ``(tiles of rows, tiles of outputs and BLOCK_M / TAIL_ROWS for the tail, HEADS)``. Shapes:
    x ``[T, HEADS, NUM_IN + TAIL]``, weight ``[HEADS, NUM_IN, NUM_OUT]``, out
    ``[T, HEADS, NUM_OUT + TAIL]``, contiguous, cos and sin ``[T, TAIL / 2]``.
    """
    head = tl.program_id(2)
    base = weight + head.to(tl.int64) * W_HEAD
    TILES_N: tl.constexpr = (NUM_OUT + BLOCK_N - 1) // BLOCK_N
    if PDL:
        if BLOCK_M == 16:  # few rows: reading the weight takes the time
            first = tl.program_id(1) * BLOCK_N
            _prefetch_weight(base, first, NUM_IN, NUM_OUT, W_IN, W_OUT, BLOCK_N)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if TAIL:  # noqa: SIM102 (one is known when compiling, the other is not)
        if tl.program_id(1) >= TILES_N:
            first_row = tl.program_id(0) * BLOCK_M + (tl.program_id(1) - TILES_N) * TAIL_ROWS
            tail_rows = (first_row + tl.arange(0, TAIL_ROWS)).to(tl.int64)[:, None]
            tail_source = x + tail_rows * (x_row_stride * STEP)
            tail_source += head.to(tl.int64) * (x_head_stride * STEP) + NUM_IN
            tail_target = out + (tail_rows * HEADS + head) * (NUM_OUT + TAIL) + NUM_OUT
            i = tl.arange(0, triton.next_power_of_2(TAIL))[None, :]
            mask = (tail_rows < num_rows) & (i < TAIL)
            if ROTATES:
                c, s = cos + tail_rows * cos_stride, sin + tail_rows * sin_stride
                tail = rotated_pairs(tail_source, c, s, i, mask, cos_step, sin_step)
                tail = rounded(tail, out.dtype.element_ty).to(out.dtype.element_ty)
                tl.store(tail_target + i, tail, mask=mask)
            else:
                tl.store(tail_target + i, tl.load(tail_source + i, mask=mask), mask=mask)
            return
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (rows < num_rows)[:, None]
    source = x + rows.to(tl.int64)[:, None] * (x_row_stride * STEP)
    source += head.to(tl.int64) * (x_head_stride * STEP)
    target = out + (rows.to(tl.int64)[:, None] * HEADS + head) * (NUM_OUT + TAIL)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < NUM_OUT
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, NUM_IN, BLOCK_K):
        here = k + ks
        is_in = here < NUM_IN
        a = tl.load(source + here[None, :], mask=is_row & is_in[None, :], other=0.0)
        if W_IN == 1:
            b = tl.load(
                base + columns[:, None] * W_OUT + here[None, :],
                mask=is_column[:, None] & is_in[None, :],
                other=0.0,
            )
            b = tl.trans(b)
        else:
            b = tl.load(
                base + here[:, None] * W_IN + columns[None, :] * W_OUT,
                mask=is_in[:, None] & is_column[None, :],
                other=0.0,
            )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(
        target + columns[None, :], acc.to(out.dtype.element_ty), mask=is_row & is_column[None, :]
    )


def _tile(num_rows: int, is_wide: bool, has_tail: bool) -> tuple[int, int, int]:
    """Rows and outputs of a tile, and warps. They do not affect the result."""
    if is_wide:
        return 16, 32, 4
    if num_rows <= 32:
        return 16, 64, 4
    return (64, 128, 4) if has_tail or num_rows < _MANY_ROWS else (128, 128, 8)


def head_matmul(x: Tensor, weight: Tensor, tables: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """``[T, H, O + P]``, contiguous, from ``x [T, H, I + P]`` and ``weight [H, I, O]`` of one
    dtype, in one launch. float32 is multiplied in float32, not TF32.

    The last P elements are copied. Given ``tables`` (cos and sin), they are rotated as by
    :func:`.dispatch.rotate_pairs`.
    """
    num_rows, num_heads, width = x.shape
    _, num_in, num_out = weight.shape
    tail = width - num_in
    if x.stride(2) != 1:
        x = x.contiguous()
    out = x.new_empty(num_rows, num_heads, num_out + tail)
    if num_rows == 0:
        return out
    is_wide = x.dtype == torch.float32
    block_m, block_n, num_warps = _tile(num_rows, is_wide, tail > 0)
    row_stride, head_stride, step = vector_strides(x)
    # With rotation an element needs four loads, which few threads would issue one after another.
    tail_rows = block_m if tables is None else 8
    tiles = triton.cdiv(num_out, block_n) + (block_m // tail_rows if tail else 0)
    cos, sin = (x, x) if tables is None else tables
    _head_matmul_kernel[(triton.cdiv(num_rows, block_m), tiles, num_heads)](
        x, weight, out, cos, sin, num_rows, row_stride, head_stride, cos.stride(1), cos.stride(2),
        sin.stride(1), sin.stride(2),
        HEADS=num_heads,
        NUM_IN=num_in,
        NUM_OUT=num_out,
        TAIL=tail,
        ROTATES=tables is not None,
        W_HEAD=weight.stride(0),
        W_IN=weight.stride(1),
        W_OUT=weight.stride(2),
        STEP=step,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=32 if is_wide else 64,
        TAIL_ROWS=tail_rows,
        PRECISION="ieee" if is_wide else "tf32",
        num_warps=num_warps,
        num_stages=3,
        enable_fp_fusion=tables is None,
        **overlap_options(x.device),
    )  # fmt: skip
    return out
