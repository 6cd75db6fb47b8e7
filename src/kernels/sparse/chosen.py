"""Attention over the positions that an indexer selected, for caches that hold all heads.

For models without latent caches (:mod:`..mla` serves those with latent caches). The steps are those
of :mod:`..attention.online_softmax` with one split: tiles of BLOCK_N selected positions, in order
of position. So the bits of a query depend only on its own text.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import AttentionParams, PagedKV
from ..attention.launch import factors
from ..attention.online_softmax import (
    MIN_DOT,
    ONES,
    Scoring,
    add_tile,
    dot_size,
    empty_state,
    finish,
    score,
)
from ..attention.tiling import choose_tiling
from ..device import overlap_options
from .index_kernels import chosen_slots, row_of_token


@triton.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=["table_stride", "num_rows"],
    do_not_specialize_on_alignment=["starts", "contexts", "tables", "table_rows"],
)
def chosen_kernel(  # type: ignore[no-untyped-def]
    query, k_cache, v_cache, out, chosen, starts, contexts, tables, table_rows, sinks, factor,
    cap_in, cap_out, table_stride, num_rows,
    HQ: tl.constexpr, HKV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, h] = softmax(scale * query[t, h] @ K.T) @ V`` over the positions in ``chosen[t]``.

    Grid: ``(HKV, T)``. Shapes: query ``[T, HQ, DK]`` and out ``[T, HQ, DV]``, contiguous; caches
    ``[blocks, PAGE, HKV, DK or DV]``, chosen ``[T, NUM_CHOSEN]``, starts ``[B + 1]``, contexts
    ``[B]``, tables ``[rows, M]``, table_rows ``[B]``; GROUP lines for the query heads of a KV head.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    G: tl.constexpr = HQ // HKV
    DK_PAD: tl.constexpr = dot_size(DK)
    DV_PAD: tl.constexpr = dot_size(DV)
    kv_head = tl.program_id(0)
    token = tl.program_id(1)
    row, position = row_of_token(starts, contexts, num_rows, token)
    lines = tl.arange(0, GROUP)
    is_line = lines < G
    heads = kv_head * G + lines
    k_dims = tl.arange(0, DK_PAD)[None, :]
    v_dims = tl.arange(0, DV_PAD)[None, :]
    places = (token.to(tl.int64) * HQ + heads)[:, None]
    mask = is_line[:, None] & (v_dims < DV)
    if position < 0:  # padding
        tl.store(
            out + places * DV + v_dims, tl.zeros((GROUP, DV_PAD), out.dtype.element_ty), mask=mask
        )
        return
    last = tl.minimum(position, NUM_CHOSEN - 1)
    chosen += token.to(tl.int64) * NUM_CHOSEN
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    q = tl.load(query + places * DK + k_dims, mask=is_line[:, None] & (k_dims < DK), other=0.0)
    offsets = tl.arange(0, BLOCK_N)
    ones = tl.full((BLOCK_N, ONES), 1.0, v_cache.dtype.element_ty)
    state = empty_state(GROUP, ONES, DV_PAD)
    slots = chosen_slots(chosen, position, table, 0, last, PAGE, BLOCK_N)
    for start in tl.range(0, last + 1, BLOCK_N):
        at = (slots * HKV + kv_head)[:, None]
        # Beyond the last position, its vector is repeated: finite values with weight 0.
        k = tl.load(k_cache + at * DK + k_dims, mask=k_dims < DK, other=0.0)
        v = tl.load(v_cache + at * DV + v_dims, mask=v_dims < DV, other=0.0)
        # One tile ahead, so that no address waits for the load of its slot.
        slots = chosen_slots(chosen, position, table, start + BLOCK_N, last, PAGE, BLOCK_N)
        scores = score(q, k, Scoring(None, factor, cap_in, cap_out))
        scores = tl.where((start + offsets <= last)[None, :], scores, float("-inf"))
        state = add_tile(scores, v, ones, state, factor)
    result = finish(state, sinks, heads, is_line, factor)
    tl.store(out + places * DV + v_dims, result.to(out.dtype.element_ty), mask=mask)


def chosen_attention(query: Tensor, kv: PagedKV, params: AttentionParams) -> Tensor:
    """Same as :func:`..ops.paged_attention` with ``indices`` from :mod:`.index_kernels`, in order
    of position; without window, chunk and slopes. Any block size."""
    num_tokens, num_heads, k_dim = query.shape
    _, page, num_kv_heads, v_dim = kv.v_cache.shape
    num_rows = len(kv.context_lens)
    assert params.indices is not None
    query = query.contiguous()
    out = query.new_empty(num_tokens, num_heads, v_dim)
    if num_tokens == 0 or num_rows == 0:
        return out.zero_()
    tiling = choose_tiling(query.dtype, k_dim, v_dim)
    chosen_kernel[(num_kv_heads, num_tokens)](
        query, kv.k_cache, kv.v_cache, out, params.indices, *kv[2:], params.sinks, *factors(params),
        kv.block_tables.stride(0), num_rows,
        HQ=num_heads,
        HKV=num_kv_heads,
        DK=k_dim,
        DV=v_dim,
        PAGE=page,
        NUM_CHOSEN=params.indices.shape[1],
        GROUP=max(MIN_DOT, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_N=tiling.block_n,
        num_warps=tiling.decode_warps,
        num_stages=tiling.decode_stages,
        **overlap_options(query.device),
    )  # fmt: skip
    return out
