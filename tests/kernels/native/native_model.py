"""A numpy model of the native CPU kernels, operation by operation in float32.

Written from the sources in ``src/kernels/native``: the same operations on every element in the same
order. So results must be equal in every bit, whichever instructions the kernels use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
F = np.float32
LANES, GROUP = 16, 32


def fma(a: Any, b: Any, c: Any) -> Floats:
    """``a * b + c``, rounded once.

    The multiplication is exact in float64. The sum is rounded to odd there, from its error. So
    rounding it again, to float32, gives the rounded exact sum.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    product, other = np.broadcast_arrays(product, np.asarray(c, np.float64))
    total = product + other
    part = total - product
    error = (product - (total - part)) + (other - part)
    is_even = total.view(np.int64) & 1 == 0
    neighbour = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & is_even, neighbour, total).astype(F)


def exponential(x: Any) -> Floats:
    x = np.maximum(F(-150), np.minimum(F(130), np.asarray(x, F)))
    n = np.rint(x * F(1.44269504088896341))
    r = fma(-n, F(0.693359375), x)
    r = fma(-n, F(-2.12194440e-4), r)
    p: Any = F(1.9875691500e-4)
    for term in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        p = fma(p, r, F(term))
    p = fma(p, r * r, r + F(1))
    with np.errstate(over="ignore"):
        return np.ldexp(p.astype(np.float64), n.astype(int)).astype(F)


def chunks(x: Floats) -> list[Floats]:
    """By 16 of the last axis, the last one filled up with zeros."""
    missing = -x.shape[-1] % LANES
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return [x[..., i : i + LANES] for i in range(0, x.shape[-1], LANES)]


def sum_of(x: Floats) -> Floats:
    """The sum of 16 lanes: halves, quarters, then two and two."""
    for size in (8, 4, 2, 1):
        x = x[..., :size] + x[..., size : 2 * size]
    return x[..., 0]


def score_of(x: Floats) -> Floats:
    """The sum of 16 lanes as the kernel that makes 16 of them has it."""
    x = x.reshape(*x.shape[:-1], 4, 4)
    quarter = (x[..., 0] + x[..., 2]) + (x[..., 1] + x[..., 3])
    return (quarter[..., 0] + quarter[..., 1]) + (quarter[..., 2] + quarter[..., 3])


def linear(x: Floats, values: NDArray[Any], scales: Floats, minima: Floats | None) -> Floats:
    """Rows ``x [M, K]`` times ``values [N, K]`` of whole numbers, with numbers ``[N, K / 32]``."""
    total = np.zeros((len(x), len(values)), F)
    for g in range(x.shape[1] // GROUP):
        group = slice(g * GROUP, (g + 1) * GROUP)
        most = np.abs(x[:, group]).max(1, keepdims=True)
        scale = most / F(127)
        with np.errstate(divide="ignore"):
            inverse = np.where(most > 0, F(127) / most, F(0))
        rounded = np.rint(x[:, group] * inverse).astype(np.int64)
        dots = rounded @ values[:, group].astype(np.int64).T
        total = fma(dots.astype(F), scales[:, g] * scale, total)
        if minima is not None:
            sums = scale * rounded.sum(1, keepdims=True).astype(F)
            total = fma(minima[:, g], sums, total)
    return total


def rms_norm(x: Floats, weight: Floats, shift: float, eps: float) -> Floats:
    squares = np.zeros((*x.shape[:-1], LANES), F)
    for chunk in chunks(x):
        squares = fma(chunk, chunk, squares)
    mean = sum_of(squares) / F(x.shape[-1])
    factor = F(1) / np.sqrt(mean + F(eps))
    return (weight + F(shift)) * (x * factor[..., None])


def gated_activation(gate: Floats, up: Floats, is_gelu: bool) -> Floats:
    inner = gate
    if is_gelu:
        inner = fma(F(0.044715), gate * gate * gate, gate) * F(1.5957691216057308)
    return gate / (F(1) + exponential(F(0) - inner)) * up


def rotate(x: Floats, cos: Floats, sin: Floats, rotary_dim: int) -> Floats:
    """Heads ``x [T, H, D]``, with tables ``[T, 1, rotary_dim]`` or half of it."""
    middle = rotary_dim // 2
    half = middle if cos.shape[-1] == rotary_dim else 0
    first, second = x[..., :middle], x[..., middle:rotary_dim]
    left = fma(first, cos[..., :middle], -(second * sin[..., :middle]))
    upper = slice(half, half + middle)
    right = fma(second, cos[..., upper], first * sin[..., upper])
    return np.concatenate([left, right, x[..., rotary_dim:]], -1)


def attention(
    query: Floats,
    keys: Floats,
    values: Floats,
    place: int,
    scale: float,
    window: int,
    softcap: float,
    sink: Floats | None,
) -> Floats:
    """One query ``[D]`` at position ``place`` over ``keys [C, D]`` and ``values [C, Dv]``."""
    begin = place - window + 1 if window and place >= window else 0
    first, end = begin // LANES * LANES, place + 1
    parts = query[:LANES] * keys[first:end, :LANES]
    for d in range(LANES, len(query), LANES):
        parts = fma(query[d : d + LANES], keys[first:end, d : d + LANES], parts)
    scores = score_of(parts) * F(scale)
    if softcap:
        ratio = scores / F(softcap)
        scores = (F(1) - F(2) / (exponential(ratio + ratio) + F(1))) * F(softcap)
    highest = scores[begin - first :].max()
    if sink is not None:
        highest = max(highest, sink)
    shares = exponential(scores - highest)
    shares[: begin - first] = 0
    lanes = np.zeros(LANES, F)
    for chunk in chunks(shares):
        lanes = lanes + chunk
    total = sum_of(lanes)
    if sink is not None:
        total = total + exponential(sink - highest)
    out = np.zeros(values.shape[1], F)
    for share, value in zip(shares, values[first:end], strict=True):
        out = fma(share, value, out)
    return out / total
