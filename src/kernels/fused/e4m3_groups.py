"""Rows in e4m3 with one scale per token and 128 channels: the type, and device functions.

A group of 128 channels of a row is divided by its largest magnitude / 448 and rounded to the
nearest e4m3, ties to even. So the bits of a row depend only on that row. Every kernel that computes
such rows calls :func:`quantized`, in Triton and in Gluon, so all compute the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding import EMULATE

GROUP = 128
"""Channels that share a scale."""
_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
"""The scale of a group of zeros."""


class QuantizedRows(NamedTuple):
    """Quantised rows ``[M, K]`` with the values ``values * scale``.

    Attributes:
        values: ``[M, K]``, float8_e4m3fn; under the interpreter, its bits as uint8.
        scales: float32 ``[ceil(K / 128), M]``.
    """

    values: Tensor
    scales: Tensor


def empty_rows(num_rows: int, width: int, device: torch.device) -> QuantizedRows:
    """Uninitialised rows for a kernel to write."""
    dtype = torch.float8_e4m3fn if device.type == "cuda" else torch.uint8
    values = torch.empty(num_rows, width, dtype=dtype, device=device)
    groups = triton.cdiv(width, GROUP)
    return QuantizedRows(values, torch.empty(groups, num_rows, dtype=torch.float32, device=device))


@triton.jit
def nearest_e4m3(x):  # type: ignore[no-untyped-def]
    """The nearest e4m3 to float32 ``x`` of up to 448, ties to even. The interpreter truncates, so
    there the bits are computed as uint8: adding a power of two 20 bits above the last kept digit
    rounds the lower digits away."""
    if EMULATE:
        size = tl.abs(x)
        exponent = tl.maximum((size.to(tl.uint32, bitcast=True) >> 23).to(tl.int32), 121)
        digit = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
        size = (size + digit) - digit
        bits = size.to(tl.uint32, bitcast=True).to(tl.int32)
        normal = (bits >> 20) - (120 << 3)
        tiny = (size * 512.0).to(tl.int32)
        found = tl.where(size < 0.015625, tiny, normal)
        sign = (x.to(tl.uint32, bitcast=True) >> 24).to(tl.int32) & 128
        return (found | sign).to(tl.uint8)
    return x.to(tl.float8e4nv)


@triton.jit
def quantized(x):  # type: ignore[no-untyped-def]
    """(values, scales) of float32 ``x [groups, 128]``."""
    scales = tl.div_rn(tl.max(tl.abs(x), 1), _LARGEST)
    scales = tl.maximum(scales, SMALLEST_SCALE)
    return nearest_e4m3(_quotients(x, scales)), scales


@triton.jit
def store_quantized(  # type: ignore[no-untyped-def]
    x, values, scales, row, num_rows, begin, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantise and store the channels of a row from ``begin`` on, a multiple of 128.

    ``x``: float32 ``[BLOCK]``, 0 beyond the end.
    """
    GROUPS: tl.constexpr = BLOCK // _GROUP
    numbers, factors = quantized(tl.reshape(x, (GROUPS, _GROUP)))
    group = tl.arange(0, GROUPS)
    at = begin + group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    tl.store(values + row * N + at, numbers, mask=at < N)
    g = begin // _GROUP + group
    tl.store(scales + g * num_rows + row, factors, mask=g * _GROUP < N)


@triton.jit
def _quotients(x, scales):  # type: ignore[no-untyped-def]
    """``x [groups, 128] / scales[:, None]``, with IEEE rounding.

    One rounded division per group gives the reciprocal. A quotient computed with it differs from
    the correct one by at most one unit, and the remainder, which fma computes exactly, corrects it
    (Markstein 1990). This takes a third of the instructions of a division per element.
    """
    wide = tl.broadcast_to(tl.expand_dims(scales, 1), x.shape)
    if EMULATE:  # the interpreter's fma rounds twice
        return tl.div_rn(x, wide)
    inverse = tl.expand_dims(tl.div_rn(1.0, scales), 1)
    inverse = tl.broadcast_to(inverse, x.shape)
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, wide, x), inverse, quotient)
