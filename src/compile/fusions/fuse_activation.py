"""Fuses ``silu(gate) * up`` and ``gelu(gate, approximate="tanh") * up`` into one call each."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ...kernels.fused import dispatch as fused
from ..fx.nodes import (
    calls,
    dtype_of,
    erase_unused,
    example,
    only_user,
    other_operand,
    shape_of,
    written_nodes,
)
from ..fx.pass_context import PassContext


def _kind(node: Node) -> fused.Activation | None:
    if node.op != "call_function" or len(node.args) != 1 or node.kwargs.get("inplace"):
        return None
    if calls(node, "silu") and not node.kwargs.keys() - {"inplace"}:
        return "silu"
    if calls(node, "gelu") and node.kwargs == {"approximate": "tanh"}:
        return "gelu_tanh"
    return None


def fuse_activation(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of products replaced. Results are unchanged bit for bit on
    a CPU. Gate and up may be slices of a merged product, which the kernel reads where they lie."""
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    for node in list(graph.nodes):
        kind, product = _kind(node), only_user(node)
        if kind is None or product is None or not calls(product, "mul"):
            continue
        gate, up = node.args[0], other_operand(product, node)
        if up is None or up is node or not written.isdisjoint({gate, up, node}):
            continue
        if shape_of(gate) is None or shape_of(gate) != shape_of(up):
            continue
        if dtype_of(gate) != dtype_of(up):
            continue
        with graph.inserting_before(product):
            call = graph.call_function(fused.act_mul, (gate, up, kind))
        call.meta["example_value"] = example(product)
        product.replace_all_uses_with(call)
        erase_unused(graph, (node, product))
        count += 1
    return count
