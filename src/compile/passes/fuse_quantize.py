"""Fuses what makes the rows of an FP8 matmul, a norm or a gated activation, with their rounding.

::

    rms_norm, add_rms_norm or act_mul ──► dispatch_fp8.linear(·, weight)

It comes after ``lower_gpu``, which makes the matmuls. What something else reads, too, stays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

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
    return count


def _only_matmul(node: Node | None) -> Node | None:
    """The FP8 matmul that alone reads ``node`` as its rows, if there is one."""
    if node is None or len(node.users) != 1 or node.kwargs:
        return None
    (user,) = node.users
    is_matmul = user.target is dispatch_fp8.linear and user.args[0] is node
    return user if is_matmul else None
