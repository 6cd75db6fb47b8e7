"""Fuses RMSNorm into one call, with the addition of the residual before it if there is one."""

from __future__ import annotations

import operator

from torch.fx import Graph, GraphModule, Node

from ...kernels.fused import dispatch as fused
from ..fx.nodes import calls, dtype_of, erase_unused, example, operands, shape_of, written_nodes
from ..fx.pass_context import PassContext
from .rms_norm import RmsNorm, rms_norms


def fuse_norm(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of norms replaced. Results are unchanged bit for bit on a
    CPU. Run it after ``fuse_rope_store``, which takes the norms of queries and keys."""
    graph = gm.graph
    written = written_nodes(graph)
    norms = list(rms_norms(gm))
    for norm in norms:
        if _is_residual_add(norm, written):
            _replace_with_add(graph, norm)
        else:
            with graph.inserting_before(norm.output):
                call = graph.call_function(
                    fused.rms_norm, (_current(norm), norm.weight, norm.eps, norm.form)
                )
            call.meta["example_value"] = example(norm.output)
            norm.output.replace_all_uses_with(call)
            erase_unused(graph, norm.nodes)
    return len(norms)


def _current(norm: RmsNorm) -> Node:
    """The source of a norm, which an earlier replacement may have exchanged."""
    square = next(node for node in norm.nodes if calls(node, "pow"))
    first = square.args[0]
    return first.args[0] if first in norm.nodes else first


def _is_residual_add(norm: RmsNorm, written: set[Node]) -> bool:
    added = _current(norm)
    if not calls(added, "add") or added.op != "call_function":
        return False
    pair = operands(added)
    if pair is None or not written.isdisjoint(pair):
        return False
    return all(
        shape_of(node) == shape_of(added) and dtype_of(node) == dtype_of(added) for node in pair
    )


def _replace_with_add(graph: Graph, norm: RmsNorm) -> None:
    added = _current(norm)
    residual, x = added.args
    # The weight is a placeholder, so all is there where the sum is.
    with graph.inserting_before(added):
        call = graph.call_function(
            fused.add_rms_norm, (x, residual, norm.weight, norm.eps, norm.form)
        )
        normed = graph.call_function(operator.getitem, (call, 0))
        hidden = graph.call_function(operator.getitem, (call, 1))
    normed.meta["example_value"] = example(norm.output)
    hidden.meta["example_value"] = example(added)
    norm.output.replace_all_uses_with(normed)
    added.replace_all_uses_with(hidden)
    erase_unused(graph, (added, hidden, *norm.nodes))
