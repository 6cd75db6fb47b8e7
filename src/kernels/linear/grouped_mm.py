"""Grouped matmul of a mixture of experts: rows sorted by expert, each times its expert's weight.

A program computes one tile of one expert's rows and runs over K in order into one float32
accumulator, as :mod:`.matmul` does: a row's bits depend neither on how many rows its expert got nor
on where among them it lies. Grids follow shapes alone, so calls can be captured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["x_stride"], do_not_specialize_on_alignment=["x", "offs"])
def _grouped_kernel(  # type: ignore[no-untyped-def]
    x, weight, offs, out, x_stride, expert_stride, k_stride, n_stride,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_IS_INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out[r] = x[r] @ weight[e]`` for the rows r of expert e, which end at ``offs[e]``.

    Grid: ``(tiles of rows, tiles of N)``. Shapes: x ``[rows, K]``, weight ``[E, K, N]`` with any
    strides, offs ``[E]``, out ``[rows, N]``.
    """
    tile = tl.program_id(0)
    # Expert e has the tiles from begin // BLOCK_M + e on: at least as many as its rows need.
    experts = tl.arange(0, E_PADDED)
    begins = tl.load(offs + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    is_before = (begins // BLOCK_M + experts <= tile) & (experts < E)
    expert = tl.sum(is_before.to(tl.int32)) - 1
    begin = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs + expert)
    first = begin + (tile - begin // BLOCK_M - expert) * BLOCK_M
    if first >= end:
        return
    rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    is_row, is_column = rows < end, columns < N
    base = weight + expert.to(tl.int64) * expert_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        here = k + ks
        a = tl.load(
            x + rows[:, None] * x_stride + here[None, :],
            mask=is_row[:, None] & (here < K)[None, :],
            other=0.0,
        )
        if K_IS_INNER:
            b = tl.load(
                base + columns[:, None] * n_stride + here[None, :],
                mask=is_column[:, None] & (here < K)[None, :],
                other=0.0,
            )
            b = tl.trans(b)
        else:
            b = tl.load(
                base + here[:, None] * k_stride + columns[None, :] * n_stride,
                mask=(here < K)[:, None] & is_column[None, :],
                other=0.0,
            )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(
        out + rows[:, None] * N + columns[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """``x[begin:end] @ weight[e]`` for the rows of each expert e, as ``torch`` 's ``grouped_mm``.

    Args:
        x: ``[S, K]``, sorted by expert, float32, bfloat16 or float16 (float32 is multiplied as
            such, not as TF32). weight: ``[E, K, N]``, any strides, of the same dtype.
        offs: int32 ``[E]``, where each expert's rows end. Rows after the last get zeros.

    Returns:
        ``[S, N]``, contiguous.
    """
    num_rows, k_size = x.shape
    num_experts, _, num_outs = weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_zeros(num_rows, num_outs)
    if num_rows == 0:
        return out
    is_wide = x.dtype == torch.float32
    # By the rows an expert gets on average; without influence on the result.
    average = num_rows / num_experts
    block_m = 16 if average <= 16 or is_wide else 64 if average <= 128 else 128
    block_n = 32 if is_wide else 64 if block_m < 128 else 128
    block_k = 32 if is_wide else 64
    grid = (num_rows // block_m + num_experts, triton.cdiv(num_outs, block_n))
    _grouped_kernel[grid](
        x, weight, offs, out, x.stride(0), weight.stride(0), weight.stride(1), weight.stride(2),
        N=num_outs,
        K=k_size,
        E=num_experts,
        E_PADDED=triton.next_power_of_2(num_experts),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        K_IS_INNER=weight.stride(1) == 1,
        PRECISION="ieee" if is_wide else "tf32",
        num_warps=8 if block_m == 128 else 4,
        num_stages=3,
    )  # fmt: skip
    return out
