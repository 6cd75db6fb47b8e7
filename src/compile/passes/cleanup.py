"""Remove calls that do nothing: conversions to the same dtype, API logging, inactive dropout.
Convert outer products that are written as matmuls (rotary angles) to multiplications."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..fx.nodes import calls_function, example
from ..fx.pass_context import PassContext

# Views of one tensor with equal arguments, repeated in every layer (cos, sin).
_REPEATED_VIEWS = frozenset({"unsqueeze", "squeeze", "transpose"})


def _is_noop_conversion(node: Node) -> bool:
    # For example a router's weight. After a cast it is not a constant, and the library multiplies.
    if node.op != "call_method" or node.target not in ("to", "type", "float", "type_as"):
        return False
    source = node.args[0]
    if not isinstance(source, Node) or node.kwargs.get("copy"):
        return False
    before, after = example(source), example(node)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return before.dtype == after.dtype and before.device == after.device


def _is_idle_dropout(node: Node) -> bool:
    if not calls_function(node, torch.nn.functional.dropout):
        return False
    arguments: list[Any] = [*node.args, *[None] * 3]
    probability = node.kwargs.get("p", arguments[1])
    training = node.kwargs.get("training", arguments[2])
    return training is False or probability == 0.0


def _is_outer_product(node: Node) -> bool:
    if not calls_function(node, operator.matmul, torch.matmul):
        return False
    left, right = (example(arg) if isinstance(arg, Node) else None for arg in node.args)
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return False
    # A sum of one term: broadcasting gives the same bits, and a compiler may fuse it.
    return left.dim() == right.dim() == 3 and left.shape[2] == 1 and right.shape[1] == 1


def cleanup(gm: GraphModule, _context: PassContext) -> int:
    """Rewrite; returns the number of nodes removed. Results are unchanged bit for bit."""
    graph, count = gm.graph, 0
    views: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        replacement: Node | None = None
        if _is_outer_product(node):
            node.target = operator.mul
            count += 1
            continue
        if _is_noop_conversion(node) or _is_idle_dropout(node):
            replacement = node.args[0]
        elif node.op == "call_method" and node.target in _REPEATED_VIEWS and not node.kwargs:
            replacement = views.setdefault((node.target, *node.args), node)
            if replacement is node:
                continue
        elif node.op == "call_function" and "_log_api_usage" in getattr(
            node.target, "__name__", ""
        ):
            graph.erase_node(node)
            count += 1
            continue
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
            count += 1
    return count
