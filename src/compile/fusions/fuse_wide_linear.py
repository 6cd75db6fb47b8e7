"""A float32 ``linear`` of 16-bit rows and a 16-bit weight becomes one call without copies::

    linear(rows.to(float32), weight.to(float32))

So transformers computes a router's logits in DeepSeek, GLM-4-MoE, Kimi Linear and others: on a GPU
a conversion of the rows, one of the weight in every step, and a matmul without the matrix unit.

It comes after the passes that look for a router, to which its logits are any node.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ...kernels.linear import wide_matmul as kernel
from ..fx.nodes import (
    cast_source,
    dtype_of,
    erase_unused,
    example,
    is_linear,
    linear_operands,
    written_nodes,
)
from ..fx.pass_context import PassContext


def fuse_wide_linear(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of calls replaced. Results are float32 matmuls' up to the
    order of additions."""
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    for node in list(graph.nodes):
        if not is_linear(node):
            continue
        wide_rows, wide_weight, bias = linear_operands(node)
        rows, weight = _narrow(wide_rows), _narrow(wide_weight)
        if bias is not None or rows is None or weight is None or not _fits(rows, weight, context):
            continue
        if not written.isdisjoint({rows, wide_rows, weight, wide_weight}):
            continue  # the call reads at another time than the conversions did
        with graph.inserting_before(node):
            call = graph.call_function(kernel.wide_linear, (rows, weight))
        call.meta["example_value"] = example(node)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        erase_unused(graph, (wide_rows, wide_weight))
        count += 1
    return count


def _narrow(wide: Node) -> Node | None:
    """What ``wide`` is the float32 of, if it is that of something."""
    return cast_source(wide) if dtype_of(wide) == torch.float32 else None


def _fits(rows: Node, weight: Node, context: PassContext) -> bool:
    constant = context.constant(weight)
    return (
        constant is not None
        and context.weight_format(constant) is None
        and kernel.fits(constant)
        and dtype_of(rows) == constant.dtype
    )
