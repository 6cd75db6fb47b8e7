"""Fuses norm, RoPE and KV store, from the q, k, v projections to the cache, into one call.

::

    q [1, Hq, T, D]  ── (norm) ── rotate ── squeeze, transpose ──► paged_attention
    k [1, Hkv, T, D] ── (norm) ── rotate ── squeeze, transpose ──► kv_store ▲ (same caches)
    v ─────────────────────────────────────────────────────────────┘

Two spellings of the rotation are known, of the first R of D elements in halves::

    x * cos + cat((-x[..., R/2:], x[..., :R/2])) * sin                     cos [.., R]
    cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin)), x1, x2 the halves      cos [.., R / 2]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ...kernels.arguments import RopeInputs
from ...kernels.fused import dispatch as fused
from ..fx.nodes import (
    calls,
    calls_op,
    dtype_of,
    erase_unused,
    example,
    last_dim_slice,
    last_size,
    operands,
    positions,
    tensor_of,
    written_nodes,
)
from ..fx.pass_context import PassContext
from .rms_norm import RmsNorm, rms_norms


@dataclass(frozen=True, slots=True)
class _Rotation:
    """``source [1, H, T, D]`` rotated in its first ``rotary_dim`` elements."""

    source: Node
    cos: Node  # [1, T, R or R / 2]
    sin: Node
    rotary_dim: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class _Heads:
    """How one operand of attention comes about, back to ``source``.

    ``source`` is ``[1, T, H, D]`` if ``is_token_major``, else ``[1, H, T, D]``.
    """

    source: Node
    is_token_major: bool
    rotation: _Rotation
    norm: RmsNorm | None
    nodes: tuple[Node, ...]


def fuse_rope_store(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of ``kv_store`` calls replaced. Results and caches are
    unchanged bit for bit on a CPU."""
    graph = gm.graph
    norms = {norm.output: norm for norm in rms_norms(gm)}
    written = written_nodes(graph)
    order = positions(graph)
    count = 0
    for store in list(graph.nodes):
        if not calls_op(store, "kv_store"):
            continue
        attention = _attention_after(store, order)
        if attention is None:
            continue
        key, query = _heads(store.args[0], norms), _heads(attention.args[0], norms)
        if key is None or query is None or not _agree(query, key):
            continue
        value = store.args[1]
        sources = {query.source, key.source, value, key.rotation.cos, key.rotation.sin}
        if any(order[node] > order[store] for node in sources):
            continue
        if not written.isdisjoint({*sources, *query.nodes, *key.nodes}):
            continue
        _replace(graph, store, attention, query, key)
        count += 1
    return count


def _attention_after(store: Node, order: dict[Node, int]) -> Node | None:
    """The first attention over the caches ``store`` writes, if it comes later than the store."""
    k_cache: Any = store.args[2]
    v_cache = store.args[3]
    found = [
        node
        for node in k_cache.users
        if calls_op(node, "paged_attention") and node.args[1:3] == (k_cache, v_cache)
    ]
    first = min(found, key=order.__getitem__, default=None)
    return first if first is not None and order[first] > order[store] else None


def _heads(node: object, norms: dict[Node, RmsNorm]) -> _Heads | None:
    """Follow ``node [T, H, D]`` back through the rotation and, if there is one, the norm."""
    if not calls(node, "transpose") or node.args[1:] != (0, 1):
        return None
    squeezed = node.args[0]
    if not calls(squeezed, "squeeze") or squeezed.args[1:] != (0,):
        return None
    rotation = _rotation(squeezed.args[0])
    if rotation is None:
        return None
    nodes = [node, squeezed, *rotation.nodes]
    source: Any = rotation.source
    is_token_major = False
    norm: RmsNorm | None = None
    if _is_head_transpose(source):
        nodes.append(source)
        source, is_token_major = source.args[0], True
    if source in norms:
        norm = norms[source]
        nodes += norm.nodes
        source = norm.source
        if not is_token_major and _is_head_transpose(source):
            nodes.append(source)
            source, is_token_major = source.args[0], True
    return _Heads(source, is_token_major, rotation, norm, tuple(nodes))


def _is_head_transpose(node: Node) -> bool:
    return calls(node, "transpose") and node.args[1:] in ((1, 2), (2, 1))


def _agree(query: _Heads, key: _Heads) -> bool:
    """Can one call serve both?"""
    a, b = query.rotation, key.rotation
    if (a.cos, a.sin, a.rotary_dim) != (b.cos, b.sin, b.rotary_dim):
        return False
    if (query.norm is None) != (key.norm is None):
        return False
    if query.norm is not None and key.norm is not None:
        q_kind, k_kind = (query.norm.eps, query.norm.form), (key.norm.eps, key.norm.form)
        if q_kind != k_kind:
            return False
    return dtype_of(a.source) == dtype_of(b.source) and last_size(a.source) == last_size(b.source)


def _rotation(node: Any) -> _Rotation | None:
    """The rotation that ``node [1, H, T, D]`` is, of all of D or of its beginning."""
    whole = _full_rotation(node)
    if whole is not None:
        return whole
    parts = _concatenated(node)
    if parts is None:
        return None
    inner, rest = _full_rotation(parts[0]), last_dim_slice(parts[1])
    if inner is None or rest is None:
        return None
    first = last_dim_slice(inner.source)
    if first is None or first[0] is not rest[0]:
        return None
    source, width = first[0], inner.rotary_dim
    if first[1:] != (0, width) or rest[1:] != (width, last_size(source)):
        return None
    nodes = (*inner.nodes, inner.source, parts[1], node)
    return _Rotation(source, inner.cos, inner.sin, width, nodes)


def _full_rotation(node: Any) -> _Rotation | None:
    if calls(node, "add"):
        return _rotation_by_negation(node)
    parts = _concatenated(node)
    return None if parts is None else _rotation_of_halves(node, *parts)


def _rotation_by_negation(node: Node) -> _Rotation | None:
    """``x * cos + cat((-x[..., R/2:], x[..., :R/2])) * sin``."""
    straight, crossed = _factors(node, 0), _factors(node, 1)
    if straight is None or crossed is None:
        return None
    source, half_swapped = straight[0], crossed[0]
    parts = _concatenated(half_swapped)
    if parts is None or not calls(parts[0], "neg"):
        return None
    negated = parts[0].args[0]
    second, first = last_dim_slice(negated), last_dim_slice(parts[1])
    width = last_size(source)
    if width is None or width % 2:
        return None
    if second != (source, width // 2, width) or first != (source, 0, width // 2):
        return None
    nodes = (negated, parts[1], parts[0], half_swapped, *node.args, node)
    return _checked(source, straight[1], crossed[1], width, width, nodes)


def _rotation_of_halves(node: Node, left: Node, right: Node) -> _Rotation | None:
    """``cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin))`` with the halves x1, x2 of x."""
    if not calls(left, "sub") or not calls(right, "add"):
        return None
    straight, crossed = _factors(left, 0), _factors(left, 1)
    if straight is None or crossed is None:
        return None
    (first, cos), (second, sin) = straight, crossed
    if _factors(right, 0) != (second, cos) or _factors(right, 1) != (first, sin):
        return None
    begin, end = last_dim_slice(first), last_dim_slice(second)
    if begin is None or end is None or begin[0] is not end[0]:
        return None
    source, width = begin[0], last_size(begin[0])
    if width is None or width % 2:
        return None
    if begin[1:] != (0, width // 2) or end[1:] != (width // 2, width):
        return None
    chunks = [half.args[0] for half in (first, second) if half.args[0] is not source]
    nodes = (*chunks, first, second, *left.args, *right.args, left, right, node)
    return _checked(source, cos, sin, width, width // 2, nodes)


def _checked(
    source: Node, cos4: Node, sin4: Node, width: int, table_width: int, nodes: tuple[object, ...]
) -> _Rotation | None:
    """The rotation if cos and sin ``[1, 1, T, width of table]`` are one for all heads."""
    tables = []
    for table in (cos4, sin4):
        if not calls(table, "unsqueeze") or table.args[1:] != (1,) or table.kwargs:
            return None
        before = tensor_of(table.args[0])
        if before is None or before.dim() != 3 or str(before.shape[0]) != "1":
            return None
        if last_size(table) != table_width or before.dtype != dtype_of(source):
            return None
        tables.append(table.args[0])
    heads = tensor_of(source)
    if heads is None or heads.dim() != 4 or str(heads.shape[0]) != "1":
        return None
    kept = tuple(node for node in nodes if isinstance(node, Node))
    return _Rotation(source, tables[0], tables[1], width, kept)


def _concatenated(node: object) -> tuple[Node, Node] | None:
    """The two tensors ``node`` puts side by side in the last dim."""
    if not calls(node, "cat") or node.kwargs != {"dim": -1}:
        return None
    parts = node.args[0]
    return tuple(parts) if isinstance(parts, tuple | list) and len(parts) == 2 else None


def _factors(node: Node, index: int) -> tuple[Node, Node] | None:
    """The operands of operand ``index`` of ``node``, if both are products or sums of two nodes."""
    pair = operands(node)
    return operands(pair[index]) if pair is not None and calls(pair[index], "mul") else None


def _replace(graph: Graph, store: Node, attention: Node, query: _Heads, key: _Heads) -> None:
    _, value, k_cache, v_cache, slots = store.args
    rotation, norm = key.rotation, key.norm
    old_query: Any = attention.args[0]
    with graph.inserting_before(store):
        views = []
        for heads in (query, key):
            view = graph.call_method("squeeze", (heads.source, 0))
            if not heads.is_token_major:
                view = graph.call_method("transpose", (view, 0, 1))
            views.append(view)
        inputs: list[Any] = [
            *views,
            value,
            rotation.cos,
            rotation.sin,
            rotation.rotary_dim,
            None if query.norm is None else query.norm.weight,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            "rounded" if norm is None else norm.form,
        ]
        call = graph.call_function(
            fused.norm_rope_store,
            (
                RopeInputs(*inputs),
                k_cache,
                v_cache,
                slots,
            ),
        )
    call.meta["example_value"] = example(old_query)
    attention.update_arg(0, call)
    graph.erase_node(store)
    erase_unused(graph, (*query.nodes, *key.nodes))
