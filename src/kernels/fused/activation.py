"""``activation(gate) * up`` as a Triton kernel, elementwise, rounded where torch rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..device import as_rows, overlap_options
from .rounding import EMULATE, rounded, silu

_BLOCK = 1024


@triton.jit
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    # As torch's CUDA kernel, in which nvcc contracts the inner product and sum.
    u = 0.7978845608028654 * tl.fma(x * x * x, 0.044715, x)
    if EMULATE:
        t = (1.0 - 2.0 / (tl.exp(2.0 * u.to(tl.float64)) + 1.0)).to(tl.float32)
    else:
        t = libdevice.tanh(u)
    return 0.5 * x * (1.0 + t)


@triton.jit
def _act_mul_kernel(  # type: ignore[no-untyped-def]
    gate, up, out, gate_stride, up_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out = activation(gate) * up``, ``[rows, N]``. Grid: ``(rows * ceil(N / BLOCK),)``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = out.dtype.element_ty
    TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // TILES).to(tl.int64)
    i = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    mask = i < N
    x = tl.load(gate + row * gate_stride + i, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + i, mask=mask, other=0.0).to(tl.float32)
    if KIND == "silu":
        x = silu(x)
    else:
        x = gelu_tanh(x)
    y = rounded(rounded(x, DTYPE) * y, DTYPE)
    tl.store(out + row * N + i, y.to(DTYPE), mask=mask)


def act_mul(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """As :func:`.dispatch.act_mul`; rows of ``gate`` and ``up`` may be strided."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    gate_rows, up_rows = as_rows(gate), as_rows(up)
    num_rows, width = gate_rows.shape
    _act_mul_kernel[(num_rows * triton.cdiv(width, _BLOCK),)](
        gate_rows, up_rows, out, gate_rows.stride(0), up_rows.stride(0),
        N=width,
        BLOCK=_BLOCK,
        KIND=kind,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap_options(gate.device),
    )  # fmt: skip
    return out
