"""``QuantizedWeight``: the forms in which a weight is held quantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cpu_quantized import Int4Weight, Int8Weight, PermutedInt4Weight, unpack_int4
from .fp8 import Fp8Weight

QuantizedWeight = Int4Weight | PermutedInt4Weight | Int8Weight | Fp8Weight


def merged(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The outputs of all, one after the other; all have one form, one number of scales per output,
    and one order of inputs."""
    first = weights[0]
    if isinstance(first, PermutedInt4Weight):
        parts = zip(*(w[:3] for w in weights), strict=True)
        values, scales, minima = map(torch.cat, parts)
        return PermutedInt4Weight(values, scales, minima, first.order)
    return type(first)(*(torch.cat(parts) for parts in zip(*weights, strict=True)))


def expanded(weight: QuantizedWeight) -> Tensor:
    """float32 ``[N, K]``."""
    if isinstance(weight, Fp8Weight):
        return weight.expanded()
    if isinstance(weight, Int8Weight):
        groups = weight.values.float().unflatten(1, (weight.scales.shape[1], -1))
        return (groups * weight.scales.unsqueeze(-1)).flatten(1)
    if isinstance(weight, PermutedInt4Weight):
        columns = expand_int4(*weight.in_order)
        return torch.empty_like(columns).index_copy_(1, weight.order, columns)
    return expand_int4(*weight)


def expand_int4(values: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """float32 ``[N, K]`` of the parts of an :class:`Int4Weight`."""
    weight = unpack_int4(values).float()
    return weight.mul_(scales.unsqueeze(-1)).add_(minima.unsqueeze(-1)).flatten(1)
