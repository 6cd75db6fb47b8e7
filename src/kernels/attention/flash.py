"""``pagespec::paged_attention`` with the FlashAttention libraries, if one is installed.

Two of them can read pages: ``flash-attn-4`` (``flash_attn.cute``; written for 4.0.0b36) on Hopper
and Blackwell, and ``flash-attn`` 2 (written for 2.8) from Ampere on. :func:`attend_4` and
:func:`attend_2` take the bundled arguments of the op. :func:`limit_of` reports, before the first
step, what a library cannot compute exactly; the functions themselves check nothing.

Neither library guarantees the same bits under another schedule: tiles follow the lengths of the
batch. No function here waits for the device, so calls can be captured in a CUDA graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..arguments import AttentionParams, PagedKV
from .attention_spec import AttentionSpec, reference_only

Library = Literal["flash-attn-4", "flash-attn"]
LIBRARIES: tuple[Library, ...] = ("flash-attn-4", "flash-attn")
_MODULES = {"flash-attn-4": "flash_attn.cute", "flash-attn": "flash_attn"}


def limit_of(
    library: Library,
    capability: tuple[int, int],
    dtype: torch.dtype,
    specs: Sequence[AttentionSpec],
    block_size: int,
) -> str | None:
    """The reason why ``library`` cannot serve all ``specs``, or None.

    Imports the library, which may take seconds, only after all other conditions hold.

    Args:
        capability: the GPU's compute capability, (major, minor).
        dtype: of queries and caches.
        block_size: slots per block.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{library} takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if lacking := reference_only(specs):
        return f"{library}: our calls of it {lacking}"
    of_library = _limit_4 if library == "flash-attn-4" else _limit_2
    limit = of_library(capability, specs, block_size)
    if limit is not None:
        return f"{library} {limit}"
    try:
        module = importlib.import_module(_MODULES[library])
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return f"{library} is not installed or does not load ({error})"
    if not hasattr(module, "flash_attn_varlen_func"):
        return f"{library} has no flash_attn_varlen_func"
    return None


def _limit_4(
    capability: tuple[int, int], specs: Sequence[AttentionSpec], block_size: int
) -> str | None:
    """The conditions of ``flash_attn/cute/interface.py`` for a forward pass over pages."""
    if capability[0] not in (9, 10, 11):
        return f"reads pages on GPUs of compute capability 9 to 11 only, not {capability[0]}"
    for spec in specs:
        dims = (spec.k_dim, spec.v_dim)
        # Its limit is a multiple of 8, but rows of pages are copied in units of 16 elements. With a
        # head of 24, the copy would include the elements after it, perhaps NaN in an unused slot.
        if any(dim % 16 for dim in dims):
            return f"reads pages of head sizes that are multiples of 16, not {dims}"
        allowed = max(dims) <= (256 if capability[0] == 9 else 128)
        if not allowed and dims not in ((192, 128), (256, 256)):
            return f"does not take head sizes {dims} on this GPU"
        # Pages as large as a tile of keys (128, or 64 for large or uneven heads) are loaded whole,
        # unused slots included. A NaN there reaches the output, according to the library's
        # documentation.
        if block_size == 128 or (block_size == 64 and (max(dims) > 192 or len(set(dims)) > 1)):
            return f"reads unused slots where blocks hold {block_size}; use 16, 32 or 256"
    return None


def _limit_2(
    capability: tuple[int, int], specs: Sequence[AttentionSpec], block_size: int
) -> str | None:
    """The conditions of ``csrc/flash_attn/flash_api.cpp``, ``mha_varlen_fwd`` with pages."""
    if capability[0] < 8:
        return f"needs a GPU of compute capability 8 or more, not {capability[0]}"
    if block_size % 256:
        return f"needs a block size that is a multiple of 256, not {block_size}"
    for spec in specs:
        if spec.k_dim != spec.v_dim:
            return f"needs keys and values of one head size, not {spec.k_dim} and {spec.v_dim}"
        if spec.k_dim > 256 or spec.k_dim % 8:
            return f"needs head sizes that are multiples of 8 up to 256, not {spec.k_dim}"
        if spec.has_sinks:
            return "has no attention sinks"
    return None


def attend_4(query: Tensor, kv: PagedKV, params: AttentionParams) -> Tensor:
    """Same as :func:`.ops.paged_attention`, by flash-attn-4."""
    from flash_attn.cute import flash_attn_varlen_func

    window = params.window
    result = flash_attn_varlen_func(
        query,
        kv.k_cache,
        kv.v_cache,
        cu_seqlens_q=kv.query_starts,
        max_seqlen_q=query.shape[0],  # a bound; the lengths themselves are on the device
        seqused_k=kv.context_lens,
        page_table=kv.block_tables[kv.table_rows],
        softmax_scale=params.scale,
        causal=True,
        window_size=(window - 1, 0) if window else (None, None),
        learnable_sink=params.sinks,
        softcap=params.softcap,
    )
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return _without_padding(out, kv.query_starts)


def attend_2(query: Tensor, kv: PagedKV, params: AttentionParams) -> Tensor:
    """Same as :func:`.ops.paged_attention`, by flash-attn 2, without sinks, which :func:`limit_of`
    refuses."""
    from flash_attn import flash_attn_varlen_func

    k_cache, v_cache, query_starts, context_lens, block_tables, table_rows = kv
    window, num_tokens = params.window, query.shape[0]
    if num_tokens == 0:
        return query.new_empty(0, query.shape[1], v_cache.shape[3])
    # With pages, the library reads only the differences of these.
    context_starts = torch.nn.functional.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0))
    out: Tensor = flash_attn_varlen_func(
        query if query.stride(2) == 1 else query.contiguous(),
        k_cache,
        v_cache,
        query_starts,
        context_starts,
        # A bound. With 1, the library assumes as many queries as rows, which padded batches do not
        # guarantee.
        max(2, num_tokens),
        block_tables.shape[1] * k_cache.shape[1],
        softmax_scale=params.scale,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        softcap=params.softcap,
        block_table=block_tables[table_rows],
    )
    return _without_padding(out, query_starts)


def _without_padding(out: Tensor, query_starts: Tensor) -> Tensor:
    """``out [T, Hq, Dv]`` with zeros, written in place, for the tokens after the last row, which no
    library writes."""
    tokens = torch.arange(out.shape[0], device=out.device)
    return out.masked_fill_((tokens >= query_starts[-1])[:, None, None], 0.0)
