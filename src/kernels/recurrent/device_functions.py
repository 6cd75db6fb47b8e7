"""Device functions of the recurrent kernels: elementary functions as accurate as torch's."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..fused.rounding import EMULATE, rounded


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    # tl.exp is the fast one of the hardware. The interpreter has only that.
    if EMULATE:
        y = tl.exp(x)
    else:
        y = libdevice.exp(x)
    return y


@triton.jit
def step_size(dt, bias, SOFTPLUS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``softplus(dt + bias)``, each operation rounded to DTYPE; float32, no bias being None."""
    if bias is not None:
        dt = rounded(dt + rounded(bias.to(tl.float32), DTYPE), DTYPE)
    if SOFTPLUS:
        if EMULATE:
            soft = tl.log(1.0 + tl.exp(dt.to(tl.float64))).to(tl.float32)
        else:
            soft = libdevice.log1p(libdevice.exp(dt))
        dt = rounded(tl.where(dt > 20.0, dt, soft), DTYPE)
    return dt


@triton.jit
def first_slot(table, position, interval):  # type: ignore[no-untyped-def]
    """The slot of the state before ``position``, which must be above 0."""
    return tl.load(table + (position - 1) // interval).to(tl.int64)


@triton.jit
def part_of_row(starts, num_rows, part, SIZE: tl.constexpr, MORE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, number of the part in it) of program ``part``, where programs are dealt to the rows by
    their length: ``starts[row] // SIZE + MORE * row`` of them come before a row, which therefore
    has at least ``n // SIZE + MORE`` for its n tokens."""
    i = tl.arange(0, 128)
    before = 0
    for first in range(0, num_rows, 128):
        rows = first + i
        inside = rows < num_rows
        parts = tl.load(starts + rows, mask=inside, other=0) // SIZE + MORE * rows
        before += tl.sum((inside & (parts <= part)).to(tl.int32), axis=0)
    row = before - 1
    return row, part - (tl.load(starts + row) // SIZE + MORE * row)


@triton.jit
def zero_padding(out, first, num_tokens, mask, STRIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros at ``out``, pointers to the elements of token 0, of the tokens from ``first`` on."""
    zeros = tl.zeros(mask.shape, out.dtype.element_ty)
    out += first.to(tl.int64) * STRIDE
    for _ in range(first, num_tokens):
        tl.store(out, zeros, mask=mask)
        out += STRIDE
