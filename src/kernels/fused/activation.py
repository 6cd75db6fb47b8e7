"""``activation(gate) * up`` as an elementwise Triton kernel, rounded where torch rounds, with the
result in its dtype or quantised."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..device import as_rows, overlap_options
from ..overlap import overlap
from .e4m3_groups import store_quantized
from .rounding import EMULATE, rounded, rounded_silu

_BLOCK = 1024


@triton.jit
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    # As in torch's CUDA kernel, in which nvcc contracts the inner multiplication and addition.
    u = 0.7978845608028654 * tl.fma(x * x * x, 0.044715, x)
    if EMULATE:
        t = (1.0 - 2.0 / (tl.exp(2.0 * u.to(tl.float64)) + 1.0)).to(tl.float32)
    else:
        t = libdevice.tanh(u)
    return 0.5 * x * (1.0 + t)


@triton.jit(do_not_specialize=["num_rows"])
def _act_mul_kernel(  # type: ignore[no-untyped-def]
    gate, up, out, scales, num_rows, gate_stride, up_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out = activation(gate) * up``, ``[rows, N]``, or ``gate`` if KIND is "none". With
    ``scales``, the rows are quantised (:mod:`.e4m3_groups`). Grid: ``(rows * ceil(N /
    BLOCK),)``."""
    overlap(PDL)
    DTYPE: tl.constexpr = gate.dtype.element_ty
    TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // TILES).to(tl.int64)
    begin = tl.program_id(0) % TILES * BLOCK
    i = begin + tl.arange(0, BLOCK)
    mask = i < N
    x = tl.load(gate + row * gate_stride + i, mask=mask, other=0.0).to(tl.float32)
    if KIND != "none":
        y = tl.load(up + row * up_stride + i, mask=mask, other=0.0).to(tl.float32)
        if KIND == "silu":
            x = rounded_silu(x, DTYPE)
        else:
            x = rounded(gelu_tanh(x), DTYPE)
        x = rounded(x * y, DTYPE)
    if scales is None:
        tl.store(out + row * N + i, x.to(DTYPE), mask=mask)
    else:
        store_quantized(x, out, scales, row, num_rows, begin, N, BLOCK)


def act_mul(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Same as :func:`.dispatch.act_mul`; rows of ``gate`` and ``up`` may be strided."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    launch(gate, up, kind, out, None)
    return out


def launch(gate: Tensor, up: Tensor, kind: str, out: Tensor, scales: Tensor | None) -> None:
    """Write ``activation(gate) * up`` to ``out``, or ``gate`` if the kind is "none"; quantised if
    ``scales`` is given."""
    if not out.numel():
        return
    gate_rows, up_rows = as_rows(gate), as_rows(up)
    num_rows, width = gate_rows.shape
    _act_mul_kernel[(num_rows * triton.cdiv(width, _BLOCK),)](
        gate_rows, up_rows, out, scales, num_rows, gate_rows.stride(0), up_rows.stride(0),
        N=width,
        BLOCK=_BLOCK,
        KIND=kind,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap_options(gate.device),
    )  # fmt: skip
