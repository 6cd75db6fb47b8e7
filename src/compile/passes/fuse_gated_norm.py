"""Fuses RMSNorm and the product with the silu of a gate behind it into one call.

::

    rms_norm(x) ───────────────────► mul ─► (cast)
    gate ─► (view, cast) ─► silu ────┘

It comes after ``fuse_norm``, which makes the first.
"""

from __future__ import annotations

from typing import Any

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
from .context import PassContext


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
        activated = other_operand(product, norm)
        gate = _gate(activated, norm)
        result = _rounded(product, norm)
        if gate is None or result is None or activated is None:
            continue
        x, weight, eps, form = norm.args
        if not written.isdisjoint({x, gate, activated, norm, product}):
            continue
        with graph.inserting_before(product):
            call = graph.call_function(fused.gated_rms_norm, (x, gate, weight, eps, form))
        call.meta["example_value"] = example(result)
        result.replace_all_uses_with(call)
        between = [node for node in activated.all_input_nodes if node is not gate]
        behind = [n for node in between for n in node.all_input_nodes if n is not gate]
        erase_unused(graph, (result, product, norm, activated, *between, *behind))
        count += 1
    return count


def _gate(activated: Node | None, norm: Node) -> Node | None:
    """What ``activated`` is the silu of, in float32 and in the shape of the norm's result; where
    that lies in memory, in place of a copy whose rows are evenly spaced."""
    if activated is None or not calls(activated, "silu") or len(activated.users) != 1:
        return None
    if len(activated.args) != 1 or activated.kwargs.get("inplace"):
        return None
    source: Any = activated.args[0]
    gate: Any = cast_source(source) or source
    is_wide = dtype_of(source) == dtype_of(norm) or str(dtype_of(source)) == "torch.float32"
    if not is_wide or dtype_of(activated) != dtype_of(source) or dtype_of(gate) != dtype_of(norm):
        return None
    if shape_of(gate) is None or shape_of(gate) != shape_of(norm):
        return None
    if calls(gate, "reshape", "view"):
        heads = tensor_of(gate.args[0])
        if heads is not None and heads.dim() == 4 and last_size(gate.args[0]) == last_size(norm):
            return gate.args[0]  # type: ignore[no-any-return]
    return gate  # type: ignore[no-any-return]


def _rounded(product: Node, norm: Node) -> Node | None:
    """What rounds the product to the dtype of the norm: itself, or a conversion alone."""
    if dtype_of(product) == dtype_of(norm):
        return product
    user = only_user(product)
    is_cast = user is not None and cast_source(user) is product
    return user if is_cast and dtype_of(user) == dtype_of(norm) else None
