"""Caches a token's latent vector in place of every head's key and value, where attention is latent.

What :mod:`.latent_pattern` recognises, behind it::

    kv_store(key, value, ..);   out = paged_attention(query [T, H, N + P], ..)

is rewritten to, with W_k ``[H, N, R]`` and W_v ``[H, R, V]`` views of W (:mod:`..mla.dispatch`)::

    store_latent(latent, rope, cache);   q = latent_query(query, W_k)
    out = head_values(attention(q, cache), W_v)

The attention has to be plain (no window, chunk, softcap, sinks, slopes), of one dtype, and the only
one over its caches: a graph that differs anywhere stays as it is. An indexer may choose what it
sees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...kernels.arguments import AttentionParams, LatentKV
from ...kernels.attention.spec import AttentionSpec
from ...kernels.mla import dispatch as mla
from ..fusions.latent_pattern import Latents, find_latents
from ..fx.fake_tensors import fake_of
from ..fx.nodes import (
    calls_op,
    dtype_of,
    erase_unused,
    example,
    positions,
    tensor_of,
    written_nodes,
)
from ..fx.pass_context import PassContext

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        caches: Any = attention.args[1:3]
        k_cache, v_cache = caches
        call = context.calls.get(k_cache.name)
        stores = [node for node in k_cache.users if node is not attention]
        if call is None or len(stores) != 1 or set(v_cache.users) != {attention, *stores}:
            continue
        (store,) = stores
        if not calls_op(store, "kv_store") or store.args[2:4] != (k_cache, v_cache):
            continue
        if order[store] > order[attention] or not _is_plain(context.specs[call], attention):
            continue
        latents = find_latents(store.args[0], store.args[1], context)
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
    args: Any = attention.args
    params = AttentionParams(*args[7:])._replace(indices=None)
    plain = AttentionParams(params.scale)
    masks = spec.window or spec.chunk or spec.softcap or spec.has_sinks or spec.alibi_slopes
    return params == plain and not masks and not attention.kwargs


def _fits(latents: Latents, spec: AttentionSpec, attention: Node) -> bool:
    """Are these the keys and values that the call attends to, and the latents fewer numbers?"""
    num_heads = latents.num_heads
    rank, rope_dim = (_sizes(node)[-1] for node in (latents.latent, latents.rope))
    expected = (num_heads, num_heads, latents.nope_dim + rope_dim, latents.v_dim)
    if (spec.num_q_heads, spec.num_kv_heads, spec.k_dim, spec.v_dim) != expected:
        return False
    query: Any = attention.args[0]
    kinds = {dtype_of(node) for node in (query, latents.latent, latents.rope, latents.weight)}
    if len(kinds) != 1 or not kinds <= set(_DTYPES):
        return False
    device = _fake(query).device
    return rank + rope_dim < spec.num_kv_elements and mla.is_served(rank, rope_dim, device)


def _fake(node: object) -> Tensor:
    tensor = tensor_of(node)
    assert tensor is not None  # its shape was looked at
    return tensor


def _sizes(node: object) -> Any:
    return _fake(node).shape


def _replace(
    graph: Graph, context: PassContext, store: Node, attention: Node, latents: Latents
) -> None:
    args: Any = attention.args
    query, k_cache, v_cache, *batch = args[:7]
    rank, rope_dim = (_sizes(node)[-1] for node in (latents.latent, latents.rope))
    to_latent, to_values = _weights(graph, context, latents)
    slots = store.args[4]
    with graph.inserting_before(store):
        graph.call_function(mla.store_latent, (latents.latent, latents.rope, k_cache, slots))
    with graph.inserting_before(attention):
        absorbed = graph.call_function(mla.latent_query, (query, to_latent))
        kv: Any = LatentKV(k_cache, *batch)
        indices = AttentionParams(*args[7:]).indices
        mixed = graph.call_function(mla.attention, (absorbed, kv, args[7], rank, indices))
        out = graph.call_function(mla.head_values, (mixed, to_values))
    num_tokens, num_heads, _ = _sizes(query)
    for node, width in ((absorbed, rank + rope_dim), (mixed, rank)):
        node.meta["example_value"] = _fake(query).new_empty((num_tokens, num_heads, width))
    out.meta["example_value"] = example(attention)
    num_blocks, page = _sizes(k_cache)[:2]
    k_cache.meta["example_value"] = _fake(k_cache).new_empty((num_blocks, page, 1, rank + rope_dim))
    attention.replace_all_uses_with(out)
    graph.erase_node(attention)
    graph.erase_node(store)
    erase_unused(graph, (*latents.nodes, v_cache))
    if not latents.weight.users:
        context.constants.pop(latents.weight.name)
        graph.erase_node(latents.weight)


def _weights(graph: Graph, context: PassContext, latents: Latents) -> tuple[Node, Node]:
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
