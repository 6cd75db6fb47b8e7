"""The custom ops that a captured graph calls: ``pagespec::kv_store`` and
``pagespec::paged_attention``. A model with indexers also has ``pagespec::index_topk``, and a
sharded model ``pagespec::all_reduce`` and ``pagespec::all_gather``.

Shapes: T tokens of B rows are back to back. Row b owns the tokens ``[query_starts[b],
query_starts[b + 1])``. Tokens from ``query_starts[B]`` on are padding. Caches are contiguous
``[num_blocks + 1, block_size, Hkv, D]``. The last block is the *null block*: the slots of padding
tokens point into it. slot = block id * block_size + offset.

A step stores before it attends: ``context_lens[b]`` includes the row's new tokens. The j-th query
of a row with n queries is at position ``context_lens[b] - n + j``. It attends to positions up to
its own: to the last ``window`` of them if ``window > 0``, to those of its own chunk of ``chunk``
positions if ``chunk > 0``, and of these only to the ones in ``indices`` if given. The outputs of
padding tokens are zeros.

Called directly, the ops run the Triton kernels for GPU tensors that these kernels support, and the
reference for all others. An engine replaces the ops in its graph by the functions of an
:class:`.attention.backend.AttentionBackend`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import e4m3
from .arguments import AttentionParams, PagedKV
from .attention import cpu_invariant, reference
from .attention.backend import triton_limit
from .collectives.communicator import current_communicator
from .custom_op import custom_op
from .fused import dispatch as fused
from .sparse import indexer


@custom_op(mutates=("k_cache", "v_cache"), fake=lambda *_: None)
def kv_store(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write new keys and values into the caches, in place.

    Args:
        key: ``[T, Hkv, Dk]``. value: ``[T, Hkv, Dv]``.
        k_cache: ``[num_blocks + 1, block_size, Hkv, Dk]``. v_cache: the same with Dv.
        slot_mapping: int64 ``[T]``.
    """
    store = fused.kv_store
    if key.is_cuda:
        widest = max(key.shape[2], value.shape[2])
        if triton_limit(key.device, key.dtype, widest, k_cache.shape[1]) is None:
            from .fused import kv_store as kernel

            store = kernel.kv_store
    store(key, value, k_cache, v_cache, slot_mapping)


@custom_op(fake=lambda query, kv, _: query.new_empty(*query.shape[:2], kv.v_cache.shape[3]))
def paged_attention(query: Tensor, kv: PagedKV, params: AttentionParams) -> Tensor:
    """Causal attention of packed rows over paged caches.

    Args:
        query: ``[T, Hq, Dk]``, Hq a multiple of Hkv.

    Returns:
        ``[T, Hq, Dv]``.
    """
    if not query.is_cuda:
        by = reference if params.indices is None else cpu_invariant
        return by.paged_attention(query, kv, params)
    if params.indices is not None:
        from .sparse.chosen import chosen_attention

        return chosen_attention(query, kv, params)
    widest = max(query.shape[2], e4m3.head_dim(kv.v_cache))
    limit = triton_limit(query.device, query.dtype, widest, kv.k_cache.shape[1])
    if limit is None and not params.is_reference_only:
        from .attention import launch

        return launch.paged_attention(query, kv, params)
    return reference.paged_attention(query, kv, params)


@custom_op(
    mutates=("cache",),
    fake=lambda query, *rest: query.new_empty(query.shape[0], rest[-1], dtype=torch.int32),
)
def index_topk(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    scale: float,
    num_chosen: int,
) -> Tensor:
    """Write new index keys into the cache, in place, and select the positions with the highest
    scores for each query (:mod:`.sparse.indexer`).

    Args:
        query: ``[T, H, D]``. key: ``[T, D]``. weights: ``[T, H]``.
        cache: ``[num_blocks + 1, block_size, 1, D]``. slot_mapping: int64 ``[T]``.
        query_starts, context_lens, block_tables, table_rows: see :class:`.arguments.PagedKV`.
        scale: factor on the dot products. num_chosen: K.

    Returns:
        int32 ``[T, K]``, unordered. A query that sees fewer than K positions has -1 after its last
        one.
    """
    rows = (query_starts, context_lens, block_tables, table_rows)
    if query.is_cuda:
        from .sparse.index_kernels import index_topk as kernel

        return kernel(query, key, weights, cache, slot_mapping, *rows, scale, num_chosen)
    layout = cpu_invariant.build_layout(cache, *rows)
    return indexer.index_topk(query, key, weights, cache, slot_mapping, layout, scale, num_chosen)


@custom_op(fake=lambda partial: torch.empty_like(partial, memory_format=torch.contiguous_format))
def all_reduce(partial: Tensor) -> Tensor:
    """The sum of ``partial`` over all ranks, in rank order (:mod:`.collectives.communicator`)."""
    return current_communicator().all_reduce(partial)


@custom_op(fake=lambda part, sizes: part.new_empty(*part.shape[:-1], sum(sizes)))
def all_gather(part: Tensor, sizes: Sequence[int]) -> Tensor:
    """The ranks' shards concatenated along the last dimension; rank r's has ``sizes[r]``
    elements."""
    return current_communicator().all_gather(part, sizes)
