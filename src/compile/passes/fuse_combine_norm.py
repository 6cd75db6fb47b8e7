"""Fuses the sum over a token's experts, the residual behind it and the norm of their sum into a
call that is one launch for few tokens.

::

    combine_experts(·) ─► view ─► add_rms_norm(·, residual) ──┬─► normed
                                                              └─► the sum, for the next residual

It comes after the passes that join such norms to what reads them: those stay there.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from ...kernels.fused import dispatch as fused
from ...kernels.linear.combine_norm import combine_add_rms_norm
from ...kernels.linear.expert_rows import combine_experts
from ..fx.nodes import calls, calls_function, dtype_of, erase_unused, written_nodes
from .context import PassContext


def fuse_combine_norm(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of norms joined. Results are unchanged, as
    :func:`.combine_norm.combine_add_rms_norm` promises."""
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    for norm in list(graph.nodes):
        if not calls_function(norm, fused.add_rms_norm):
            continue
        for source, residual in (norm.args[:2], norm.args[1::-1]):
            views = _views(source)
            combined: Any = views[-1]
            if not calls_function(combined, combine_experts) or len(combined.users) != 1:
                continue
            rows, weights, inverse, top_k, dtype = combined.args
            # The rows are read where the norm is.
            inputs = {rows, weights, inverse, residual}
            if dtype != dtype_of(residual) or not written.isdisjoint({*inputs, *views}):
                continue
            norm.target = combine_add_rms_norm
            norm.args = (rows, weights, inverse, top_k, residual, *norm.args[2:])
            erase_unused(graph, views)
            count += 1
            break
    return count


def _views(node: Any) -> list[Node]:
    """``node`` and what it is a view of, down to the first that others read as well."""
    found = [node]
    while calls(node, "view", "reshape") and len(node.users) == 1:
        node = node.args[0]
        found.append(node)
    return found
