"""Multi-head latent attention: caches a token's latent vector in place of every head's key and value.

What is recognised, with H heads, a latent of R elements and a rotated key of P, which heads share::

    latent [1, 1, T, R] ─ linear(W) ─ view [1, T, H, N + V] ─ transpose ─ split ─► k' [1, H, T, N]
                                                                            └────► value [1, H, T, V]
    rope [1, 1, T, P] ─ expand ─► [1, H, T, P];   key = [k', expanded rope]
    kv_store(key, value, ..);   out = paged_attention(query [T, H, N + P], ..)

The key is a ``cat``, or a ``new_empty`` with two slices that are copied into. Rewritten to::

    store_latent(latent, rope, cache);   q = latent_query(query, W_k)      W_k [H, N, R], W_v [H, R, V]:
    out = head_values(attention(q, cache), W_v)                            views of W

Every step is checked, and the attention has to be plain (no window, chunk, softcap, sinks, slopes):
a graph that differs anywhere stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...kernels.arguments import AttentionParams, LatentKV
from ...kernels.attention.spec import AttentionSpec
from ...kernels.mla import dispatch as mla
from ..fx.fake_tensors import fake_of
from ..fx.nodes import (
    calls,
    calls_op,
    dtype_of,
    erase_unused,
    example,
    is_linear,
    last_dim_slice,
    last_size,
    linear_operands,
    only_user,
    positions,
    shape_of,
    tensor_of,
    written_nodes,
)
from ..fx.stand_in import is_stand_in
from .context import PassContext

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Latents:
    """The keys and values of one call.

    Attributes:
        latent: ``[1, 1, T, R]`` or ``[1, T, R]``. rope: ``[1, 1, T, P]``.
        weight: the placeholder of W, ``[H * (N + V), R]``.
        num_heads, nope_dim, v_dim: H, N, V.
        nodes: what lies between those and the store.
    """

    latent: Node
    rope: Node
    weight: Node
    num_heads: int
    nope_dim: int
    v_dim: int
    nodes: tuple[Node, ...]


def cache_latents(gm: GraphModule, context: PassContext) -> int:
    """Rewrites the graph, and the specs of its calls in the context; returns the number of calls.

    Tokens stay those of the model, bits do not: products are summed in another order.
    """
    graph, count = gm.graph, 0
    if not context.caches_latents:
        return count
    written = written_nodes(graph)
    order = positions(graph)
    for attention in list(graph.nodes):
        if not calls_op(attention, "paged_attention"):
            continue
        k_cache, v_cache = attention.args[1:3]
        call = context.calls.get(k_cache.name)
        stores = [node for node in k_cache.users if node is not attention]
        if call is None or len(stores) != 1 or set(v_cache.users) != {attention, *stores}:
            continue
        (store,) = stores
        if not calls_op(store, "kv_store") or store.args[2:4] != (k_cache, v_cache):
            continue
        if order[store] > order[attention] or not _is_plain(context.specs[call], attention):
            continue
        latents = _latents(*store.args[:2], context)
        if latents is None or not _fits(latents, context.specs[call], attention):
            continue
        if not written.isdisjoint({latents.latent, latents.rope, attention.args[0]}):
            continue
        _replace(graph, context, store, attention, latents)
        rank = _sizes(latents.latent)[-1]
        context.specs[call] = replace(
            context.specs[call],
            num_kv_heads=1,
            k_dim=rank + _sizes(latents.rope)[-1],
            v_dim=rank,
            is_latent=True,
        )
        count += 1
    return count


def _is_plain(spec: AttentionSpec, attention: Node) -> bool:
    params: Any = AttentionParams(*attention.args[6:])
    plain = AttentionParams(params.scale)
    masks = spec.window or spec.chunk or spec.softcap or spec.has_sinks or spec.alibi_slopes
    return params == plain and not masks and not attention.kwargs


def _fits(latents: _Latents, spec: AttentionSpec, attention: Node) -> bool:
    """Are these the keys and values that the call attends to, and the latents fewer numbers?"""
    num_heads, (rank, rope_dim) = latents.num_heads, (
        _sizes(node)[-1] for node in (latents.latent, latents.rope)
    )
    expected = (num_heads, num_heads, latents.nope_dim + rope_dim, latents.v_dim)
    if (spec.num_q_heads, spec.num_kv_heads, spec.k_dim, spec.v_dim) != expected:
        return False
    query: Any = attention.args[0]
    kinds = {dtype_of(node) for node in (query, latents.latent, latents.rope, latents.weight)}
    if len(kinds) != 1 or not kinds <= set(_DTYPES):
        return False
    return rank + rope_dim < spec.num_kv_elements


def _latents(key: Any, value: Any, context: PassContext) -> _Latents | None:
    """Follow ``key`` and ``value [T, H, D]`` back to what they are made of."""
    nodes: list[Node] = []
    heads = [_head_major(node, nodes) for node in (key, value)]
    if heads[0] is None or heads[1] is None:
        return None
    parts = _joined(heads[0], nodes)
    value_part = _part(heads[1], nodes)
    if parts is None or value_part is None:
        return None
    nope_part = _part(parts[0], nodes)
    if nope_part is None or nope_part[0] is not value_part[0]:
        return None
    made, begin, nope_dim = nope_part
    width = last_size(made)
    if begin != 0 or value_part[1:] != (nope_dim, width) or width is None:
        return None
    rope = _expanded(parts[1], nodes)
    found = _projected(made, nodes, context)
    if rope is None or found is None:
        return None
    latent, weight, num_heads = found
    num_tokens = str(_shape(latent)[-2])
    if _shape(rope)[2] != num_tokens or _shape(parts[1])[1] != str(num_heads):
        return None
    nodes += [heads[0], heads[1], key, value]
    return _Latents(latent, rope, weight, num_heads, nope_dim, width - nope_dim, tuple(nodes))


def _head_major(node: object, nodes: list[Node]) -> Node | None:
    """``[1, H, T, D]`` of ``[T, H, D]``."""
    if not calls(node, "transpose") or node.args[1:] != (0, 1):
        return None
    squeezed = node.args[0]
    if not calls(squeezed, "squeeze") or squeezed.args[1:] != (0,):
        return None
    nodes += [node, squeezed]
    source: Node = squeezed.args[0]
    return source if len(_shape(source)) == 4 and _shape(source)[0] == "1" else None


def _joined(key: Node, nodes: list[Node]) -> tuple[Node, Node] | None:
    """The two tensors that lie side by side in the last dimension of ``key``."""
    if calls(key, "cat"):
        (parts, *rest), dims = key.args, key.kwargs
        if (rest, dims) not in (([], {"dim": -1}), ([-1], {}), ([], {"dim": 3}), ([3], {})):
            return None
        return tuple(parts) if len(parts) == 2 else None
    if not calls(key, "new_empty"):
        return None
    slices: dict[int, tuple[int, Node]] = {}
    readers = 0
    for user in key.users:
        cut = last_dim_slice(user)
        if cut is None:
            # Only one reader, which comes behind all copies.
            readers += 1
            continue
        copy = only_user(user)
        if not calls(copy, "copy_") or copy.users or copy.kwargs or len(copy.args) != 2:
            return None
        if copy.args[0] is not user or shape_of(copy.args[1]) != shape_of(user):
            return None
        slices[cut[1]] = (cut[2], copy.args[1])
        nodes += [user, copy]
    if readers != 1 or len(slices) != 2:
        return None
    last: Node = next(node for node in key.users if last_dim_slice(node) is None)
    order = positions(key.graph)
    if any(order[node] > order[last] for node in nodes if calls(node, "copy_")):
        return None
    (first, (middle, left)), (second, (end, right)) = sorted(
        slices.items(), key=lambda item: item[0]
    )
    is_whole = first == 0 and middle == second and end == last_size(key)
    return (left, right) if is_whole else None


def _part(node: Node, nodes: list[Node]) -> tuple[Node, int, int] | None:
    """(source, begin, end) of a part of ``source`` in its last dimension."""
    nodes.append(node)
    found = last_dim_slice(node)
    if found is not None or not calls(node, "getitem"):
        return found
    split, index = node.args
    if not calls(split, "split") or not isinstance(index, int):
        return None
    named = dict(zip(("source", "sizes", "dim"), split.args, strict=False)) | dict(split.kwargs)
    sizes: Any = named.pop("sizes", named.pop("split_size_or_sections", named.pop("split_size", 0)))
    source, dim = named.get("source"), named.get("dim", 0)
    if not isinstance(source, Node) or dim not in (-1, len(_shape(source)) - 1):
        return None
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, int) for size in sizes):
        return None
    nodes.append(split)
    begin = sum(sizes[:index])
    return source, begin, begin + sizes[index]


def _expanded(node: Node, nodes: list[Node]) -> Node | None:
    """What ``node [1, H, T, P]`` repeats for each head: ``[1, 1, T, P]``."""
    if not calls(node, "expand"):
        return None
    source = node.args[0]
    after, before = _shape(node), _shape(source)
    if len(after) != 4 or before != (after[0], "1", *after[2:]) or after[0] != "1":
        return None
    nodes.append(node)
    return source if last_size(source) is not None else None


def _projected(
    made: Node, nodes: list[Node], context: PassContext
) -> tuple[Node, Node, int] | None:
    """(latent, weight, H) of ``made [1, H, T, N + V]``, if a linear layer makes it."""
    if not calls(made, "transpose") or made.args[1:] not in ((1, 2), (2, 1)):
        return None
    view = made.args[0]
    if not calls(view, "view", "reshape") or not is_linear(view.args[0]):
        return None
    linear: Node = view.args[0]
    latent, weight, bias = linear_operands(linear)
    tensor = context.constant(weight)
    if bias is not None or tensor is None or tensor.dim() != 2 or not tensor.is_contiguous():
        return None
    # A weight in another format has no rows to multiply queries with.
    if is_stand_in(tensor) or context.weight_format(tensor) is not None:
        return None
    one, num_heads, num_tokens, width = _shape(made)
    shape = _shape(latent)
    if shape[-2:] != (num_tokens, str(tensor.shape[1])) or set(shape[:-2]) != {"1"} or one != "1":
        return None
    if not (num_heads.isdigit() and width.isdigit()):
        return None
    if int(num_heads) * int(width) != tensor.shape[0] or _shape(view)[1:3] != (num_tokens, num_heads):
        return None
    nodes += [made, view, linear]
    return latent, weight, int(num_heads)


def _shape(node: object) -> tuple[str, ...]:
    return shape_of(node) or ()


def _sizes(node: Node) -> Any:
    tensor = tensor_of(node)
    assert tensor is not None  # its shape was looked at
    return tensor.shape


def _replace(
    graph: Graph, context: PassContext, store: Node, attention: Node, latents: _Latents
) -> None:
    query, k_cache, v_cache, *batch = attention.args[:6]
    rank, rope_dim = (_sizes(node)[-1] for node in (latents.latent, latents.rope))
    to_latent, to_values = _weights(graph, context, latents)
    slots = store.args[4]
    with graph.inserting_before(store):
        graph.call_function(mla.store_latent, (latents.latent, latents.rope, k_cache, slots))
    with graph.inserting_before(attention):
        absorbed = graph.call_function(mla.latent_query, (query, to_latent))
        kv: Any = LatentKV(k_cache, *batch)
        mixed = graph.call_function(mla.attention, (absorbed, kv, attention.args[6], rank))
        out = graph.call_function(mla.head_values, (mixed, to_values))
    num_tokens, num_heads, _ = _sizes(query)
    for node, width in ((absorbed, rank + rope_dim), (mixed, rank)):
        node.meta["example_value"] = _new(query, (num_tokens, num_heads, width))
    out.meta["example_value"] = example(attention)
    num_blocks, page = _sizes(k_cache)[:2]
    k_cache.meta["example_value"] = _new(k_cache, (num_blocks, page, 1, rank + rope_dim))
    attention.replace_all_uses_with(out)
    graph.erase_node(attention)
    graph.erase_node(store)
    erase_unused(graph, (*latents.nodes, v_cache))
    if not latents.weight.users:
        context.constants.pop(latents.weight.name)
        graph.erase_node(latents.weight)


def _new(beside: Any, shape: tuple[Any, ...]) -> Tensor:
    tensor = tensor_of(beside)
    assert tensor is not None  # its shape was looked at
    return tensor.new_empty(shape)


def _weights(graph: Graph, context: PassContext, latents: _Latents) -> tuple[Node, Node]:
    """Placeholders for W_k ``[H, N, R]`` and W_v ``[H, R, V]``, which lie in W."""
    name = latents.weight.name
    # Normal tensors even when a capture runs in inference mode: the parameter may be trained.
    with torch.inference_mode(False):
        whole = context.constants[name].detach()
        per_head = whole.view(latents.num_heads, -1, whole.shape[1])
        views = {
            f"latent_query_{name}": per_head[:, : latents.nope_dim],
            f"head_values_{name}": per_head[:, latents.nope_dim :].transpose(1, 2),
        }
    fake: Any = example(latents.weight)
    made = []
    for view_name, view in views.items():
        with graph.inserting_before(latents.weight):
            node = graph.placeholder(view_name)
        node.meta["example_value"] = fake_of(view, fake)
        context.constants[node.name] = view
        made.append(node)
    return made[0], made[1]
