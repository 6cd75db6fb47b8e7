"""Device functions that store keys and values in e4m3 with one scale per vector.

The caches contain planes of :mod:`..e4m3`, and the bytes equal those of its torch functions:
quotients have IEEE rounding, and are then rounded to the nearest e4m3, ties to even.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import e4m3

SCALE_BYTES = tl.constexpr(e4m3.SCALE_BYTES)


@triton.constexpr_function
def is_e4m3(dtype):  # type: ignore[no-untyped-def]
    """Whether a cache with these elements contains planes."""
    return dtype == tl.float8e4nv


@triton.constexpr_function
def block_width(IS_E4M3, PAGE, HKV, D):  # type: ignore[no-untyped-def]
    """Elements of a block of PAGE slots: vectors of D elements of HKV heads, and for planes the
    scales."""
    return PAGE * HKV * (D + (SCALE_BYTES if IS_E4M3 else 0))


@triton.constexpr_function
def slot_width(IS_E4M3, HKV, D):  # type: ignore[no-untyped-def]
    """Elements from a head's vector in a slot to that in the next slot of the block."""
    return D if IS_E4M3 else HKV * D


@triton.jit
def scales_behind(cache, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointer to the scales, ``[HKV, PAGE]``, of the block that ``cache`` points to."""
    return (cache + HKV * PAGE * D).to(tl.pointer_type(tl.float32))


@triton.jit
def quantized(x):  # type: ignore[no-untyped-def]
    """e4m3 ``[M, D_PAD]`` of ``x``, zeros beyond a vector's end, and the scales, float32 ``[M]``:
    the largest magnitude of each vector / 448, never zero. A vector with NaN becomes all NaN."""
    wide = x.to(tl.float32)
    # As integers, where NaN is the largest.
    largest = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scales = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    scales = tl.maximum(scales, 2.0**-126, propagate_nan=tl.PropagateNan.ALL)
    spread = tl.broadcast_to(scales[:, None], wide.shape)
    return tl.div_rn(wide, spread).to(tl.float8e4nv), scales


@triton.jit
def store_vectors(  # type: ignore[no-untyped-def]
    cache, slots, heads, x, dims, mask, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr
):
    """Quantise ``x [M, D_PAD]`` and store the rows selected by ``mask [M]``.

    Args:
        cache: pointer to e4m3, of all blocks. slots: int64 ``[M]``. heads: ``[M]``. dims:
            ``[D_PAD]``.
    """
    # Rows that are not stored are zeros, and div_rn has a slow branch for zeros: fused with decode
    # attention, the store of one token took 5 us of 11.
    numbers, scales = quantized(tl.where(mask[:, None], x, 1.0))
    first = cache + slots // PAGE * block_width(True, PAGE, HKV, D)
    at = heads * PAGE + slots % PAGE
    tl.store(
        (first + at * D)[:, None] + dims[None, :], numbers, mask=mask[:, None] & (dims < D)[None, :]
    )
    tl.store(scales_behind(first, HKV, D, PAGE) + at, scales, mask=mask)
