"""``QuantizedWeight``: the forms in which a weight is held quantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cpu_quantized
from .cpu_quantized import Int4Weight, unpack_int4
from .fp8 import Fp8Weight

QuantizedWeight = Int4Weight | Fp8Weight


def merged(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The outputs of all, in order; all have one form and one number of scales per output."""
    int4 = [weight for weight in weights if isinstance(weight, Int4Weight)]
    if int4:
        return cpu_quantized.merged(int4)
    return Fp8Weight(*(torch.cat(parts) for parts in zip(*weights, strict=True)))


def expanded(weight: QuantizedWeight) -> Tensor:
    """float32 ``[N, K]``."""
    if isinstance(weight, Fp8Weight):
        return weight.expanded()
    return expand_int4(*weight)


def expand_int4(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """float32 ``[N, K]`` of the parts of an :class:`Int4Weight`."""
    weight = unpack_int4(values).float().sub_(8)
    return weight.mul_(scales.unsqueeze(-1)).add_(zeros.unsqueeze(-1)).flatten(1)
