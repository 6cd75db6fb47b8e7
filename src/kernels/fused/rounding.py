"""Device functions with PyTorch's accuracy and roundings, shared by kernels that must compute equal
bits."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

# Whether Triton interprets kernels on a CPU, which lacks some GPU features.
EMULATE = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """exp of CUDA's library, which torch calls: ``tl.exp`` is the hardware's fast approximation.
    The interpreter has only one exp."""
    if EMULATE:
        y = tl.exp(x)
    else:
        y = libdevice.exp(x)
    return y


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    """silu of float32, not yet rounded. A separate activation kernel and a matmul's epilogue use
    this same function, so both compute the same bits."""
    return tl.div_rn(x, exp(-x) + 1.0)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """sigmoid of float32, not yet rounded, as in torch's CUDA kernel: ``1 / (1 + exp(-x))``."""
    return tl.div_rn(1.0, exp(-x) + 1.0)


@triton.jit
def silu_of_bfloat16(x):  # type: ignore[no-untyped-def]
    """:func:`silu` of float32 that holds a bfloat16, not yet rounded: rounding to bfloat16 gives
    the same bits.

    It uses the plain instructions for 2 ** x and 1 / x, without the branch of a rounded division.
    None of the 65,536 possible inputs gave other bits on an H200 (a test checks all of them). An
    exact exponential and a Newton step would take 4% of the time of 8B's gate and up, and 14% of
    0.6B's. The code takes the reciprocal of a quarter of the divisor, because that of the whole
    divisor may be subnormal.
    """
    if EMULATE:
        return silu(x)
    e = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], tl.float32, True, 1
    )
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [tl.fma(e, 0.25, 0.25)], tl.float32, True, 1
    )
    return x * 0.25 * inverse


@triton.jit
def rounded_silu(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """:func:`silu` of float32 that holds a DTYPE, rounded to DTYPE, as float32."""
    if tl.bfloat16 == DTYPE:
        y = silu_of_bfloat16(x)
    else:
        y = silu(x)
    return rounded(y, DTYPE)


@triton.jit
def rounded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 ``x`` rounded to ``dtype`` (to nearest, ties to even), as float32.

    Triton's interpreter truncates instead of rounding to bfloat16, so there the rounding is
    explicit.
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
