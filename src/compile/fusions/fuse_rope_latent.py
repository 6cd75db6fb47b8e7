"""Fuses norm and RoPE of latent attention into the calls that store latents and absorb queries.

What ``cache_latents`` has left, of neighbours rotated as ``write_as_real`` writes it::

    latent [1, T, R] ── RMSNorm ──┐
    rope [1, 1, T, P] ── rotate ──┴► store_latent       becomes norm_rope_store_latent
    query [1, H, T, N + P]: [N, rotated P] ► latent_query    becomes rope_latent_query

A model that rotates in halves keeps its calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...kernels.arguments import LatentInputs
from ...kernels.mla import dispatch as mla
from ..fx.nodes import (
    calls,
    cast_source,
    dtype_of,
    erase_unused,
    example,
    last_size,
    operands,
    shape_of,
    written_nodes,
)
from ..fx.pass_context import PassContext
from .latent_pattern import head_major, part_of
from .rms_norm import RmsNorm, rms_norms


@dataclass(frozen=True, slots=True)
class _Rotation:
    """``source [1, H, T, P]`` with its neighbours rotated, by ``cos`` and ``sin [1, T, P / 2]``."""

    source: Node
    cos: Node
    sin: Node
    nodes: tuple[Node, ...]


def fuse_rope_latent(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of calls. On a CPU bits are unchanged, on a GPU those of
    eager torch; Inductor may contract products and sums of the rotation."""
    graph, count = gm.graph, 0
    norms = {norm.output: norm for norm in rms_norms(gm)}
    written = written_nodes(graph)
    for node in list(graph.nodes):
        if node.target is mla.store_latent:
            count += _fuse_store(graph, node, norms, written)
        elif node.target is mla.latent_query:
            count += _fuse_query(graph, node, written)
    return count


def _fuse_store(graph: Graph, store: Node, norms: dict[Node, RmsNorm], written: set[Node]) -> bool:
    args: Any = store.args
    view, rope, cache, slots = args
    normed = view.args[0] if calls(view, "view", "reshape") else view
    rotation, norm = _rotation(rope), norms.get(normed)
    if rotation is None or norm is None or last_size(view) != last_size(normed):
        return False
    nodes = (*rotation.nodes, *norm.nodes, view)
    if not written.isdisjoint({rotation.source, rotation.cos, rotation.sin, norm.source, *nodes}):
        return False
    rotated = rotation.source, rotation.cos, rotation.sin
    inputs: list[Any] = [norm.source, *rotated, norm.weight, norm.eps, norm.form]
    with graph.inserting_before(store):
        graph.call_function(mla.norm_rope_store_latent, (LatentInputs(*inputs), cache, slots))
    graph.erase_node(store)
    erase_unused(graph, nodes)
    return True


def _fuse_query(graph: Graph, call: Node, written: set[Node]) -> bool:
    args: Any = call.args
    query, weight = args
    nodes: list[Node] = [query]
    joined = head_major(query, nodes)
    if not calls(joined, "cat") or (joined.args[1:], joined.kwargs) not in (
        ((), {"dim": -1}),
        ((-1,), {}),
    ):
        return False
    parts = joined.args[0]
    rotation = _rotation(parts[1]) if len(parts) == 2 else None
    if rotation is None:
        return False
    nodes += [joined, *rotation.nodes]
    left, right = part_of(parts[0], nodes), part_of(rotation.source, nodes)
    if left is None or right is None or left[0] is not right[0]:
        return False
    source = left[0]
    if left[1] != 0 or left[2] != right[1] or right[2] != last_size(source):
        return False
    if not written.isdisjoint({source, rotation.cos, rotation.sin, *nodes}):
        return False
    with graph.inserting_before(call):
        squeezed = graph.call_method("squeeze", (source, 0))
        heads = graph.call_method("transpose", (squeezed, 0, 1))
        new = graph.call_function(
            mla.rope_latent_query, (heads, rotation.cos, rotation.sin, weight)
        )
    new.meta["example_value"] = example(call)
    call.replace_all_uses_with(new)
    graph.erase_node(call)
    erase_unused(graph, nodes)
    return True


def _rotation(node: Any) -> _Rotation | None:
    """The rotation of neighbours that ``node [1, H, T, P]`` is."""
    flat = cast_source(node) or node
    if not calls(flat, "flatten") or flat.args[1:] not in ((3,), (-2,)) or flat.kwargs:
        return None
    stack = flat.args[0]
    if not calls(stack, "stack") or stack.args[1:] != (-1,) or stack.kwargs:
        return None
    real, imag = stack.args[0] if len(stack.args[0]) == 2 else (None, None)
    if not calls(real, "sub") or not calls(imag, "add"):
        return None
    products = [_factors(part, i) for part in (real, imag) for i in range(2)]
    if None in products:
        return None
    (a, c), (b, s), *crossed = products  # type: ignore[misc]
    if crossed != [(a, s), (b, c)]:
        return None
    pairs, cos, sin = _pairs(a, b), _table(c), _table(s)
    if pairs is None or cos is None or sin is None:
        return None
    wide: Any = pairs.args[0]
    source = cast_source(wide) or wide
    shape, width = shape_of(source), last_size(source)
    if shape != shape_of(node) or shape is None or len(shape) != 4 or shape[0] != "1":
        return None
    if dtype_of(source) != dtype_of(node) or width is None:
        return None
    table = ("1", shape[2], str(width // 2))
    if (shape_of(cos), shape_of(sin)) != (table, table):
        return None
    nodes = {node, flat, stack, real, imag, *real.args, *imag.args, a, b, c, s, pairs, wide}
    return _Rotation(source, cos, sin, tuple(nodes - {source}))


def _factors(node: Node, index: int) -> tuple[Node, Node] | None:
    """Both factors of operand ``index`` of ``node``, float32, if that is a product."""
    pair = operands(node)
    product = None if pair is None else pair[index]
    if not calls(product, "mul") or dtype_of(product) != torch.float32:
        return None
    return operands(product)


def _pairs(a: Node, b: Node) -> Node | None:
    """``x [.., P / 2, 2]``, float32, a reshape of ``[.., P]``, of which these are both parts."""
    pairs: Any = a.args[0]
    for i, part in enumerate((a, b)):
        if not calls(part, "getitem") or part.args != (pairs, (Ellipsis, i)):
            return None
    if not calls(pairs, "reshape", "view") or last_size(pairs) != 2:
        return None
    before, after = shape_of(pairs.args[0]), shape_of(pairs)
    if before is None or after is None or dtype_of(pairs) != torch.float32:
        return None
    found: Node = pairs
    return found if after[:-2] == before[:-1] else None


def _table(table: Node) -> Node | None:
    """Cosines or sines ``[1, T, P / 2]``, float32, of which ``table`` has a dimension of heads."""
    if not calls(table, "unsqueeze") or table.args[1:] != (1,) or table.kwargs:
        return None
    source: Node = table.args[0]
    return source if dtype_of(source) == torch.float32 else None
