"""Fuses the cosines and sines of rotary embeddings into one call."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...kernels.fused.dispatch import rope_table
from ..fx.nodes import (
    calls,
    cast_source,
    dtype_of,
    erase_unused,
    example,
    only_user,
    operands,
    shape_of,
    tensor_of,
    written_nodes,
)
from .context import PassContext


def fuse_rope_cos_sin(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of pairs of tables. Results are unchanged bit for bit on a
    CPU.

    ::

        angles = (frequencies * positions.float()).transpose(1, 2)
        angles = cat((angles, angles), dim=-1)
        cos, sin = (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
    """
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    for node in list(graph.nodes):
        angles = _angles(node)
        if angles is None:
            continue
        frequencies, positions, product, between = angles
        tables = [_table(node, name) for name in ("cos", "sin")]
        cos, sin = tables
        if cos is None or sin is None or cos[1] != sin[1]:
            continue
        dtype = dtype_of(cos[0])
        nodes = [*between, node, *cos[2], *sin[2]]
        if dtype != dtype_of(sin[0]) or not written.isdisjoint({frequencies, positions, *nodes}):
            continue
        with graph.inserting_before(product):
            call = graph.call_function(rope_table, (frequencies, positions, cos[1], dtype))
            call.meta["example_value"] = (example(cos[0]), example(sin[0]))
            for place, (result, _, _) in enumerate((cos, sin)):
                part = graph.call_function(operator.getitem, (call, place))
                part.meta["example_value"] = example(result)
                result.replace_all_uses_with(part)
        erase_unused(graph, nodes)
        count += 1
    return count


def _angles(node: Node) -> tuple[Any, Any, Any, list[Node]] | None:
    """(frequencies, positions, their product, nodes from there on) if ``node`` is the angles."""
    if not calls(node, "cat") or len(node.args) not in (1, 2):
        return None
    parts = node.args[0]
    dim = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim")
    transposed = parts[0] if isinstance(parts, (tuple, list)) and len(parts) == 2 else None
    if dim not in (-1, 2) or transposed is None or parts[1] is not transposed:
        return None
    if not calls(transposed, "transpose") or transposed.args[1:] not in ((1, 2), (2, 1)):
        return None
    product = transposed.args[0]
    pair = operands(product) if calls(product, "mul") else None
    if pair is None or dtype_of(product) != torch.float32:
        return None
    for frequencies, wide in (pair, pair[::-1]):
        positions = cast_source(wide)
        if positions is None or not _fit(frequencies, wide, positions):
            continue
        return frequencies, positions, product, [wide, product, transposed]
    return None


def _fit(frequencies: Node, wide: Node, positions: Node) -> bool:
    """Are they float32 ``[1, H, 1]``, float32 and int64 ``[1, 1, T]``?"""
    if [dtype_of(n) for n in (frequencies, wide, positions)] != [
        *(torch.float32, torch.float32),
        torch.int64,
    ]:
        return False
    shape = shape_of(frequencies)
    tensor = tensor_of(frequencies)
    if tensor is None or tensor.dim() != 3 or not isinstance(tensor.shape[1], int):
        return False
    return shape == ("1", str(tensor.shape[1]), "1") and (shape_of(positions) or ())[:2] == (
        "1",
        "1",
    )


def _table(angles: Node, name: str) -> tuple[Node, float, list[Node]] | None:
    """(the table, its factor, nodes up to it), if one function of the angles is one."""
    found = [user for user in angles.users if calls(user, name) and user.args == (angles,)]
    if len(found) != 1:
        return None
    last, factor, nodes = found[0], 1.0, [found[0]]
    scaled: Any = only_user(last)
    if calls(scaled, "mul") and len(scaled.args) == 2 and scaled.args[0] is last:
        if not isinstance(scaled.args[1], (int, float)):
            return None
        last, factor = scaled, float(scaled.args[1])
        nodes.append(last)
    rounded = only_user(last)
    if rounded is not None and cast_source(rounded) is last:
        last = rounded
        nodes.append(last)
    return last, factor, nodes
