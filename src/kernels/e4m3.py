"""e4m3 numbers on a CPU: 8-bit floats, 4 bits of exponent and 3 of mantissa, with float32 scales.

A number stands for ``e4m3 * scale``. The bits are held as uint8, for which torch has every
operation. torch's own conversion takes 3 ns a number on a Zen 4; here the bits are moved to where
float16 has them, which is 0.25 ns.

A *row* is a vector of numbers and their scale behind them, all in bytes: what a KV cache holds of a
token's head, so that blocks are copied and slots gathered as those of any other type.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
DECODED_UNIT = 256.0
"""What a number that :func:`decode` returns has to be multiplied by."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# The sign and the seven bits below float16's highest bit of exponent.
_FLOAT16_BITS = -(1 << 15) | 0x3F80


def scale_for(largest: Tensor) -> Tensor:
    """The float32 scale at which the largest magnitude becomes 448. Of zeros it is no zero."""
    wide = largest.float()
    # By a number in Python a GPU would multiply with the inverse.
    return (wide / wide.new_full((), LARGEST)).clamp_min(_SMALLEST_SCALE)


def encode(values: Tensor) -> Tensor:
    """The bits, uint8, of numbers already divided by their scale: rounded to nearest, ties to
    even."""
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def decode(bits: Tensor) -> Tensor:
    """float32, 1 / 256 of the numbers: exact, but for the two NaN, which become 480 / 256."""
    wide = bits.view(torch.int8).to(torch.int16)  # the sign in all upper bits
    return wide.bitwise_left_shift_(7).bitwise_and_(_FLOAT16_BITS).view(torch.float16).float()


def has_nan(bits: Tensor) -> bool:
    """Whether any of the numbers is NaN."""
    return bool((bits.bitwise_and(0x7F) == 0x7F).any())


SCALE_BYTES = 4


def encode_rows(x: Tensor) -> Tensor:
    """uint8 ``[.., D + 4]``, of ``x [.., D]``: each vector with a scale of its own."""
    wide = x.float()
    scales = scale_for(wide.abs().amax(-1, keepdim=True))
    return torch.cat((encode(wide / scales), scales.view(torch.uint8)), -1)


def decode_rows(rows: Tensor) -> Tensor:
    """float32 ``[.., D]``, of what :func:`encode_rows` gave."""
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return decode(rows[..., :-SCALE_BYTES]).mul_(scales * DECODED_UNIT)


def are_rows(cache: Tensor) -> bool:
    """Whether a KV cache holds rows."""
    return cache.dtype == torch.uint8


def head_dim(cache: Tensor) -> int:
    """Numbers of a vector in a KV cache ``[.., D]``, or of rows ``[.., D + 4]``."""
    return cache.shape[-1] - SCALE_BYTES * are_rows(cache)
