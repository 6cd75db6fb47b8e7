"""Norms fused with the operation that computes their input or reads their result.

``fuse_norm_linear`` fuses a norm and the one matmul that reads it. ``fuse_all_reduce_norm`` fuses
an all-reduce, the residual and the norm of their sum, and ``fuse_row_parallel`` also the matmul
before them. ``fuse_combine_norm`` fuses the sum over a token's experts and the norm after it. The
fused calls guarantee unchanged bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from ...kernels.fused import dispatch as fused
from ...kernels.matmul import dispatch as gpu_linear
from ...kernels.matmul.dispatch import RowParallel
from ...kernels.moe.expert_rows import combine_add_rms_norm, combine_experts
from ..fx.nodes import dtype_of, example, last_size, shape_of
from ..fx.pass_context import PassContext
from ..fx.rules import (
    Call,
    Chain,
    Match,
    Named,
    Rest,
    Rule,
    Value,
    Where,
    call,
    is_constant,
    one_of,
    product,
    values,
)

_VIEWS = ("view", "reshape")

_ADD_NORM = call(fused.add_rms_norm, args=(Rest("norm_args"),), name="norm", is_shared=True)
NORM_OF_SUM = call(operator.getitem, args=(_ADD_NORM, 0))
"""The first result of an ``add_rms_norm`` that only one call reads."""


def join_norm_of_sum(m: Match, function: Callable[..., Any], *more: Any) -> dict[Node, Node]:
    """One call that replaces the root and the ``add_rms_norm`` that only the root reads.

    The call is inserted at the sum, because other nodes may read the sum before the root. Weights
    are inputs.
    """
    joined = m.call(function, *m["norm_args"], *more)
    return {m.root: m.call(operator.getitem, joined, 0), m["norm"]: joined}


_HAS_GATE: dict[Any, bool] = {gpu_linear.linear: False, gpu_linear.linear_silu_mul: True}


def _has_joined_norm(m: Match) -> bool:
    norm_weight, weight = map(m.context.constant, (m["norm_args"][2], m["weight"]))
    # Both weights are read early, so no operation of a step may compute them.
    if norm_weight is None or weight is None:
        return False
    return gpu_linear.has_joined_norm(weight, _HAS_GATE[m.root.target])


fuse_norm_linear = Rule(
    call(*_HAS_GATE, args=(NORM_OF_SUM, Value("weight"), None, Value("max_custom_rows"))),
    lambda m: join_norm_of_sum(
        m, gpu_linear.norm_linear, m["weight"], m["max_custom_rows"], _HAS_GATE[m.root.target]
    ),
    guards=(_has_joined_norm,),
    at="norm",
)


def fuse_all_reduce_norm(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of norms fused. Run it after ``bind_collectives``.

    The second form is that of models with norms after their layers::

        all_reduce(partial) ─► add_rms_norm(·, residual) ──┬─► normed
                                                           └─► the sum, for the next residual
        all_reduce(partial) ─► rms_norm(·) ──────────────────► normed

    Only shapes decide, so that all ranks have the same collectives in the same order.
    """
    communicator = context.communicator
    if communicator is None:
        return 0
    function = communicator.all_reduce_norm

    def replacement(m: Match) -> Node | dict[Node, Node]:
        partial, view = m["partial"], m.get("view")
        if view is not None:  # then the same view of this rank's part
            partial = m.graph.call_method(view.target, (partial, *view.args[1:]))
            partial.meta["example_value"] = example(view)
        joined = m.call(function, partial, m.get("residual"), m["weight"], m["eps"], m["form"])
        return joined if m.get("residual") else m.results(joined, m.root)

    total = call(communicator.all_reduce, args=values("partial"), name="sum")
    view = call(*_VIEWS, args=(total, Rest()), name="view")
    # Other leading dimensions, as for experts.
    of_rows = Where(
        view,
        lambda m: (
            m["view"].op == "call_method"
            and last_size(m["view"]) == last_size(m["sum"]) is not None
        ),
    )
    x, residual, norm = (
        Named("x", one_of(total, of_rows)),
        Value("residual"),
        values("weight", "eps", "form"),
    )
    # A sum that is added to itself stays.
    added = Where(
        one_of(
            call(fused.add_rms_norm, args=(x, residual, *norm)),
            call(fused.add_rms_norm, args=(residual, x, *norm)),
        ),
        lambda m: m["residual"] is not m["x"],
    )
    # The weight is read early, so no operation of a step may compute it.
    pattern = one_of(added, call(fused.rms_norm, args=(x, *norm)))
    return Rule(pattern, replacement, guards=(is_constant("weight"),))(gm, context)


def fuse_row_parallel(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of matmuls fused. With few rows, ``linear`` then pushes its
    results to the other ranks itself. Run it after ``fuse_all_reduce_norm``::

        linear(x, weight) ─► all_reduce_norm(·, residual, ·)
    """
    communicator = context.communicator
    if communicator is None:
        return 0
    linear_norm = RowParallel(communicator).linear_norm
    linear = call(gpu_linear.linear, args=(*values("x", "weight"), None, Value("max_custom_rows")))
    return Rule(
        call(communicator.all_reduce_norm, args=(linear, Rest("norm"))),
        lambda m: m.call(linear_norm, m["x"], m["weight"], m["max_custom_rows"], *m["norm"]),
        guards=(is_constant("weight"),),
    )(gm, context)


# combine_experts(·) ─► view ─► [add(·, shared) ─► view] ─► add_rms_norm(·, residual)
#
# ``shared`` may be ``sigmoid(logits) * rows`` with one logit per token. If anything else stands in
# between, a factor of the sum say, nothing is fused.
_COMBINED = call(
    combine_experts, args=values("rows", "weights", "inverse", "top_k", "dtype"), name="combined"
)
_SIGMOID = call("sigmoid", args=values("logits"))


def _has_factor_per_row(m: Match) -> bool:
    shape = shape_of(m["shared_rows"])
    if shape is None or shape != shape_of(m["shared"]):
        return False
    dtypes = {dtype_of(m[name]) for name in ("logits", "shared_rows", "shared")}
    return shape_of(m["logits"]) == (*shape[:-1], "1") and len(dtypes) == 1


_GATED = Where(product(_SIGMOID, Value("shared_rows"), "shared"), _has_factor_per_row)


def _adds_shared(m: Match) -> bool:
    """Whether nothing is broadcast or converted."""
    total = m["total"]
    if last_size(total) != last_size(m["combined"]):
        return False
    shapes = {shape_of(m[name]) for name in ("total", "routed", "shared")}
    is_converted = not dtype_of(m["shared"]) == dtype_of(total) == m["dtype"]
    return len(shapes) == 1 and None not in shapes and not is_converted


_ROUTED = Named("routed", Chain(_COMBINED, _VIEWS))
_TOTAL = Where(
    Call(("add",), (_ROUTED, one_of(_GATED, Value("shared"))), "total", commutes=True),
    _adds_shared,
)
_EXPERTS = Chain(one_of(_COMBINED, _TOTAL), _VIEWS)


def _combine_norm(m: Match) -> Node:
    sources = (m["rows"], m["weights"], m["inverse"], m["top_k"], m["residual"])
    shared = [m[name] for name in ("shared_rows", "logits") if name in m.named] or [m.get("shared")]
    return m.call(combine_add_rms_norm, *sources, *m["norm"], *filter(None, shared))


fuse_combine_norm = Rule(
    one_of(
        call(fused.add_rms_norm, args=(_EXPERTS, Value("residual"), Rest("norm"))),
        call(fused.add_rms_norm, args=(Value("residual"), _EXPERTS, Rest("norm"))),
    ),
    _combine_norm,
    guards=(lambda m: m["dtype"] == dtype_of(m["residual"]),),
)
