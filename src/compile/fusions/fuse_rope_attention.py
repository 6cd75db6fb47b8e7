"""Fuses norm, RoPE, KV store and the attention behind them, where the backend has such a call.

::

    norm_rope_store(q, k, v, ..., caches, slots) ──► paged_attention(·, same caches, layout)

It comes after ``fuse_rope_store``, which makes the first of the two.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ...kernels.arguments import AttentionParams, PagedKV
from ...kernels.fused import dispatch as fused
from ..fx.nodes import calls_op, example, positions, written_nodes
from ..fx.pass_context import PassContext


def fuse_rope_attention(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of attentions joined; 0 if what the context chose has no
    such call. Results and caches are unchanged, as that call promises."""
    attention = context.attention
    if attention is None or attention.fused_rope_attention is None:
        return 0
    graph = gm.graph
    written = written_nodes(graph)
    order = positions(graph)
    count = 0
    node: Any
    for node in list(graph.nodes):
        if not calls_op(node, "paged_attention") or node.kwargs:
            continue
        if AttentionParams(*node.args[7:]).indices is not None:  # another kernel's
            continue
        rope: Any = node.args[0]
        if rope.target is not fused.norm_rope_store:
            continue
        # What the store writes must be read by this attention first: it is written later now.
        inputs, *caches, slots = rope.args
        if list(rope.users) != [node] or list(node.args[1:3]) != caches:
            continue
        between = range(order[rope] + 1, order[node])
        if any(order[user] in between for cache in caches for user in cache.users):
            continue
        operands: set[Node] = set()
        map_arg((rope.args, node.args[3:]), operands.add)
        if not written.isdisjoint(operands):
            continue
        with graph.inserting_before(node):
            joined = graph.call_function(
                attention.fused_rope_attention,
                (inputs, slots, PagedKV(*node.args[1:7]), AttentionParams(*node.args[7:])),
            )
        joined.meta["example_value"] = example(node)
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
        graph.erase_node(rope)
        order[joined] = order.pop(node)
        del order[rope]
        count += 1
    return count
