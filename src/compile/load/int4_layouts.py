"""Unpacks 4-bit weights of AWQ, GPTQ and compressed-tensors into ``Int4Weight``.

All three hold eight values in an int32, from its lowest bits up. Along which dimension, in which
order, and what a zero point is, differs:

==================  =====================  ======================  ============================
layout              values                 zero points             weight
==================  =====================  ======================  ============================
AWQ                 ``[K, N / 8]``,        ``[G, N / 8]``, alike   ``(q - z) * scale``
                    outputs 0 2 4 6 1 3
                    5 7
GPTQ                ``[K / 8, N]``         ``[G, N / 8]``, in the  ``(q - z) * scale``
                                           first format shifted
compressed-tensors  ``[N, K / 8]``         ``[N / 8, G]`` or none  ``(q - z) * scale``; z is 8
==================  =====================  ======================  ============================

GPTQ's first format subtracts 0x11111111 from each int32 of zero points, modulo 2**32. A zero point
of 0 borrows from its neighbour, so the subtraction is undone before a word is unpacked.

N outputs, K inputs, G groups of inputs. Groups become groups of 32 inputs, which changes no value:
``(q - 8) * scale + (8 - z) * scale`` is exact in float32 for scales of float16 and bfloat16.

GPTQ and compressed-tensors may name the group of each input (``g_idx``): inputs were quantised in
the order of their importance. Columns are then sorted by group, and so are the rows of a matmul.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.quantized.quantized_weight import GROUP, Int4Weight

_PER_WORD = 8
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where an int32 has outputs 0, 1, 2, ...
_MIDDLE = 8
_ONES = 0x11111111  # 1 in each field of an int32


def awq_weight(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Int4Weight:
    """``scales`` ``[G, N]``."""
    values, zeros = (_unpacked(words)[..., _AWQ_PLACES].flatten(-2) for words in (qweight, qzeros))
    return _grouped(values.t(), zeros.t(), scales.t())


def gptq_weight(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    groups: Tensor | None = None,
    *,
    is_shifted: bool,
) -> Int4Weight:
    """``scales`` ``[G, N]``; ``is_shifted`` in the first format; ``groups`` as of
    :func:`order_of`."""
    values = _unpacked(qweight).transpose(1, 2).flatten(0, 1)
    if is_shifted:
        # A carry out of the highest field is dropped.
        qzeros = ((qzeros.long() + _ONES + 2**31) % 2**32 - 2**31).int()
    zeros = _unpacked(qzeros).flatten(-2)
    return _sorted(values.t(), zeros.t(), scales.t(), groups)


def packed_weight(
    packed: Tensor, zeros: Tensor | None, scales: Tensor, groups: Tensor | None = None
) -> Int4Weight:
    """Of compressed-tensors; ``scales`` ``[N, G]``; ``groups`` as of :func:`order_of`."""
    values = _unpacked(packed).flatten(-2)
    if zeros is None:
        numbers = torch.full(scales.shape, _MIDDLE, device=scales.device)
    else:
        numbers = _unpacked(zeros).transpose(1, 2).flatten(0, 1)
    return _sorted(values, numbers, scales, groups)


def order_of(groups: Tensor, num_groups: int) -> Tensor | None:
    """The inputs sorted by group, int64; None if they are.

    Args:
        groups: the group of each input, ``[K]``.

    Raises:
        ValueError: groups are not of one size.
    """
    groups = groups.long()
    expected = torch.arange(len(groups), device=groups.device) // (len(groups) // num_groups)
    if torch.equal(groups, expected):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], expected):
        raise ValueError(
            f"g_idx must put {len(groups) // num_groups} inputs into each of {num_groups} groups"
        )
    return order


def _sorted(values: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None) -> Int4Weight:
    order = None if groups is None else order_of(groups, scales.shape[1])
    if order is None:
        return _grouped(values, zeros, scales)
    return replace(_grouped(values[:, order], zeros, scales), order=order)


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
