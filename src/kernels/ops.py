"""The custom ops a captured graph calls: ``pagespec::kv_store``, ``pagespec::paged_attention``, of
a model with indexers ``pagespec::index_topk`` and in a sharded model ``pagespec::all_reduce`` and
``pagespec::all_gather``.

Shapes: T tokens of B rows lie back to back; row b owns tokens ``[query_starts[b],
query_starts[b + 1])``; tokens from ``query_starts[B]`` on are padding. Caches are contiguous
``[num_blocks + 1, block_size, Hkv, D]``. The last block is the *null block*, into which the slots
of padding tokens point. slot = block id * block_size + offset.

A step stores before it attends: ``context_lens[b]`` counts the row's own new tokens. The j-th
query of a row with n queries sits at position ``context_lens[b] - n + j`` and sees positions up to
its own, the last ``window`` of them if ``window > 0``, those of its own chunk of ``chunk``
positions if ``chunk > 0``, of these the ones in ``indices`` if given. Padding tokens yield zeros.

Called as they are, the ops run the Triton kernels for tensors on a GPU that those can serve, and
the reference for all others. An engine replaces them in its graph by the functions of a
:class:`.attention.backend.AttentionBackend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import e4m3
from .arguments import AttentionParams, PagedKV
from .attention import cpu_invariant, indexer, reference
from .attention.backend import triton_limit
from .collectives.communicator import current_communicator
from .fused import dispatch as fused

# Registration in torch's dispatcher is process wide by nature; this object keeps it alive.
# The bare Library rather than torch.library.custom_op: the latter's wrappers cost about 20 us a
# call, 60 calls a step.
_LIBRARY = torch.library.Library("pagespec", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)

_LIBRARY.define(
    "kv_store(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping) -> ()",
    tags=_TAGS,
)
_LIBRARY.define(
    "paged_attention(Tensor query, Tensor k_cache, Tensor v_cache, Tensor query_starts, "
    "Tensor context_lens, Tensor block_tables, Tensor table_rows, float scale, int window, "
    "float softcap, Tensor? sinks, int chunk=0, float[]? alibi_slopes=None, "
    "Tensor? indices=None) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define(
    "index_topk(Tensor query, Tensor key, Tensor weights, Tensor(a!) cache, Tensor slot_mapping, "
    "Tensor query_starts, Tensor context_lens, Tensor block_tables, Tensor table_rows, "
    "float scale, int num_chosen) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define("all_reduce(Tensor partial) -> Tensor", tags=_TAGS)
_LIBRARY.define("all_gather(Tensor part, int[] sizes) -> Tensor", tags=_TAGS)


def _paged_attention(query: Tensor, *rest: Any) -> Tensor:
    kv, params = PagedKV(*rest[:6]), AttentionParams(*rest[6:])
    by = reference if params.indices is None else cpu_invariant
    return by.paged_attention(query, kv, params)


def _index_topk(
    query: Tensor, key: Tensor, weights: Tensor, cache: Tensor, slots: Tensor, *rest: Any
) -> Tensor:
    starts, lens, tables, table_rows, scale, num_chosen = rest
    layout = cpu_invariant.build_layout(starts, lens, tables, table_rows, cache.shape[1], 0)
    return indexer.index_topk(query, key, weights, cache, slots, layout, scale, num_chosen)


_LIBRARY.impl("index_topk", _index_topk, "CPU")
_LIBRARY.impl("kv_store", fused.kv_store, "CompositeExplicitAutograd")
_LIBRARY.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")


def _kv_store_cuda(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    widest = max(key.shape[2], value.shape[2])
    store = fused.kv_store
    if triton_limit(key.device, key.dtype, widest, k_cache.shape[1]) is None:
        from .fused import kv_store

        store = kv_store.kv_store
    store(key, value, k_cache, v_cache, slot_mapping)


def _paged_attention_cuda(query: Tensor, *rest: Any) -> Tensor:
    kv, params = PagedKV(*rest[:6]), AttentionParams(*rest[6:])
    if params.indices is not None:
        from .attention.chosen import chosen_attention

        return chosen_attention(query, kv, params)
    widest = max(query.shape[2], e4m3.head_dim(kv.v_cache))
    limit = triton_limit(query.device, query.dtype, widest, kv.k_cache.shape[1])
    if limit is None and not params.is_reference_only:
        from .attention import launch

        return launch.paged_attention(query, kv, params)
    return reference.paged_attention(query, kv, params)


def _index_topk_cuda(query: Tensor, *rest: Any) -> Tensor:
    from .attention import index_launch

    return index_launch.index_topk(query, *rest)


_LIBRARY.impl("index_topk", _index_topk_cuda, "CUDA")
_LIBRARY.impl("kv_store", _kv_store_cuda, "CUDA")
_LIBRARY.impl("paged_attention", _paged_attention_cuda, "CUDA")


_LIBRARY.impl(
    "all_reduce",
    lambda partial: current_communicator().all_reduce(partial),
    "CompositeExplicitAutograd",
)
_LIBRARY.impl(
    "all_gather",
    lambda part, sizes: current_communicator().all_gather(part, sizes),
    "CompositeExplicitAutograd",
)


@torch.library.register_fake("pagespec::all_reduce", lib=_LIBRARY)
def _all_reduce_fake(partial: Tensor) -> Tensor:
    return torch.empty_like(partial, memory_format=torch.contiguous_format)


@torch.library.register_fake("pagespec::all_gather", lib=_LIBRARY)
def _all_gather_fake(part: Tensor, sizes: list[int]) -> Tensor:
    return part.new_empty(*part.shape[:-1], sum(sizes))


@torch.library.register_fake("pagespec::kv_store", lib=_LIBRARY)
def _kv_store_fake(*_: object) -> None:
    return None


@torch.library.register_fake("pagespec::paged_attention", lib=_LIBRARY)
def _paged_attention_fake(query: Tensor, _k_cache: Tensor, v_cache: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], v_cache.shape[3])


@torch.library.register_fake("pagespec::index_topk", lib=_LIBRARY)
def _index_topk_fake(query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(query.shape[0], rest[-1], dtype=torch.int32)


def kv_store(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write new keys and values into the caches, in place.

    Args:
        key: ``[T, Hkv, Dk]``. value: ``[T, Hkv, Dv]``.
        k_cache: ``[num_blocks + 1, block_size, Hkv, Dk]``. v_cache: the same with Dv.
        slot_mapping: int64 ``[T]``.
    """
    torch.ops.pagespec.kv_store(key, value, k_cache, v_cache, slot_mapping)


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunk: int = 0,
    alibi_slopes: Sequence[float] | None = None,
    indices: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed rows over paged caches.

    Args:
        query: ``[T, Hq, Dk]``, Hq a multiple of Hkv.
        k_cache: ``[num_blocks + 1, block_size, Hkv, Dk]``. v_cache: the same with Dv.
        query_starts: int32 ``[B + 1]``. context_lens: int32 ``[B]``.
        block_tables: int32 ``[rows, M]``, of which row ``table_rows[b]`` is the table of row b.
        table_rows: int32 ``[B]``.
        scale: factor on the scores. window: 0 for none. softcap: 0 for none.
        sinks: ``[Hq]``, one more logit a head that takes probability only, or None.
        chunk: 0 for none.
        alibi_slopes: Hq numbers; ``slope * (key position - query position)`` is added to a score.
        indices: int32 ``[T, K]`` of :func:`index_topk`, or None; without window, chunk and slopes.

    Returns:
        ``[T, Hq, Dv]``.
    """
    out: Tensor = torch.ops.pagespec.paged_attention(
        query,
        k_cache,
        v_cache,
        query_starts,
        context_lens,
        block_tables,
        table_rows,
        scale,
        window,
        softcap,
        sinks,
        chunk,
        alibi_slopes,
        indices,
    )
    return out


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
    """Write new index keys into the cache, in place, and choose the positions of highest score for
    each query (:mod:`.attention.indexer`).

    Args:
        query: ``[T, H, D]``. key: ``[T, D]``. weights: ``[T, H]``.
        cache: ``[num_blocks + 1, block_size, 1, D]``. slot_mapping: int64 ``[T]``.
        query_starts, context_lens, block_tables, table_rows: as of :func:`paged_attention`.
        scale: factor on the products. num_chosen: K.

    Returns:
        int32 ``[T, K]``, in no order; -1 behind the last of a query that sees fewer.
    """
    chosen: Tensor = torch.ops.pagespec.index_topk(
        query,
        key,
        weights,
        cache,
        slot_mapping,
        query_starts,
        context_lens,
        block_tables,
        table_rows,
        scale,
        num_chosen,
    )
    return chosen


def all_reduce(partial: Tensor) -> Tensor:
    """The sum of all ranks' ``partial``, in rank order (:mod:`.collectives.communicator`)."""
    total: Tensor = torch.ops.pagespec.all_reduce(partial)
    return total


def all_gather(part: Tensor, sizes: list[int]) -> Tensor:
    """The ranks' parts side by side along the last dimension, rank r's of ``sizes[r]``."""
    whole: Tensor = torch.ops.pagespec.all_gather(part, sizes)
    return whole
