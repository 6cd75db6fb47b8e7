"""Fuses what makes the rows of an FP8 matmul, a norm or a gated activation, with their rounding.

::

    linear(x, gate_up) ──► halves ──► act_mul "silu" ──► linear(·, weight)    becomes mlp(x, ...)
    rms_norm or add_rms_norm ──► linear(·, weight) or mlp(·, ...)
    act_mul ──► linear(·, weight)

``linear`` and ``mlp`` are those of :mod:`.dispatch_fp8`, whose ``mlp`` may leave the activation to
the first matmul's store. It comes after ``lower_gpu``, which makes the matmuls. What something else
reads, too, stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ...kernels.fused import dispatch as fused
from ...kernels.quantized import dispatch_fp8
from ..fx.nodes import calls_function, erase_unused, example
from ..fx.pass_context import PassContext
from ..lowering.lower_gpu import only_gate
from .fuse_norm_linear import join_norm_of_sum

# By what makes the rows and what reads them.
_JOINED: dict[tuple[Any, Any], Callable[..., Any]] = {
    (fused.rms_norm, dispatch_fp8.linear): dispatch_fp8.norm_linear,
    (fused.rms_norm, dispatch_fp8.mlp): dispatch_fp8.norm_mlp,
    (fused.act_mul, dispatch_fp8.linear): dispatch_fp8.act_linear,
    (fused.add_rms_norm, dispatch_fp8.linear): dispatch_fp8.add_norm_linear,
    (fused.add_rms_norm, dispatch_fp8.mlp): dispatch_fp8.add_norm_mlp,
}


def fuse_quantize(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of matmuls joined. Results are unchanged bit for bit."""
    graph = gm.graph
    count = sum(_join_gate(graph, node) for node in list(graph.nodes))
    for node in list(graph.nodes):
        if node.target in (fused.rms_norm, fused.act_mul):
            matmul = _only_matmul(node)
            if matmul is None or (node.target, matmul.target) not in _JOINED:
                continue
            function = _JOINED[node.target, matmul.target]
            with graph.inserting_before(matmul):
                joined = graph.call_function(function, (*node.args, *matmul.args[1:]))
            joined.meta["example_value"] = example(matmul)
            matmul.replace_all_uses_with(joined)
            graph.erase_node(matmul)
            graph.erase_node(node)
        elif calls_function(node, fused.add_rms_norm):
            results: dict[Any, Node] = {user.args[1]: user for user in node.users}
            matmul = _only_matmul(results.get(0))
            if matmul is None:
                continue
            function = _JOINED[node.target, matmul.target]
            arguments = (*node.args, *matmul.args[1:])
            join_norm_of_sum(node, results[0], matmul, function, arguments)
        else:
            continue
        count += 1
    return count


def _join_gate(graph: Graph, node: Node) -> bool:
    """Join the matmul ``node``, the gate that alone reads it and the matmul behind, if it is so."""
    if node.target is not dispatch_fp8.linear or node.args[3] is not None:
        return False
    gated = only_gate(node)
    matmul = _only_matmul(gated)
    if gated is None or matmul is None:
        return False
    with graph.inserting_before(matmul):
        joined = graph.call_function(dispatch_fp8.mlp, (*node.args[:3], *matmul.args[1:]))
    joined.meta["example_value"] = example(matmul)
    matmul.replace_all_uses_with(joined)
    erase_unused(graph, [*node.users, *gated.all_input_nodes, gated, node, matmul])
    return True


def _only_matmul(node: Node | None) -> Node | None:
    """The FP8 matmul, or several, that alone reads ``node`` as its rows, if there is one."""
    if node is None or len(node.users) != 1 or node.kwargs:
        return None
    (user,) = node.users
    is_matmul = user.target in (dispatch_fp8.linear, dispatch_fp8.mlp) and user.args[0] is node
    return user if is_matmul else None
