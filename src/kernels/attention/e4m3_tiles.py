"""Tiles of e4m3 keys and values: their scales, queries for them, and their weighted sum.

Products have float16 operands, which hold every e4m3 number and take one instruction for two to
convert to. What else goes into them is brought into float16's range by powers of two, which cost no
bits: queries by one of their own, the weights of values by that which :func:`add_scaled_tile` says.
Of float32 queries all operands are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.e4m3_store import SCALE_BYTES

_HEADROOM = 14
HEADROOM = tl.constexpr(_HEADROOM)
"""Logarithm of the largest magnitude that operands are brought to; float16 reaches 2^15.99."""
# Of scales, beyond which weights are no longer brought into range; float32 sums of weights are.
LARGEST_EXPONENT = tl.constexpr(60)


@triton.constexpr_function
def weights_dtype(cache, query):  # type: ignore[no-untyped-def]
    """Dtype that weights are summed in. Those of e4m3 values are of any size."""
    if cache != tl.float8e4nv:
        return cache
    return tl.float32 if query == tl.float32 else tl.bfloat16


@triton.jit
def scaled_queries(q):  # type: ignore[no-untyped-def]
    """``q [M, DK]`` for e4m3 keys, and the power of two, float32 ``[M]``, it is in units of."""
    if q.dtype == tl.float32:
        return q, tl.full((q.shape[0],), 1.0, tl.float32)
    else:
        wide = q.to(tl.float32)
        largest = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True)
        # Bits of the power of two below the largest magnitude, that held between 2^-100 and 2^100.
        exponent = tl.minimum(tl.maximum(largest, 27 << 23), 227 << 23) & (255 << 23)
        unit = (exponent - (HEADROOM << 23)).to(tl.float32, bitcast=True)
        inverse = ((254 << 23) - exponent + (HEADROOM << 23)).to(tl.float32, bitcast=True)
        return (wide * inverse[:, None]).to(tl.float16), unit


@triton.jit
def load_scales(pages, blocks, start, last, shape):  # type: ignore[no-untyped-def]
    """The scales of the keys and of the values of a tile, ``[BLOCK_N]`` each, 1 beyond ``last``;
    arguments as of :func:`.online_softmax.load_tile`."""
    k_scales = _load_scales(
        pages.k_cache + pages.k_scales, blocks, start, last,
        shape.K_BLOCK, shape.PAGE, shape.BLOCK_N,
    )  # fmt: skip
    v_scales = _load_scales(
        pages.v_cache + pages.v_scales, blocks, start, last,
        shape.V_BLOCK, shape.PAGE, shape.BLOCK_N,
    )  # fmt: skip
    return k_scales, v_scales


@triton.jit
def _load_scales(  # type: ignore[no-untyped-def]
    scales, blocks, start, last, BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    offsets = tl.arange(0, BLOCK_N)
    base = scales.to(tl.pointer_type(tl.float32)) + blocks.to(tl.int64) * (BLOCK // SCALE_BYTES)
    if PAGE >= BLOCK_N:
        pointers = base + (start & (PAGE - 1)) + offsets
    else:
        pointers = base + (offsets & (PAGE - 1))
    return tl.load(pointers, mask=offsets <= last - start, other=1.0)


@triton.jit
def add_scaled_tile(  # type: ignore[no-untyped-def]
    scores, v, v_scales, ones, row_max, row_sum, acc, factor, PRECISION: tl.constexpr
):
    """:func:`.online_softmax.add_tile` of values with scales; ``factor [M]``.

    The state is relative to the largest weight times scale, the latter as the power of two above
    it: no weight of a value is larger than 2^HEADROOM, and those that matter are not much smaller.
    """
    exponents = (v_scales.to(tl.int32, bitcast=True) >> 23) - 126
    exponents = tl.minimum(tl.maximum(exponents, -LARGEST_EXPONENT), LARGEST_EXPONENT) - HEADROOM
    logs = tl.fma(scores, factor[:, None], exponents.to(tl.float32)[None, :])
    new_row_max = tl.maximum(row_max, tl.max(logs, 1))
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = tl.exp2(tl.fma(scores, factor[:, None], -base[:, None]))
    rescale = tl.exp2(row_max - base)
    row_sum = tl.dot(
        weights.to(ones.dtype), ones, row_sum * rescale[:, None], input_precision=PRECISION
    )
    weights = (weights * v_scales[None, :]).to(v.dtype)
    acc = tl.dot(weights, v, acc * rescale[:, None], input_precision=PRECISION)
    return new_row_max, row_sum, acc
