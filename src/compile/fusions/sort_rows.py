"""Pass the order in which to process the rows of a step to the attention calls of a graph.

::

    context_lens ──► longest_first ──► attention(..., order), every call of the graph

Runs after all passes that create or fuse attention calls, if the backend has such an order.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from ...kernels.arguments import PagedKV
from ..fx.nodes import example
from ..fx.pass_context import PassContext


def sort_rows(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of calls that now have an order. Results are unchanged."""
    attention = context.attention
    if attention is None or attention.longest_first is None:
        return 0
    takes_order = {attention.attend, attention.fused_rope_attention, *attention.quantizing.values()}
    calls = [node for node in gm.graph.nodes if node.target in takes_order and not node.kwargs]
    contexts = {_contexts_of(node) for node in calls}
    if len(contexts) != 1:
        return 0
    (lengths,) = contexts
    num_kv_heads = max((spec.num_kv_heads for spec in context.specs), default=1)
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    with gm.graph.inserting_before(first):
        order = gm.graph.call_function(attention.longest_first, (lengths, num_kv_heads))
    order.meta["example_value"] = example(lengths)
    for node in calls:
        node.args = (*node.args, order)
    return len(calls)


def _contexts_of(call: Node) -> Node:
    """The argument ``context_lens`` of an attention call."""
    (kv,) = (argument for argument in call.args if isinstance(argument, PagedKV))
    lengths: Any = kv.context_lens
    return lengths
