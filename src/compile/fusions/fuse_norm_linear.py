"""Fuses a norm and the one matmul that reads it into a call that may be one launch for few rows.

::

    add_rms_norm(x, residual, ·) ──┬─► linear or linear_silu_mul(·, weight)
                                   └─► the sum, for the next residual

It comes after ``lower_gpu``, which makes the matmuls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from ...kernels.fused import dispatch as fused
from ...kernels.linear import dispatch as gpu_linear
from ..fx.nodes import calls_function, example
from ..fx.pass_context import PassContext

_HAS_GATE: dict[Any, bool] = {gpu_linear.linear: False, gpu_linear.linear_silu_mul: True}


def fuse_norm_linear(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of norms joined. Results are unchanged, as
    :func:`.dispatch.norm_linear` promises."""
    graph, count = gm.graph, 0
    for norm in list(graph.nodes):
        if not calls_function(norm, fused.add_rms_norm):
            continue
        results: dict[Any, Node] = {user.args[1]: user for user in norm.users}
        # Both weights are read early, so nothing of a step may compute them.
        is_constant = context.constant(norm.args[2]) is not None
        matmul = _only_matmul(results.get(0), context) if is_constant else None
        if matmul is None:
            continue
        _, weight, _, max_custom_rows = matmul.args
        has_gate = _HAS_GATE[matmul.target]
        arguments = (*norm.args, weight, max_custom_rows, has_gate)
        join_norm_of_sum(norm, results[0], matmul, gpu_linear.norm_linear, arguments)
        count += 1
    return count


def join_norm_of_sum(
    norm: Node,
    normed: Node,
    matmul: Node,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Replace ``norm``, an ``add_rms_norm``, and ``matmul``, which alone reads ``normed``, its
    first result, by one call, whose results are those of ``matmul`` and the sum.

    It stands where the sum is: others may read that before the matmul. Weights are inputs.
    """
    graph = norm.graph
    with graph.inserting_before(norm):
        joined = graph.call_function(function, arguments)
        out = graph.call_function(operator.getitem, (joined, 0))
    out.meta["example_value"] = example(matmul)
    matmul.replace_all_uses_with(out)
    graph.erase_node(matmul)
    graph.erase_node(normed)
    norm.replace_all_uses_with(joined)
    graph.erase_node(norm)


def _only_matmul(normed: Node | None, context: PassContext) -> Node | None:
    """The matmul that alone reads ``normed``, if there is a launch for both."""
    if normed is None or len(normed.users) != 1:
        return None
    (matmul,) = normed.users
    if matmul.target not in _HAS_GATE:
        return None
    source, weight, bias, _ = matmul.args
    tensor = context.constant(weight)
    if source is not normed or bias is not None or tensor is None:
        return None
    return matmul if gpu_linear.has_joined_norm(tensor, _HAS_GATE[matmul.target]) else None
