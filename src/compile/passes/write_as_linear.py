"""Write matmuls with a constant matrix ``[N, K]``, such as ``x @ weight.T``, as ``linear``.

They are then merged, quantised, packed and multiplied like any linear layer.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..fx.nodes import erase_unused, tensor_of
from ..fx.pass_context import PassContext
from ..fx.products import Product, constant_nodes, product_of, transposed_matrix


def write_as_linear(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of matmuls."""
    graph, count = gm.graph, 0
    constants = constant_nodes(graph, context.constants)
    for node in list(graph.nodes):
        found = product_of(node, constants.__contains__)
        if found is None or (weight := _matrix(found, context)) is None:
            continue
        node.op, node.target = "call_function", torch.nn.functional.linear
        node.args = (found.x, weight, found.addend)
        count += 1
    erase_unused(graph, [node for node in constants if node.op != "placeholder"])
    return count


def _matrix(product: Product, context: PassContext) -> Node | None:
    """The weight, if ``linear`` computes this matmul with it."""
    _, weight, addend, form = product
    if form.num_batch or form.num_summed != 1 or form.x_squeezed or form.weight_squeezed:
        return None
    for order in (form.x_order, form.out_order):
        if order != tuple(range(len(order))):
            return None
    bias = None if addend is None else tensor_of(addend)
    if addend is not None and (bias is None or bias.dim() != 1):
        return None
    lies_as = form.weight_order
    if lies_as == (1, 0):
        source = transposed_matrix(weight)
        if source is None:
            return None
        weight, lies_as = source, (0, 1)
    return weight if lies_as == (0, 1) and context.constant(weight) is not None else None
