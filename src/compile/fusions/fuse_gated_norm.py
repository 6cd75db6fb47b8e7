"""Fuse RMSNorm and its multiplication by the silu of a gate into one call.

::

    rms_norm(x) ───────────────────► mul ─► (cast)
    gate ─► (view, cast) ─► silu ────┘

The result is rounded once, as in the graph; silu is computed in float32. Runs after ``fuse_norm``,
which creates the norm's call.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ...kernels.fused import dispatch as fused
from ..fx.nodes import last_size, tensor_of
from ..fx.rules import (
    MISSING,
    Cast,
    Match,
    Rest,
    Rule,
    Value,
    call,
    has_dtype,
    one_of,
    product,
    same_dtype,
    same_shape,
    values,
)

_NORM = call(fused.rms_norm, args=values("x", "weight", "eps", "form"), name="norm")
# For heads that were copied to be evenly spaced, the gate is the source of the copy.
_COPIED = call("reshape", "view", args=(Value("heads"), Rest()), name="gate", is_shared=True)
_GATE = one_of(_COPIED, Value("gate"))
# In another dtype the silu is rounded before the multiplication: ``fuse_activation`` matches that.
_WIDE = one_of(Cast(_GATE, is_shared=True), _GATE)
_ACTIVATED = call("silu", args=(_WIDE,), name="activated", inplace=(MISSING, False))
_PRODUCT = product(_NORM, _ACTIVATED)


def _are_heads(m: Match) -> bool:
    heads = tensor_of(m.get("heads"))
    if "heads" not in m.named:
        return True
    return heads is not None and heads.dim() == 4 and last_size(m["heads"]) == last_size(m["norm"])


def _gated_norm(m: Match) -> Node:
    gate = m.get("heads") or m["gate"]
    return m.call(fused.gated_rms_norm, m["x"], gate, m["weight"], m["eps"], m["form"])


fuse_gated_norm = Rule(
    one_of(Cast(_PRODUCT), _PRODUCT),
    _gated_norm,
    guards=(
        has_dtype(torch.float32, "activated"),
        same_dtype("gate", "norm"),
        same_shape("gate", "norm"),
        same_dtype("root", "norm"),
        _are_heads,
    ),
)
