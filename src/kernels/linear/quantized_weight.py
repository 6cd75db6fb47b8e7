"""``QuantizedWeight``: the forms in which a weight is held quantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cpu_quantized import Int4Weight, Int8Weight, unpack_int4
from .fp8 import Fp8Weight

QuantizedWeight = Int4Weight | Int8Weight | Fp8Weight


def merged(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The outputs of all, in order; all have one form and one number of scales per output."""
    return type(weights[0])(*(torch.cat(parts) for parts in zip(*weights, strict=True)))


def expanded(weight: QuantizedWeight) -> Tensor:
    """float32 ``[N, K]``."""
    if isinstance(weight, Fp8Weight):
        return weight.expanded()
    if isinstance(weight, Int8Weight):
        groups = weight.values.float().unflatten(1, (weight.scales.shape[1], -1))
        return (groups * weight.scales.unsqueeze(-1)).flatten(1)
    return expand_int4(*weight)


def expand_int4(values: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """float32 ``[N, K]`` of the parts of an :class:`Int4Weight`."""
    weight = unpack_int4(values).float()
    return weight.mul_(scales.unsqueeze(-1)).add_(minima.unsqueeze(-1)).flatten(1)
