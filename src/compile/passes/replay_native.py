"""Gather native calls, and the views between them, into stretches that are replayed."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...kernels.native import calls
from ...kernels.native.replay import Stretch
from ..fx.nodes import example
from ..fx.pass_context import PassContext

_CALLS = (
    calls.linear,
    calls.attention,
    calls.rms_norm,
    calls.add_rms_norm,
    calls.act_mul,
    calls.norm_rope_store,
)
_VIEWS = ("contiguous", "reshape", "split", "squeeze", "transpose", "unsqueeze", "view")
_FEWEST_CALLS = 4
"""Fewer calls do not justify the list of their arguments."""


def replay_native(gm: GraphModule, _context: PassContext) -> int:
    """Rewrite; returns the number of calls in stretches. Run it last."""
    count = 0
    for number, nodes in enumerate(list(_stretches(gm.graph))):
        _replace(gm.graph, nodes, f"stretch_{number}")
        count += sum(node.target in _CALLS for node in nodes)
    return count


def _stretches(graph: Graph) -> Iterator[list[Node]]:
    nodes: list[Node] = []
    for node in graph.nodes:
        if _is_native(node) or _is_view(node, nodes):
            nodes.append(node)
            continue
        if node.op == "call_method" and not node.users:
            continue
        if sum(map(_is_native, nodes)) >= _FEWEST_CALLS:
            yield nodes
        nodes = []


def _is_native(node: Node) -> bool:
    return node.op == "call_function" and node.target in _CALLS


def _is_view(node: Node, before: list[Node]) -> bool:
    """Whether it is a view of a result of the stretch. Whether a method copies is detected when it
    runs."""
    if not node.all_input_nodes or node.all_input_nodes[0] not in before:
        return False
    if node.op == "call_method":
        return node.target in _VIEWS
    return node.target is operator.getitem and isinstance(node.args[1], int)


def _replace(graph: Graph, nodes: list[Node], name: str) -> None:
    inside = set(nodes)
    inputs = list(
        dict.fromkeys(
            place for node in nodes for place in node.all_input_nodes if place not in inside
        )
    )
    # Its width gives the number of tokens.
    inputs.sort(key=lambda node: not _is_step(node))
    inputs.sort(key=lambda node: node is not nodes[0].args[0])
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    body = Graph()
    copies = {place: body.placeholder(place.name) for place in inputs}
    for node in nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in results))
    body.lint()
    stretch = Stretch(body, [_is_step(node) for node in inputs], name)
    with graph.inserting_after(nodes[-1]):
        call = graph.call_function(stretch, tuple(inputs))  # type: ignore[arg-type]
    call.meta["example_value"] = tuple(example(node) for node in results)
    with graph.inserting_after(call):
        for place, node in enumerate(results):
            part = graph.call_function(operator.getitem, (call, place))
            part.meta["example_value"] = example(node)
            node.replace_all_uses_with(part, lambda user: user is not call and user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)


def _is_step(node: Node) -> bool:
    """Whether it is a tensor of the step. Constants and caches contain floats or bytes."""
    value = example(node)
    if not isinstance(value, Tensor):
        return False
    return node.op != "placeholder" or value.dtype in (torch.int32, torch.int64)
