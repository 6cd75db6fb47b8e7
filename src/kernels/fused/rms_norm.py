"""RMSNorm as Triton kernels. One kernel has a program per row, with an optional residual addition
and an optional quantisation. The other multiplies the norm of heads by the silu of a gate, with
several rows per program.

A row's bits depend on no other row: the block or tile, the number of warps and therefore the order
of additions depend only on the width. Multiplications and additions are never contracted
(``enable_fp_fusion=False``), because the replaced operations round each separately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import as_rows, overlap_options
from ..overlap import overlap
from .e4m3_groups import GROUP, store_quantized
from .rounding import rounded, scaled, silu


@triton.jit
def mean_square(h, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mean square of a row of N elements, float32 and 0 beyond. Kernels of :func:`num_warps`
    that load 16 bytes per thread at once add in the same order."""
    return tl.sum(h * h, axis=0) * (1.0 / N)


def num_warps(block: int) -> int:
    """Warps of a program with a row of ``block`` elements, padded. The number affects a row's
    bits."""
    return min(max(block // 256, 1), 16)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, scales, hidden, num_rows, eps, x_stride, residual_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out = h / sqrt(mean(h**2) + eps) * weight``; with ``scales``, as rows of
    :mod:`.e4m3_groups`. Given a residual, ``h = residual + x``, which is written to ``hidden``;
    else ``h = x``.

    Grid: ``(rows,)``. Shapes: ``[rows, N]``, weight ``[N]``.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < N
    # A parameter: older than the preceding kernel, which may still be running.
    w = tl.load(weight + i, mask=mask, other=0.0)
    overlap(PDL)
    h = tl.load(x + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        h += tl.load(residual + row * residual_stride + i, mask=mask, other=0.0).to(tl.float32)
        h = rounded(h, DTYPE)
        tl.store(hidden + row * N + i, h.to(DTYPE), mask=mask)
    y = scaled(h * tl.rsqrt(mean_square(h, N) + eps), w.to(tl.float32), FORM, DTYPE)
    if scales is None:
        tl.store(out + row * N + i, y.to(DTYPE), mask=mask)
    else:
        store_quantized(y, out, scales, row, num_rows, 0, N, BLOCK)


def launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: str,
    out: Tensor, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the norm of ``x``, or of ``x + residual``, to ``out``; quantised if ``scales`` is
    given.

    Returns:
        The input of the norm.
    """
    hidden = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return hidden
    rows = as_rows(x)
    residual_rows = None if residual is None else as_rows(residual)
    width = rows.shape[1]
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows.shape[0],)](
        rows, residual_rows, weight, out, scales, hidden, rows.shape[0], eps, rows.stride(0),
        0 if residual_rows is None else residual_rows.stride(0),
        N=width,
        BLOCK=block if scales is None else max(block, GROUP),
        FORM=form,
        num_warps=num_warps(block),
        enable_fp_fusion=False,
        **overlap_options(x.device),
    )  # fmt: skip
    return hidden


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: str) -> Tensor:
    """Same as :func:`.dispatch.rms_norm`; rows of ``x`` may be strided.

    Heads-first inputs give heads-first outputs, as elementwise operations do: later operations of
    the graph may view them.
    """
    if x.dim() == 4 and x.stride(1) < x.stride(2):
        return rms_norm(x.transpose(1, 2), weight, eps, form).transpose(1, 2)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(x, None, weight, eps, form, out)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    """Same as :func:`.dispatch.add_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, launch(x, residual, weight, eps, form, out)


# Elements of a program's tile: heads are short, and a program per row would consist mostly of its
# startup.
_TILE = 2048


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _gated_norm_kernel(  # type: ignore[no-untyped-def]
    x, gate, weight, out, eps, num_rows, num_heads, x_stride, gate_stride, gate_head_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out = x / sqrt(mean(x**2) + eps) * weight * silu(gate)``. Grid: ``(ceil(rows / ROWS),)``.

    Shapes: x and out ``[rows, N]``, gate ``[rows / num_heads, num_heads, N]``, weight ``[N]``.
    """
    overlap(PDL)
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
    """Same as :func:`.dispatch.gated_rms_norm`; rows of ``x``, and tokens and heads of ``gate``,
    may be strided."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows, width = as_rows(x), x.shape[-1]
    if gate.dim() != 4 or gate.stride(3) != 1:
        gate = as_rows(gate)[None, :, None]
    block = triton.next_power_of_2(width)
    tile_rows = max(1, _TILE // block)
    _gated_norm_kernel[(triton.cdiv(len(rows), tile_rows),)](
        rows, gate, weight, out, eps, len(rows), gate.shape[2], rows.stride(0), gate.stride(1),
        gate.stride(2),
        N=width,
        BLOCK=block,
        ROWS=tile_rows,
        FORM=form,
        num_warps=4 if block <= _TILE else 8,
        enable_fp_fusion=False,  # the replaced operations round separately
        **overlap_options(x.device),
    )  # fmt: skip
    return out
