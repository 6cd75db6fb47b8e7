"""Fuses RMSNorm and the product with the silu of a gate behind it into one call.

::

    rms_norm(x) ───────────────────► mul ─► (cast)
    gate ─► (view, cast) ─► silu ────┘

It comes after ``fuse_norm``, which makes the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...kernels.fused import dispatch as fused
from ..fx.nodes import (
    calls,
    calls_function,
    cast_source,
    dtype_of,
    erase_unused,
    example,
    last_size,
    only_user,
    other_operand,
    shape_of,
    tensor_of,
    written_nodes,
)
from ..fx.pass_context import PassContext


def fuse_gated_norm(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of norms joined. The product is rounded once, as the graph
    rounds it; silu is computed in float32."""
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    for norm in list(graph.nodes):
        if not calls_function(norm, fused.rms_norm):
            continue
        product: Any = only_user(norm)
        if not calls(product, "mul"):
            continue
        found = _gate(other_operand(product, norm), norm)
        result = _rounded(product, norm)
        if found is None or result is None:
            continue
        gate, between = found
        x, weight, eps, form = norm.args
        if not written.isdisjoint({x, gate, norm, product, *between}):
            continue
        with graph.inserting_before(product):
            call = graph.call_function(fused.gated_rms_norm, (x, gate, weight, eps, form))
        call.meta["example_value"] = example(result)
        result.replace_all_uses_with(call)
        erase_unused(graph, (result, product, norm, *between))
        count += 1
    return count


def _gate(activated: Node | None, norm: Node) -> tuple[Node, list[Node]] | None:
    """(gate, nodes behind it) if ``activated`` is a gate's silu in float32, of the shape of the
    norm's result; of heads that were copied to lie evenly spaced, the gate is what was copied."""
    if activated is None or not calls(activated, "silu") or len(activated.users) != 1:
        return None
    if len(activated.args) != 1 or activated.kwargs.get("inplace"):
        return None
    wide: Any = activated.args[0]
    # In another dtype the silu is rounded before the product: ``fuse_activation`` does that.
    if dtype_of(wide) != torch.float32 or dtype_of(activated) != torch.float32:
        return None
    gate: Any = cast_source(wide) or wide
    if dtype_of(gate) != dtype_of(norm):
        return None
    if shape_of(gate) is None or shape_of(gate) != shape_of(norm):
        return None
    if calls(gate, "reshape", "view"):
        heads = tensor_of(gate.args[0])
        if heads is not None and heads.dim() == 4 and last_size(gate.args[0]) == last_size(norm):
            return gate.args[0], [activated, wide, gate]
    return gate, [activated] if wide is gate else [activated, wide]


def _rounded(product: Node, norm: Node) -> Node | None:
    """What rounds the product to the dtype of the norm: itself, or a conversion alone."""
    if dtype_of(product) == dtype_of(norm):
        return product
    user = only_user(product)
    is_cast = user is not None and cast_source(user) is product
    return user if is_cast and dtype_of(user) == dtype_of(norm) else None
