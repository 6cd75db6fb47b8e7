"""The functions that a graph with latent caches calls. ``passes.cache_latents`` inserts the calls.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): for each token the model
computes a latent vector c of R elements and one rotated key k' of P elements. Each head's key and
value are ``W_k[h] c`` and ``W_v[h] c``. In the absorbed form neither is ever computed:

    q[h] . (W_k[h] c) = (q[h] W_k[h]) . c        sum_j p_j W_v[h] c_j = W_v[h] (sum_j p_j c_j)

So queries are mapped into the latent space (:func:`latent_query`). Attention runs over the cached
vectors ``[c, k']`` as one KV head of R + P elements, whose values are their first R elements
(:func:`attention`). Its result is mapped to each head's values (:func:`head_values`). The scale of
the scores is the model's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import e4m3
from ..arguments import AttentionParams, LatentInputs, LatentKV
from ..attention import cpu_invariant, reference, reference_layout
from ..device import Gpu
from ..fused.dispatch import rms_norm_reference
from .head_matmul import HeadMatmulRecipe, head_matmul

_LARGEST_RANK, _LARGEST_ROPE = 512, 64
_FEWEST_SHARED_BYTES = 160 << 10  # for two tiles of vectors, and the queries


def is_served(rank: int, rope_dim: int, device: torch.device) -> bool:
    """Whether ``device`` supports attention over vectors of these sizes; only GPUs have limits."""
    if device.type != "cuda":  # "meta" in the graph of a restored model
        return True
    is_small = rank <= _LARGEST_RANK and 0 < rope_dim <= _LARGEST_ROPE
    return is_small and Gpu.of(device).num_shared_bytes >= _FEWEST_SHARED_BYTES


def store_latent(latent: Tensor, rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write ``[latent, rope]`` into the cache, in place.

    Args:
        latent: ``[.., T, R]``. rope: ``[.., T, P]``; leading dimensions of size 1.
        cache: ``[num_blocks + 1, block_size, 1, R + P]``, or rows of :mod:`..e4m3` on a CPU.
        slot_mapping: int64 ``[T]``.
    """
    latent = latent.reshape(-1, latent.shape[-1])
    rope = rope.reshape(len(latent), rope.shape[-1])  # empty in a layer without positions
    if cache.is_cuda:
        from .store_kernel import store_latent as store

        store(latent, rope, cache, slot_mapping)
        return
    vectors = torch.cat((latent, rope), -1)
    if e4m3.are_rows(cache):
        vectors = e4m3.encode_rows(vectors)
    cache.view(-1, cache.shape[3]).index_copy_(0, slot_mapping, vectors)


def norm_rope_store_latent(inputs: LatentInputs, cache: Tensor, slot_mapping: Tensor) -> None:
    """:func:`store_latent` for the normalised latent and the rotated key.

    Args:
        inputs: :class:`.arguments.LatentInputs`.
    """
    if cache.is_cuda:
        from .store_kernel import norm_rope_store_latent as store

        store(inputs, cache, slot_mapping)
        return
    latent = rms_norm_reference(inputs.latent, inputs.weight, inputs.eps, inputs.form)
    rope = inputs.rope.reshape(-1, 1, inputs.rope.shape[-1])
    store_latent(latent, rotate_pairs(rope, inputs.cos, inputs.sin), cache, slot_mapping)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [T, H, P]`` with adjacent elements (a, b) rotated to (a c - b s, a s + b c), in float32,
    rounded once; c and s come from ``cos`` and ``sin [1, T, P / 2]``."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)


def latent_query(query: Tensor, weight: Tensor, recipe: HeadMatmulRecipe | None = None) -> Tensor:
    """Queries in the latent space.

    Args:
        query: ``[T, H, N + P]``, the last P rotated. weight: W_k, ``[H, N, R]``, any strides.
        recipe: of the matmul on a CPU; None if bits may depend on T.

    Returns:
        ``[T, H, R + P]``.
    """
    if query.is_cuda:
        from .head_matmul_kernel import head_matmul as by_kernel

        return by_kernel(query, weight)
    num_absorbed = weight.shape[1]
    absorbed = head_matmul(query[..., :num_absorbed], weight, recipe)
    return torch.cat((absorbed, query[..., num_absorbed:]), -1)


def rope_latent_query(query: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    """:func:`latent_query` for queries whose last P elements :func:`rotate_pairs` rotates first."""
    if query.is_cuda:
        from .head_matmul_kernel import head_matmul as by_kernel

        return by_kernel(query, weight, (cos, sin))
    num_absorbed = weight.shape[1]
    rotated = rotate_pairs(query[..., num_absorbed:], cos, sin)
    return latent_query(torch.cat((query[..., :num_absorbed], rotated), -1), weight)


def attention(
    query: Tensor, kv: LatentKV, scale: float, rank: int, indices: Tensor | None = None
) -> Tensor:
    """Causal attention of packed rows over cached vectors, whose first ``rank`` elements are the
    values; rows and padding: see :mod:`..ops`.

    Args:
        query: ``[T, H, R + P]``. kv: the cache that :func:`store_latent` writes.
        scale: factor on the scores.
        indices: from :func:`..ops.index_topk` on the same device; None for all positions in view.

    Returns:
        ``[T, H, R]``.
    """
    if query.is_cuda:
        from .launch import attention as by_kernels

        return by_kernels(query, kv, scale, rank, indices=indices)
    params = AttentionParams(scale, indices=indices)
    if indices is not None:
        aligned = cpu_invariant.build_layout(*kv)
        return cpu_invariant.attend(query, kv.cache, None, aligned, params, rank)
    layout = reference_layout.build_layout(query, *kv)
    return reference.attend(query, kv.cache, None, layout, params, rank)


def head_values(out: Tensor, weight: Tensor, recipe: HeadMatmulRecipe | None = None) -> Tensor:
    """``[T, H, V]``, contiguous, from ``out [T, H, R]`` and W_v ``[H, R, V]`` of any strides.

    Args:
        recipe: see :func:`latent_query`.
    """
    if out.is_cuda:
        from .head_matmul_kernel import head_matmul as by_kernel

        return by_kernel(out, weight)
    return head_matmul(out, weight, recipe).contiguous()
