"""Device functions that round as PyTorch does, shared by kernels that must give equal bits."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

# Whether Triton interprets kernels on a CPU, which lacks some of what a GPU does.
EMULATE = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    """silu of float32, not rounded yet: the same for an activation of its own and for one that a
    matmul applies, so that both give the same bits."""
    # tl.exp is the fast one of the hardware; torch calls the library's. The interpreter has none.
    if EMULATE:
        e = tl.exp(-x)
    else:
        e = libdevice.exp(-x)
    return tl.div_rn(x, e + 1.0)


@triton.jit
def rounded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 ``x`` rounded to ``dtype`` (to nearest, ties to even), as float32.

    Triton's interpreter cuts off instead of rounding to bfloat16, so there it is done by hand.
    """
    if EMULATE and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype).to(tl.float32)


@triton.jit
def scaled(  # type: ignore[no-untyped-def]
    y, weight, FORM: tl.constexpr, DTYPE: tl.constexpr
):
    """The normalised ``y`` times its weight (both float32), rounded to DTYPE, as float32."""
    if FORM == "rounded":
        y = rounded(y, DTYPE)
    if FORM == "plus_one":
        weight = weight + 1.0
    return rounded(y * weight, DTYPE)
