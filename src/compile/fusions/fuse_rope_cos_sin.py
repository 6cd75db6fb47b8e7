"""Fuses the cosines and sines of rotary embeddings into one call."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

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
from ..fx.pass_context import PassContext


def fuse_rope_cos_sin(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of pairs of tables. Results are unchanged bit for bit on a
    CPU.

    ::

        angles = (frequencies * positions.float()).transpose(1, 2)  # columns of frequencies
        angles = positions.float() * frequencies  # or rows of them, in later transformers
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
            frequencies, positions = _as_columns(graph, frequencies, positions)
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
    half = parts[0] if isinstance(parts, (tuple, list)) and len(parts) == 2 else None
    if dim not in (-1, 2) or not isinstance(half, Node) or parts[1] is not half:
        return None
    between = []
    product: Any = half
    if calls(half, "transpose") and half.args[1:] in ((1, 2), (2, 1)):
        product = half.args[0]
        between = [half]
    pair = operands(product) if calls(product, "mul") else None
    if pair is None or dtype_of(product) != torch.float32:
        return None
    fit = _fit_columns if between else _fit_rows
    for frequencies, wide in (pair, pair[::-1]):
        positions = cast_source(wide)
        kinds = [dtype_of(n) for n in (frequencies, wide, positions)]
        if kinds == [torch.float32, torch.float32, torch.int64] and fit(frequencies, positions):
            return frequencies, positions, product, [wide, product, *between]
    return None


def _fit_columns(frequencies: Any, positions: Any) -> bool:
    """Are they ``[1, H, 1]`` and ``[1, 1, T]``?"""
    tensor = tensor_of(frequencies)
    if tensor is None or tensor.dim() != 3 or not isinstance(tensor.shape[1], int):
        return False
    expected = "1", str(tensor.shape[1]), "1"
    return shape_of(frequencies) == expected and (shape_of(positions) or ())[:2] == ("1", "1")


def _fit_rows(frequencies: Any, positions: Any) -> bool:
    """Are they ``[H]`` and ``[1, T, 1]``?"""
    tensor = tensor_of(frequencies)
    if tensor is None or tensor.dim() != 1 or not isinstance(tensor.shape[0], int):
        return False
    shape = shape_of(positions) or ()
    return len(shape) == 3 and (shape[0], shape[2]) == ("1", "1")


def _as_columns(graph: Graph, frequencies: Node, positions: Node) -> tuple[Node, Node]:
    """The operands as ``[1, H, 1]`` and ``[1, 1, T]``."""
    of_frequencies, of_positions = tensor_of(frequencies), tensor_of(positions)
    assert of_frequencies is not None
    assert of_positions is not None
    if of_frequencies.dim() == 3:
        return frequencies, positions
    column = graph.call_method("reshape", (frequencies, 1, -1, 1))
    column.meta["example_value"] = of_frequencies.reshape(1, -1, 1)
    row = graph.call_method("transpose", (positions, 1, 2))
    row.meta["example_value"] = of_positions.transpose(1, 2)
    return column, row


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
