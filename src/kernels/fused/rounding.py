"""Device functions as accurate as PyTorch's, and rounded as there, shared by kernels that must give
equal bits."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

# Whether Triton interprets kernels on a CPU, which lacks some of what a GPU does.
EMULATE = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """That of CUDA's library, as torch calls it: ``tl.exp`` is the fast one of the hardware. The
    interpreter has no other."""
    if EMULATE:
        y = tl.exp(x)
    else:
        y = libdevice.exp(x)
    return y


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    """silu of float32, not rounded yet: the same for an activation of its own and for one that a
    matmul applies, so that both give the same bits."""
    return tl.div_rn(x, exp(-x) + 1.0)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """sigmoid of float32, not rounded yet, as torch's CUDA kernel: ``1 / (1 + exp(-x))``."""
    return tl.div_rn(1.0, exp(-x) + 1.0)


@triton.jit
def silu_of_bfloat16(x):  # type: ignore[no-untyped-def]
    """:func:`silu` of float32 that holds a bfloat16, not rounded yet: to bfloat16 it rounds to the
    same bits.

    By the instructions for 2 ** x and 1 / x as they are, without the branch of a rounded division.
    Of the 65,536 inputs there are, none got other bits on an H200 (a test tries them all). An exact
    exponential and a step of Newton's would take 4% of the time of 8B's gate and up, and 14% of
    0.6B's. A quarter of the divisor, as the reciprocal of all of it may be subnormal.
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
