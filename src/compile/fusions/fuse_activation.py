"""Fuse ``silu(gate) * up`` and ``gelu(gate, approximate="tanh") * up`` into one call each.

Results are unchanged bit for bit on a CPU. Gate and up may be slices of a merged matmul's result,
which the kernel reads in place.
"""

from __future__ import annotations

from torch.fx import Node

from ...kernels.fused import dispatch as fused
from ..fx.nodes import calls
from ..fx.rules import (
    MISSING,
    Match,
    Rule,
    Value,
    call,
    one_of,
    product,
    same_dtype,
    same_shape,
    values,
)

_ACTIVATED = one_of(
    call("silu", args=values("gate"), name="activated", inplace=(MISSING, False)),
    call("gelu", args=values("gate"), name="activated", approximate=("tanh",)),
)


def _act_mul(m: Match) -> Node:
    kind: fused.Activation = "silu" if calls(m["activated"], "silu") else "gelu_tanh"
    return m.call(fused.act_mul, m["gate"], m["up"], kind)


fuse_activation = Rule(
    product(_ACTIVATED, Value("up")),
    _act_mul,
    guards=(same_shape("gate", "up"), same_dtype("gate", "up")),
)
