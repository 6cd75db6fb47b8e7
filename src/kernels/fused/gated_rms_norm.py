"""RMSNorm of heads times the silu of a gate, as a Triton kernel, several rows per program.

What makes a row's bits its own: the tile, and so the order of additions within a row, follows the
width alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import as_rows, has_dependent_launch
from .rounding import rounded, scaled, silu

# Elements of a program's tile: heads are short, and a program per row would be mostly its start.
_TILE = 2048


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _gated_norm_kernel(  # type: ignore[no-untyped-def]
    x, gate, weight, out, eps, num_rows, num_heads, x_stride, gate_stride, gate_head_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out = x / sqrt(mean(x**2) + eps) * weight * silu(gate)``. Grid: ``(ceil(rows / ROWS),)``.

    Shapes: x and out ``[rows, N]``, gate ``[rows / num_heads, num_heads, N]``, weight ``[N]``.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (i < N)
    token, head = (row // num_heads).to(tl.int64), row % num_heads
    row = row.to(tl.int64)
    h = tl.load(x + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_stride + head * gate_head_stride + i, mask=mask, other=0.0)
    w = tl.load(weight + i, mask=i < N, other=0.0).to(tl.float32)
    mean = tl.sum(h * h, axis=1, keep_dims=True) * (1.0 / N)
    y = scaled(h * tl.rsqrt(mean + eps), w, FORM, DTYPE)
    y = rounded(y * silu(z.to(tl.float32)), DTYPE)
    tl.store(out + row * N + i, y.to(DTYPE), mask=mask)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, form: str) -> Tensor:
    """As :func:`.dispatch.gated_rms_norm`; rows of ``x``, and tokens and heads of ``gate``, may be
    strided."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows, width = as_rows(x), x.shape[-1]
    if gate.dim() != 4 or gate.stride(3) != 1:
        gate = as_rows(gate)[None, :, None]
    block = triton.next_power_of_2(width)
    tile_rows = max(1, _TILE // block)
    overlap = has_dependent_launch(x.device)
    _gated_norm_kernel[(triton.cdiv(len(rows), tile_rows),)](
        rows, gate, weight, out, eps, len(rows), gate.shape[2], rows.stride(0), gate.stride(1),
        gate.stride(2),
        N=width,
        BLOCK=block,
        ROWS=tile_rows,
        FORM=form,
        PDL=overlap,
        num_warps=4 if block <= _TILE else 8,
        enable_fp_fusion=False,  # the operations replaced round each on its own
        launch_pdl=overlap,
    )  # fmt: skip
    return out
