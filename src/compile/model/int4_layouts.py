"""Unpacks 4-bit weights of AWQ, GPTQ and compressed-tensors into ``Int4Weight``.

All three hold eight values in an int32, from its lowest bits up. Along which dimension, in which
order, and what a zero point is, differs:

==================  =====================  ======================  ============================
layout              values                 zero points             weight
==================  =====================  ======================  ============================
AWQ                 ``[K, N / 8]``,        ``[G, N / 8]``, alike   ``(q - z) * scale``
                    outputs 0 2 4 6 1 3
                    5 7
GPTQ                ``[K / 8, N]``         ``[G, N / 8]``          ``(q - (z + 1)) * scale``; in
                                                                   its second format z
compressed-tensors  ``[N, K / 8]``         ``[N / 8, G]`` or none  ``(q - z) * scale``; z is 8
==================  =====================  ======================  ============================

N outputs, K inputs, G groups of inputs. Groups become groups of 32 inputs, which changes no value:
``(q - 8) * scale + (8 - z) * scale`` is exact in float32 for scales of float16 and bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.linear.cpu_quantized import GROUP, Int4Weight

_PER_WORD = 8
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where an int32 has outputs 0, 1, 2, ...
_MIDDLE = 8


def awq_weight(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Int4Weight:
    """``scales`` ``[G, N]``."""
    values, zeros = (_unpacked(words)[..., _AWQ_PLACES].flatten(-2) for words in (qweight, qzeros))
    return _grouped(values.t(), zeros.t(), scales.t())


def gptq_weight(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, zero_offset: int) -> Int4Weight:
    """``scales`` ``[G, N]``; ``zero_offset`` is 1 in the first format, 0 in the second."""
    values = _unpacked(qweight).transpose(1, 2).flatten(0, 1)
    zeros = _unpacked(qzeros).flatten(-2)
    return _grouped(values.t(), zeros.t() + zero_offset, scales.t())


def packed_weight(packed: Tensor, zeros: Tensor | None, scales: Tensor) -> Int4Weight:
    """Of compressed-tensors; ``scales`` ``[N, G]``."""
    values = _unpacked(packed).flatten(-2)
    if zeros is None:
        return _grouped(values, torch.full(scales.shape, _MIDDLE), scales)
    return _grouped(values, _unpacked(zeros).transpose(1, 2).flatten(0, 1), scales)


def _unpacked(words: Tensor) -> Tensor:
    """uint8 ``[.., 8]``: the values of each int32 ``[..]``, lowest bits first."""
    pairs = words.contiguous().view(torch.uint8).unflatten(-1, (-1, _PER_WORD // 2))
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def _grouped(values: Tensor, zeros: Tensor, scales: Tensor) -> Int4Weight:
    """From values ``[N, K]``, zero points and scales ``[N, G]``."""
    num_groups = values.shape[1] // GROUP
    scales = scales.float()
    minima = -zeros.float() * scales
    repeats = num_groups // scales.shape[1]
    halves = values.reshape(len(values), num_groups, 2, GROUP // 2)
    return Int4Weight(
        halves[:, :, 0] | halves[:, :, 1] << 4,
        scales.repeat_interleave(repeats, 1),
        minima.repeat_interleave(repeats, 1),
    )
