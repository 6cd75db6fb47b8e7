"""e4m3 values in torch: 8-bit floats with 4 exponent bits and 3 mantissa bits, and float32 scales.

An element has the value ``e4m3 * scale``. The bits are stored as uint8, for which torch has every
operation. torch's own conversion takes 3 ns per element on a Zen 4. The conversion here moves the
bits to their places in a float16, which takes 0.25 ns.

An FP8 KV cache is ``[blocks, block size, Hkv, D + 4]`` bytes, in one of two layouts:

- *rows*, on a CPU, of dtype uint8: each vector is followed by its scale, so that slots are gathered
  as those of any other dtype;
- *planes*, on a GPU, of dtype float8_e4m3fn: each block has the vectors ``[Hkv, block size, D]``,
  then the scales, float32 ``[Hkv, block size]``. What a program reads of a head is contiguous and
  aligned; see docs/notes/attention.md.

Blocks are copied, shared and counted in the same way in both layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
DECODED_UNIT = 256.0
"""Factor by which a result of :func:`decode` must be multiplied."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# The sign and the seven bits below the highest exponent bit of a float16.
_FLOAT16_BITS = -(1 << 15) | 0x3F80


def scale_for(largest: Tensor) -> Tensor:
    """The float32 scale with which the largest magnitude becomes 448. It is not zero, even for
    zeros."""
    wide = largest.float()
    # With a Python number as divisor, a GPU would multiply by the inverse.
    return (wide / wide.new_full((), LARGEST)).clamp_min(_SMALLEST_SCALE)


def encode(values: Tensor) -> Tensor:
    """The bits, uint8, of values already divided by their scale: rounded to nearest, ties to
    even."""
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def decode(bits: Tensor) -> Tensor:
    """The values times 1 / 256, as float32: exact, except the two NaN, which become 480 / 256."""
    wide = bits.view(torch.int8).to(torch.int16)  # the sign in all upper bits
    return wide.bitwise_left_shift_(7).bitwise_and_(_FLOAT16_BITS).view(torch.float16).float()


def has_nan(bits: Tensor) -> bool:
    """Whether any element is NaN."""
    return bool((bits.bitwise_and(0x7F) == 0x7F).any())


SCALE_BYTES = 4


def encode_rows(x: Tensor) -> Tensor:
    """uint8 ``[.., D + 4]`` from ``x [.., D]``: each vector has its own scale."""
    wide = x.float()
    scales = scale_for(wide.abs().amax(-1, keepdim=True))
    return torch.cat((encode(wide / scales), scales.view(torch.uint8)), -1)


def decode_rows(rows: Tensor) -> Tensor:
    """float32 ``[.., D]``, of what :func:`encode_rows` gave."""
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return decode(rows[..., :-SCALE_BYTES]).mul_(scales * DECODED_UNIT)


def are_rows(cache: Tensor) -> bool:
    """Whether a KV cache has the layout "rows"."""
    return cache.dtype == torch.uint8


def are_planes(cache: Tensor) -> bool:
    """Whether a KV cache has the layout "planes"."""
    return cache.dtype == torch.float8_e4m3fn


def head_dim(cache: Tensor) -> int:
    """Elements of a vector in a KV cache ``[.., D]``, or in one of bytes, ``[.., D + 4]``."""
    return cache.shape[-1] - SCALE_BYTES * (are_rows(cache) or are_planes(cache))


def planes_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a cache of planes: vectors, uint8 ``[blocks, Hkv, block size, D]``, and scales,
    float32 ``[blocks, Hkv, block size]``."""
    num_blocks, size, num_heads, num_bytes = cache.shape
    dim = num_bytes - SCALE_BYTES
    blocks = cache.view(torch.uint8).view(num_blocks, -1)
    vectors, scales = blocks.split((size * num_heads * dim, size * num_heads * SCALE_BYTES), 1)
    return (
        vectors.view(num_blocks, num_heads, size, dim),
        scales.view(torch.float32).view(num_blocks, num_heads, size),
    )


def store_planes(cache: Tensor, slots: Tensor, x: Tensor) -> None:
    """Write ``x [T, Hkv, D]`` into the slots, int64 ``[T]``, of a cache of planes."""
    vectors, scales = planes_of(cache)
    rows = encode_rows(x)
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    vectors[blocks, :, offsets] = rows[..., :-SCALE_BYTES]
    scales[blocks, :, offsets] = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)[..., 0]


def load_planes(cache: Tensor, slots: Tensor) -> Tensor:
    """float32 ``[T, Hkv, D]`` from the slots, int64 ``[T]``, of a cache of planes."""
    vectors, scales = planes_of(cache)
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    factors = scales[blocks, :, offsets].unsqueeze(-1)
    return decode(vectors[blocks, :, offsets]).mul_(factors * DECODED_UNIT)
