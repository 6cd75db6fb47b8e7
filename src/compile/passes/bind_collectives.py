"""Bind the collectives of a graph to the communicator of this rank, bypassing torch's
dispatcher."""

from __future__ import annotations

from torch.fx import GraphModule

from ..fx.nodes import calls_op
from ..fx.pass_context import PassContext


def bind_collectives(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of calls bound."""
    communicator, count = context.communicator, 0
    if communicator is None:
        return 0
    for node in gm.graph.nodes:
        for name in ("all_reduce", "all_gather"):
            if calls_op(node, name):
                node.target = getattr(communicator, name)
                count += 1
    return count
