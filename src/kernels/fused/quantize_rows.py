"""Rows quantised to e4m3 by token and 128 channels, in Triton: alone, or with what makes them.

How they are rounded: :mod:`.e4m3_groups`. The norm and the gated activation that quantise their
results round them first as those do that do not (:mod:`.rms_norm`, :mod:`.activation`), so joining
changes no bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import as_rows, overlap_options
from .activation import gelu_tanh
from .e4m3_groups import GROUP, QuantizedRows, empty_rows, quantized
from .rms_norm import mean_square, num_warps
from .rounding import rounded, scaled, silu, silu_of_bfloat16

_GROUP = tl.constexpr(GROUP)
_BLOCK = 1024


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    x, values, scales, row, num_rows, begin, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantise and store the channels of a row from ``begin``, a multiple of 128, on.

    ``x``: float32 ``[BLOCK]``, 0 beyond the end.
    """
    GROUPS: tl.constexpr = BLOCK // _GROUP
    numbers, factors = quantized(tl.reshape(x, (GROUPS, _GROUP)))
    group = tl.arange(0, GROUPS)
    at = begin + group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    tl.store(values + row * N + at, numbers, mask=at < N)
    g = begin // _GROUP + group
    tl.store(scales + g * num_rows + row, factors, mask=g * _GROUP < N)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x, up, values, scales, num_rows, x_stride, up_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of ``activation(x) * up``, or of ``x`` if KIND is "none". Grid: ``(rows * tiles of N,)``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = x.dtype.element_ty
    TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // TILES).to(tl.int64)
    begin = tl.program_id(0) % TILES * BLOCK
    i = begin + tl.arange(0, BLOCK)
    mask = i < N
    y = tl.load(x + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    if KIND != "none":
        factor = tl.load(up + row * up_stride + i, mask=mask, other=0.0).to(tl.float32)
        if KIND == "silu" and tl.bfloat16 == DTYPE:
            y = rounded(silu_of_bfloat16(y), tl.bfloat16)
        elif KIND == "silu":
            y = rounded(silu(y), DTYPE)
        else:
            y = rounded(gelu_tanh(y), DTYPE)
        y = rounded(y * factor, DTYPE)
    _store(y, values, scales, row, num_rows, begin, N, BLOCK)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_quantize_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, hidden, values, scales, num_rows, eps, x_stride, residual_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As :func:`.rms_norm._norm_kernel`, quantising the normalised row. Grid: ``(rows,)``."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < N
    # A parameter: older than the kernel before, which need not have ended.
    w = tl.load(weight + i, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    h = tl.load(x + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual + row * residual_stride + i, mask=mask, other=0.0).to(tl.float32)
        h = rounded(h, DTYPE)
        tl.store(hidden + row * N + i, h.to(DTYPE), mask=mask)
    mean = mean_square(h, N)
    y = scaled(h * tl.rsqrt(mean + eps), w.to(tl.float32), FORM, DTYPE)
    _store(y, values, scales, row, num_rows, 0, N, BLOCK)


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Of ``x [..., K]`` as rows, which may be strided."""
    return _launch(x, x, "none")


def act_mul_quantize(gate: Tensor, up: Tensor, kind: str) -> QuantizedRows:
    """Of :func:`.dispatch.act_mul`."""
    return _launch(gate, up, kind)


def _launch(x: Tensor, up: Tensor, kind: str) -> QuantizedRows:
    rows, up_rows = as_rows(x), as_rows(up)
    num_rows, width = rows.shape
    out = empty_rows(num_rows, width, x.device)
    if num_rows == 0:
        return out
    _quantize_kernel[(num_rows * triton.cdiv(width, _BLOCK),)](
        rows, up_rows, out.values, out.scales, num_rows, rows.stride(0), up_rows.stride(0),
        N=width,
        BLOCK=_BLOCK,
        KIND=kind,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap_options(x.device),
    )  # fmt: skip
    return out


def rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: str
) -> tuple[QuantizedRows, Tensor]:
    """(the first result of :func:`.dispatch.add_rms_norm`, quantised; its second); without a
    residual that of :func:`.dispatch.rms_norm`, and ``x``."""
    rows = as_rows(x)
    num_rows, width = rows.shape
    out = empty_rows(num_rows, width, x.device)
    hidden = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out, hidden
    residual_rows = rows if residual is None else as_rows(residual)
    block = triton.next_power_of_2(max(width, GROUP))
    _norm_quantize_kernel[(num_rows,)](
        rows, residual_rows, weight, hidden, out.values, out.scales, num_rows, eps,
        rows.stride(0), residual_rows.stride(0),
        N=width,
        BLOCK=block,
        FORM=form,
        HAS_RESIDUAL=residual is not None,
        num_warps=num_warps(triton.next_power_of_2(width)),
        enable_fp_fusion=False,
        **overlap_options(x.device),
    )  # fmt: skip
    return out, hidden
