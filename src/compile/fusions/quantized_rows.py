"""Fuse the call that computes the rows of an FP8 matmul with the quantisation of those rows.

The rules run after ``lower_gpu``, which creates the matmuls. Results are unchanged bit for bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from ...kernels.fused import dispatch as fused
from ...kernels.fused.e4m3_groups import GROUP
from ...kernels.matmul.quantized import dispatch_fp8
from ..fx.nodes import example, shape_of
from ..fx.pass_context import PassContext
from ..fx.rules import Chain, Match, Rest, Rule, Value, call, values
from ..lowering.lower_gpu import only_gate
from .joined_norms import NORM_OF_SUM, join_norm_of_sum

# By the call that computes the rows and the matmul that reads them.
_JOINED: dict[tuple[Any, Any], Callable[..., Any]] = {
    (fused.rms_norm, dispatch_fp8.linear): dispatch_fp8.norm_linear,
    (fused.rms_norm, dispatch_fp8.mlp): dispatch_fp8.norm_linear,
    (fused.act_mul, dispatch_fp8.linear): dispatch_fp8.act_linear,
    (fused.add_rms_norm, dispatch_fp8.linear): dispatch_fp8.add_norm_linear,
    (fused.add_rms_norm, dispatch_fp8.mlp): dispatch_fp8.add_norm_linear,
}
_MATMULS = (dispatch_fp8.linear, dispatch_fp8.mlp)

_FIRST = call(dispatch_fp8.linear, args=(*values("x", "weight", "scales"), None), name="first")
_HALVES = call(
    "split", "chunk", args=(_FIRST, Value("sizes")), name="halves", is_shared=True, dim=(-1, 1, 2)
)
_GATED = call(
    fused.act_mul,
    args=(
        call(operator.getitem, args=(_HALVES, 0)),
        call(operator.getitem, args=(Value("halves"), 1)),
        "silu",
    ),
    name="gated",
)
_MLP = Rule(
    call(dispatch_fp8.linear, args=(_GATED, Rest("second"))),
    lambda m: m.call(dispatch_fp8.mlp, m["x"], m["weight"], m["scales"], *m["second"]),
    guards=(lambda m: only_gate(m["first"]) is m["gated"],),
)
_OF_ROWS = Rule(
    call(
        *_MATMULS,
        args=(
            call(fused.rms_norm, fused.act_mul, args=(Rest("made"),), name="maker"),
            Rest("rest"),
        ),
    ),
    lambda m: m.call(_JOINED[m["maker"].target, m.root.target], *m["made"], *m["rest"]),
    guards=(lambda m: (m["maker"].target, m.root.target) in _JOINED,),
)
_OF_SUM = Rule(
    call(*_MATMULS, args=(NORM_OF_SUM, Rest("rest"))),
    lambda m: join_norm_of_sum(m, _JOINED[fused.add_rms_norm, m.root.target], *m["rest"]),
    at="norm",
)


def fuse_quantize(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of matmuls fused::

        linear(x, gate_up) ──► halves ──► act_mul "silu" ──► linear(·, weight), an mlp(x, ...)
        rms_norm or add_rms_norm ──► linear(·, weight) or mlp(·, ...)
        act_mul ──► linear(·, weight)

    ``mlp`` may apply the activation in the epilogue of the first matmul.
    """
    return sum(rule(gm, context) for rule in (_MLP, _OF_ROWS, _OF_SUM))


# None of them changes the order of elements.
_RESHAPES = ("unsqueeze", "squeeze", "reshape", "view", "flatten", "contiguous")


def fuse_attention_quantize(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of attention calls that quantise; 0 if the selected backend has
    no such call::

        attention [T, Hq, Dv] ──► reshape [1, T, Hq * Dv] ──► dispatch_fp8.linear(·, weight)

    If head sizes are multiples of 128, each group of channels that share a scale belongs to one
    head, so attention kernels can quantise what they store.
    """
    attention = context.attention
    if attention is None or not attention.quantizing:
        return 0
    quantizing = attention.quantizing

    def replacement(m: Match) -> Node:
        with m.graph.inserting_before(m["attention"]):
            rows = m.call(quantizing[m["attention"].target], *m["args"])
        like: Any = example(m.root)
        return m.call(dispatch_fp8.linear_of_rows, rows, like.dtype, like.dim(), *m["rest"])

    attend = call(*quantizing, args=(Rest("args"),), name="attention")
    return Rule(
        call(dispatch_fp8.linear, args=(Chain(attend, _RESHAPES), Rest("rest"))),
        replacement,
        guards=(_has_groups_of_a_head,),
    )(gm, context)


def _has_groups_of_a_head(m: Match) -> bool:
    """Whether the rows of the matmul are the tokens of attention, and each 128 channels of a row
    belong to one head."""
    outputs, results = shape_of(m["attention"]), shape_of(m.root)
    rows = example(m.root.args[0])  # type: ignore[arg-type]
    if outputs is None or results is None or not isinstance(rows, Tensor) or len(results) < 2:
        return False
    num_tokens, *heads = outputs
    if len(heads) != 2 or not all(size.isdigit() for size in heads) or int(heads[1]) % GROUP:
        return False
    is_flat = str(rows.shape[-1]) == str(int(heads[0]) * int(heads[1]))
    return is_flat and results[-2] == num_tokens and set(results[:-2]) <= {"1"}
