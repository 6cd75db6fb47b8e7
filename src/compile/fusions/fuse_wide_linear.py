"""A float32 ``linear`` of 16-bit rows and a 16-bit weight becomes one call without copies::

    linear(rows.to(float32), weight.to(float32))

So transformers computes a router's logits in DeepSeek, GLM-4-MoE, Kimi Linear and others: on a GPU
a conversion of the rows, one of the weight in every step, and a matmul without the matrix unit.

Results are float32 matmuls' up to the order of additions. It comes after the passes that look for a
router, to which its logits are any node.
"""

from __future__ import annotations

import torch

from ...kernels.linear import wide_matmul as kernel
from ..fx.nodes import LINEAR
from ..fx.rules import MISSING, Cast, Match, Rule, Value, call, has_dtype, same_dtype

_ROWS = Cast(Value("rows"), "wide_rows", is_shared=True)
_WEIGHT = Cast(Value("weight"), "wide_weight", is_shared=True)


def _fits(m: Match) -> bool:
    constant = m.context.constant(m["weight"])
    if constant is None or m.context.weight_format(constant) is not None:
        return False
    return kernel.fits(constant)


fuse_wide_linear = Rule(
    call(*LINEAR, args=(_ROWS, _WEIGHT), bias=(MISSING, None)),
    lambda m: m.call(kernel.wide_linear, m["rows"], m["weight"]),
    guards=(
        has_dtype(torch.float32, "wide_rows", "wide_weight"),
        same_dtype("rows", "weight"),
        _fits,
    ),
)
