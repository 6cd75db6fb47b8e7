"""Paged attention and KV store in plain torch: the CPU implementation, and the reference for tests.

The work of a step has two parts. An :class:`.reference_layout.AttentionLayout` has everything that
depends only on the batch: the cache slots of every row, and the masks. It is the same for all
layers with the same window, so a graph pass hoists it out of the layers. :func:`attend` computes
what depends on the layer. :func:`paged_attention` does both and implements the custom op.

Only slots of settled positions are read: gathers are clamped to the row's last position and masked
there. So the contents of unused slots (including NaN) cannot leak.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import e4m3
from ..arguments import AttentionParams, PagedKV
from .reference_layout import AttentionLayout, QueryTile, build_layout


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    layout: AttentionLayout,
    params: AttentionParams,
    v_dim: int = 0,
) -> Tensor:
    """Attention of ``query [T, Hq, Dk]`` over the slots of ``layout``; returns ``[T, Hq, Dv]``.

    Outputs of tokens that belong to no row (padding) are zeros.

    Args:
        v_cache: None if the values are the first ``v_dim`` elements of the keys.
    """
    num_kv_heads, scale = k_cache.shape[2], params.scale
    if v_cache is not None:
        v_dim = e4m3.head_dim(v_cache)
    num_q_heads, k_dim = query.shape[1:]
    group_size = num_q_heads // num_kv_heads
    plain = params.softcap == 0 and params.sinks is None and layout.slopes is None
    out = query.new_empty(query.shape[0], num_q_heads, v_dim)
    out[layout.num_tokens :] = 0

    def gathered(slots: Tensor) -> tuple[Tensor, Tensor]:
        keys = _gathered(k_cache, slots, query.dtype)
        if v_cache is None:
            return keys, keys[..., :v_dim]
        return keys, _gathered(v_cache, slots, query.dtype)

    for group in layout.groups:
        rows = group.num_rows
        # The query heads of a KV head take the place of several queries, so no head of K or V is
        # copied or expanded.
        q = query[group.tokens].reshape(rows, num_kv_heads, group_size, k_dim)
        keys, values = gathered(group.slots)
        k = keys.view(rows, -1, num_kv_heads, k_dim).transpose(1, 2)
        v = values.unflatten(0, (rows, -1)).transpose(1, 2)
        if plain:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=group.bias, scale=scale)
        else:
            bias = group.bias
            if layout.slopes is not None and bias is not None:
                bias = bias.view(rows, num_kv_heads, group_size, -1)
            o = _float32_attention(q, k, v, bias, params)
        out[group.tokens] = o.reshape(rows, num_q_heads, v_dim)

    for tile in layout.tiles:
        q = query[tile.begin : tile.end].transpose(0, 1).unsqueeze(0)
        k, v = (x.unsqueeze(0).transpose(1, 2) for x in gathered(tile.slots))
        if plain:
            mask, is_grouped = tile.mask, group_size > 1
            o = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
            )
        else:
            o = _float32_tile(q, k, v, tile, layout.slopes, params)
        out[tile.begin : tile.end] = o[0].transpose(0, 1)
    return out


def _gathered(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """``[len(slots), Hkv, D]``."""
    if e4m3.are_planes(cache):
        return e4m3.load_planes(cache, slots).to(dtype)
    num_heads, dim = cache.shape[2:]
    found = cache.view(-1, num_heads * dim).index_select(0, slots).view(-1, num_heads, dim)
    return e4m3.decode_rows(found).to(dtype) if e4m3.are_rows(cache) else found


def _float32_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: QueryTile,
    slopes: Tensor | None,
    params: AttentionParams,
) -> Tensor:
    """:func:`_float32_attention` for ``q [1, Hq, n, Dk]``; returns ``[1, Hq, n, Dv]``."""
    _, num_q_heads, num_queries, k_dim = q.shape
    num_kv_heads = k.shape[1]
    group_size = num_q_heads // num_kv_heads
    mask = tile.mask
    if mask is None:
        mask = torch.ones(num_queries, k.shape[2], dtype=torch.bool, device=q.device).tril_()
    bias = torch.zeros(mask.shape, dtype=torch.float32, device=q.device)
    bias.masked_fill_(~mask, float("-inf"))
    # [1, Hkv, n * G, D]: queries outer, heads of the group inner, as the sinks are arranged.
    q = q.view(num_kv_heads, group_size, num_queries, k_dim).transpose(1, 2)
    q = q.reshape(1, num_kv_heads, num_queries * group_size, k_dim)
    bias = bias.repeat_interleave(group_size, 0)
    if slopes is not None:
        # The last key is at the position of the last query.
        at = torch.arange(mask.shape[1], device=q.device)
        distances = (at - at[-num_queries:, None]).float().repeat_interleave(group_size, 0)
        per_row = slopes.view(num_kv_heads, 1, group_size).expand(-1, num_queries, -1)
        bias = bias + per_row.reshape(num_kv_heads, -1, 1) * distances
    o = _float32_attention(q, k, v, bias, params)
    o = o.view(num_kv_heads, num_queries, group_size, -1).transpose(1, 2)
    return o.reshape(1, num_q_heads, num_queries, -1)


def _float32_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attention as separate operations, in float32: ``q [R, Hkv, Q * G, Dk]``, heads of a group
    innermost.

    ``softcap`` c maps a score s to c * tanh(s / c) (Gemma 2). A sink is one more logit per query
    head, which takes probability and contributes no value (gpt-oss).
    """
    softcap, sinks = params.softcap, params.sinks
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * params.scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.float()
    if sinks is None:
        probabilities = scores.softmax(-1)
    else:
        per_head = sinks.float().view(1, k.shape[1], -1)
        repeats = q.shape[2] // per_head.shape[2]
        column = per_head.repeat(1, 1, repeats).unsqueeze(-1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.matmul(probabilities, v.float()).to(v.dtype)


def paged_attention(query: Tensor, kv: PagedKV, params: AttentionParams) -> Tensor:
    """Layout and attention in one; shapes as in :mod:`..ops`."""
    masks = params.window, params.chunk, params.alibi_slopes
    layout = build_layout(query, kv.k_cache, *kv[2:], *masks)
    return attend(query, kv.k_cache, kv.v_cache, layout, params)
