"""Fuses what makes the rows of an FP8 matmul, a norm or a gated activation, with their rounding.

::

    rms_norm, add_rms_norm or act_mul ──► dispatch_fp8.linear(·, weight)

Then a norm, gate and up, their product and the matmul behind it become one call, which may apply
the gate where gate and up are stored. It comes after ``lower_gpu``, which makes the matmuls. What
something else reads, too, stays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ...kernels.fused import dispatch as fused
from ...kernels.linear import dispatch_fp8
from ..fx.nodes import calls_function, example
from .context import PassContext

_JOINED: dict[Any, Callable[..., Any]] = {
    fused.rms_norm: dispatch_fp8.norm_linear,
    fused.act_mul: dispatch_fp8.act_linear,
}


def fuse_quantize(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of matmuls joined. Results are unchanged bit for bit."""
    graph, count = gm.graph, 0
    for node in list(graph.nodes):
        if node.target in _JOINED:
            matmul = _only_matmul(node)
            if matmul is None:
                continue
            with graph.inserting_before(matmul):
                joined = graph.call_function(_JOINED[node.target], (*node.args, *matmul.args[1:]))
            joined.meta["example_value"] = example(matmul)
            matmul.replace_all_uses_with(joined)
            graph.erase_node(matmul)
            graph.erase_node(node)
        elif calls_function(node, fused.add_rms_norm):
            results: dict[Any, Node] = {user.args[1]: user for user in node.users}
            matmul = _only_matmul(results.get(0))
            if matmul is None:
                continue
            # There, where the sum is: others may read it before the matmul.
            with graph.inserting_before(node):
                joined = graph.call_function(
                    dispatch_fp8.add_norm_linear, (*node.args, *matmul.args[1:])
                )
                out = graph.call_function(operator.getitem, (joined, 0))
            out.meta["example_value"] = example(matmul)
            matmul.replace_all_uses_with(out)
            graph.erase_node(matmul)
            graph.erase_node(results[0])
            node.replace_all_uses_with(joined)
            graph.erase_node(node)
        else:
            continue
        count += 1
    for node in list(graph.nodes):
        if calls_function(node, dispatch_fp8.act_linear):
            _fuse_mlp(graph, node)
    return count


def _fuse_mlp(graph: Graph, down: Node) -> None:
    """``down`` and the ``add_norm_linear`` whose result's halves it alone reads, as one call."""
    gate, up, kind, *parts = down.args
    if kind != "silu" or not isinstance(gate, Node) or not isinstance(up, Node):
        return
    halves = gate.args[0]
    if not isinstance(halves, Node) or not _are_halves(halves, gate, up):
        return
    out = halves.args[0]
    if not isinstance(out, Node) or set(out.users) != {halves} or out.args[1:] != (0,):
        return
    norm = out.args[0]
    if not isinstance(norm, Node) or not calls_function(norm, dispatch_fp8.add_norm_linear):
        return
    # There, where the sum is: others may read it before the matmul.
    with graph.inserting_before(norm):
        joined = graph.call_function(dispatch_fp8.add_norm_mlp, (*norm.args, *parts))
        result = graph.call_function(operator.getitem, (joined, 0))
    result.meta["example_value"] = example(down)
    down.replace_all_uses_with(result)
    for node in (down, gate, up, halves, out):
        graph.erase_node(node)
    norm.replace_all_uses_with(joined)
    graph.erase_node(norm)


def _are_halves(halves: Node, gate: Node, up: Node) -> bool:
    """Whether ``gate`` and ``up``, which have one reader each, are all of ``halves``, a split into
    two equal parts along the last dimension."""
    if halves.target != "split" or set(halves.users) != {gate, up}:
        return False
    if gate.args[1:] != (0,) or up.args[1:] != (1,) or len(gate.users) + len(up.users) != 2:
        return False
    sizes = halves.args[1]
    is_equal = isinstance(sizes, (list, tuple)) and len(sizes) == 2 and sizes[0] == sizes[1]
    return is_equal and halves.args[2:] == (-1,)


def _only_matmul(node: Node | None) -> Node | None:
    """The FP8 matmul that alone reads ``node`` as its rows, if there is one."""
    if node is None or len(node.users) != 1 or node.kwargs:
        return None
    (user,) = node.users
    is_matmul = user.target is dispatch_fp8.linear and user.args[0] is node
    return user if is_matmul else None
