"""Packing of 4-bit and 8-bit weights for :mod:`.matmul_int4`.

Values are stored in the order in which the matrix unit takes its right operand from registers. So a
thread multiplies with exactly what it loads in 16 bytes (as in the layout of Marlin, Frantar et al.
2024)::

    int32 word [n, chunk of 16 words, t, b]       t < 4 lanes, b < 4
    field lo * H + h of it is the chunk's input   b * 8 H + h * 8 + 2 t + lo
                                                  H = 4 (4 bits) or 2 (8 bits), h < H, lo < 2
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .quantized_weight import GROUP, Int4Weight, Int8Weight

PADDING = 128
"""K is padded to a multiple of this."""
_HALVES = (torch.float16, torch.bfloat16)


class PackedWeight(NamedTuple):
    """A weight ``[N, K]`` in the kernels' layout, padded to ``[N, P]``.

    Attributes:
        words: int32 ``[N, P * num_bits / 32]``.
        numbers: scales and offsets: int32 ``[P / group, N]``, with the bits of a scale below those
            of a zero point or minimum, both float16 or bfloat16; or float32 ``[2, P / group, N]``,
            scales first.
        num_bits: 4 or 8. group: 32, 64 or 128 inputs, which share a scale.
        dtype: dtype of ``numbers``: "float16", "bfloat16" or "float32".
        has_minima: whether the offsets are minima, not zero points.
    """

    words: Tensor
    numbers: Tensor
    num_bits: int
    group: int
    dtype: str
    has_minima: bool


def pack_numbers(scales: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """The packed scales and offsets ``[G, N]``."""
    if dtype == torch.float32:
        return torch.stack((scales, offsets)).float().contiguous()
    pair = torch.stack((scales, offsets), -1).to(dtype)
    return pair.contiguous().view(torch.int32).squeeze(-1)


def pack_words(values: Tensor, num_bits: int) -> Tensor:
    """The packed words of values ``[N, K]``, uint8."""
    num_outs, num_inputs = values.shape
    values = torch.nn.functional.pad(values, (0, -num_inputs % PADDING))
    high = 16 // num_bits  # H
    # n, chunk, b, h, t, lo
    fields = values.view(num_outs, -1, 4, high, 4, 2)
    fields = fields.permute(0, 1, 4, 2, 5, 3).flatten(-2)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int64, device=values.device)
    for place in range(2 * high):
        words |= fields[..., place].long() << num_bits * place
    # The same bits as signed integers.
    return ((words + 2**31) % 2**32 - 2**31).int().flatten(1)


def pack(weight: Int4Weight | Int8Weight) -> PackedWeight:
    """The weight with its scales and offsets unchanged: in the narrowest dtype, and with the widest
    groups, that represent all of them exactly."""
    scales = weight.scales
    values, has_minima = weight.unpacked(), False
    if isinstance(weight, Int8Weight):
        num_bits, numbers = 8, [scales, torch.full_like(scales, 128.0)]
    else:
        zeros = _zero_points(weight)
        has_minima = zeros is None
        num_bits, numbers = 4, [scales, weight.minima if zeros is None else zeros]
    group = GROUP
    while group < PADDING and all(_is_paired(part) for part in numbers):
        numbers = [part[:, ::2] for part in numbers]
        group *= 2
    dtype = next((d for d in _HALVES if all(_is_exact(part, d) for part in numbers)), torch.float32)
    num_groups = -(-values.shape[1] // PADDING) * PADDING // group
    missing = (0, num_groups - numbers[0].shape[1])
    held = [torch.nn.functional.pad(part, missing).t() for part in numbers]
    return PackedWeight(
        pack_words(values, num_bits),
        pack_numbers(held[0], held[1], dtype),
        num_bits,
        group,
        str(dtype).removeprefix("torch."),
        has_minima,
    )


def _zero_points(weight: Int4Weight) -> Tensor | None:
    """Integers z with ``minima = -z * scale`` to the bit, or None."""
    scales, minima = weight.scales, weight.minima
    zeros = (-minima / torch.where(scales == 0, 1.0, scales)).round()
    is_small = bool(((zeros >= 0) & (zeros <= 16)).all())
    return zeros if is_small and torch.equal(-zeros * scales, minima) else None


def _is_paired(numbers: Tensor) -> bool:
    is_even = numbers.shape[1] % 2 == 0
    return is_even and torch.equal(numbers[:, ::2], numbers[:, 1::2])


def _is_exact(numbers: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(numbers.to(dtype).float(), numbers)
