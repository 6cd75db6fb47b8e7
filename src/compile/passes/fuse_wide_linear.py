"""Fuses the conversions of 16-bit rows and weights to float32 into the matmul that reads them.

Routers are spelt so. The converted weight is no constant, so that neither plans nor packed weights
would serve it, and cuBLAS may sum in another order for another number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...kernels.linear.wide_linear import wide_linear
from ..fx.nodes import (
    cast_source,
    dtype_of,
    erase_unused,
    example,
    is_linear,
    linear_operands,
    written_nodes,
)
from .context import PassContext

_DTYPES = (torch.bfloat16, torch.float16)


def fuse_wide_linear(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of matmuls. On a CPU bits are unchanged."""
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    for node in list(graph.nodes):
        if not is_linear(node):
            continue
        wide, wide_weight, bias = linear_operands(node)
        source, weight = cast_source(wide), cast_source(wide_weight)
        if source is None or bias is not None or not _fits(context, source, weight, node):
            continue
        if not written.isdisjoint({source, wide}):
            continue
        with graph.inserting_before(node):
            call = graph.call_function(wide_linear, (source, weight))
        call.meta["example_value"] = example(node)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        erase_unused(graph, (wide, wide_weight))
        count += 1
    return count


def _fits(context: PassContext, source: Node, weight: Any, node: Node) -> bool:
    """Are rows and weight, a constant matrix, of one 16-bit dtype and the result float32?"""
    tensor = context.constant(weight)
    if tensor is None or tensor.dim() != 2 or not tensor.is_contiguous():
        return False
    if context.weight_format(tensor) is not None or tensor.dtype not in _DTYPES:
        return False
    return dtype_of(source) == tensor.dtype and dtype_of(node) == torch.float32
