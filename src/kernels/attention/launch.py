"""Host side of the attention kernels: tiles, grids and launches of ``paged_attention``.

Everything here follows shapes and dtypes alone. Nothing waits for the device, so that calls can be
captured in a CUDA graph and replayed with other contents.

- At most as many tokens as rows (decode, with or without padding): one decode program (or several
  workers of them) a token and KV head, of which the last to arrive combines what all computed. With
  few rows it normalises, rotates and stores too (:func:`fused_rope_attention`).
- More: rows of one query go to the decode kernel, the others to the prefill kernel; each leaves
  the other's alone. On Hopper :mod:`.prefill_sm90` may be the latter; same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..arguments import AttentionParams, PagedKV, RopeInputs
from ..device import has_dependent_launch, is_gluon_known, triggers_dependents_late, vector_strides
from .decode import decode_kernel
from .online_softmax import LOG2E, MIN_DOT
from .prefill import prefill_kernel
from .tiling import Tiling, choose_spread, choose_tiling


def paged_attention(
    query: Tensor,
    kv: PagedKV,
    params: AttentionParams,
    tiling: Tiling | None = None,
    arrival_counters: Tensor | None = None,
) -> Tensor:
    """As :func:`.ops.paged_attention`, with shapes as there.

    ``query`` may be strided in tokens and heads. Matmuls have operands of the query's dtype and
    float32 sums; float32 operands are multiplied as such, not as TF32. Any block size that is a
    power of two.

    Args:
        tiling: to try another than :func:`choose_tiling` gives; may change the bits.
        arrival_counters: int32 zeros, left as zeros, for calls that follow one another on one
            stream. One per unit and KV head, if those are fewer than ``tiling.unsplit_from``, else
            none. None makes some for the call, which costs one more launch.

    Raises:
        ValueError: the block size is no power of two, or there are too few counters.
    """
    num_tokens, num_q_heads, k_dim = query.shape
    page, num_kv_heads, v_dim = kv.v_cache.shape[1:]
    num_rows = len(kv.block_tables)
    if page & (page - 1):
        raise ValueError(f"block size {page}: the Triton kernels need a power of two")
    if query.stride(2) != 1:
        query = query.contiguous()
    out = query.new_empty(num_tokens, num_q_heads, v_dim)
    if num_tokens == 0 or num_rows == 0:
        return out.zero_()
    by_token = num_tokens <= num_rows
    t = tiling or choose_tiling(query.dtype, k_dim, v_dim)
    shared = _shared(query, kv.v_cache, params, t)
    _decode(query, kv, out, shared, t, arrival_counters, by_token, _WITHOUT_ROPE)
    if not by_token:
        if query.is_cuda and is_gluon_known():
            from . import prefill_sm90

            if prefill_sm90.launch(query, kv, out, shared, t):
                return out
        group = num_q_heads // num_kv_heads
        block_m = max(t.block_m, triton.next_power_of_2(group))
        num_tiles = num_tokens // (block_m // group) + num_rows + 1
        prefill_kernel[(num_tiles * num_kv_heads * t.prefill_parts,)](
            query,
            kv.k_cache,
            kv.v_cache,
            out,
            *kv[2:],
            num_tokens=num_tokens,
            num_rows=num_rows,
            table_stride=kv.block_tables.stride(0),
            **shared,
            BLOCK_M=block_m,
            PARTS=t.prefill_parts,
            # All rows at once: thousands of programs look for their row, most to find none.
            ROWS=min(2048, triton.next_power_of_2(num_rows + 1)),
            num_warps=t.prefill_warps,
            num_stages=t.prefill_stages,
        )
    return out


def fused_rope_attention(
    inputs: RopeInputs,
    slot_mapping: Tensor,
    kv: PagedKV,
    params: AttentionParams,
    tiling: Tiling | None = None,
    arrival_counters: Tensor | None = None,
) -> Tensor:
    """:func:`..fused.norm_rope_store.norm_rope_store`, then :func:`paged_attention` of what it
    returns, in one launch; with the same bits if :func:`.decode_prologue.fits`. Arguments as there.

    Any rows of as many tokens altogether as there are rows, or fewer; rows of several new tokens
    are stored several times.

    Returns:
        ``[T, Hq, Dv]``.

    Raises:
        ValueError: no tokens or more than rows, a block size that is no power of two, or too few
            counters.
    """
    query, key, value, cos, sin, rotary_dim, q_weight, k_weight, eps, form = inputs
    num_tokens, num_heads, dim = query.shape
    page, _, v_dim = kv.v_cache.shape[1:]
    num_rows = len(kv.block_tables)
    if not 0 < num_tokens <= num_rows:
        raise ValueError(f"{num_tokens} tokens of {num_rows} rows: one to as many as rows needed")
    if page & (page - 1):
        raise ValueError(f"block size {page}: the Triton kernels need a power of two")
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    out = query.new_empty(num_tokens, num_heads, v_dim)
    t = tiling or choose_tiling(query.dtype, dim, v_dim)
    shared = _shared(query, kv.v_cache, params, t)
    k_token_stride, k_head_stride, k_step = vector_strides(key)
    v_token_stride, v_head_stride, v_step = vector_strides(value)
    angles = 8 if all(x.stride(2) == 1 and x.stride(1) % 8 == 0 for x in (cos, sin)) else 1
    rope = {
        "key": key,
        "value": value,
        "cos": cos,
        "sin": sin,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "slot_mapping": slot_mapping,
        "eps": eps,
        "k_token_stride": k_token_stride,
        "k_head_stride": k_head_stride,
        "v_token_stride": v_token_stride,
        "v_head_stride": v_head_stride,
        "cos_stride": cos.stride(1) // angles,
        "cos_step": cos.stride(2),
        "sin_stride": sin.stride(1) // angles,
        "sin_step": sin.stride(2),
        "K_STEP": k_step,
        "V_STEP": v_step,
        "R": rotary_dim,
        "TABLE": cos.shape[2],
        "ANGLES": angles,
        "FORM": "" if q_weight is None else form,
        "FUSE_ROPE": True,
        "LATE_TRIGGER": triggers_dependents_late(num_tokens),
        # As norm_rope_store is compiled. The rest of the kernel says itself where to contract.
        "enable_fp_fusion": False,
    }
    _decode(query, kv, out, shared, t, arrival_counters, True, rope)
    return out


_WITHOUT_ROPE: dict[str, Any] = {
    **dict.fromkeys(("key", "value", "cos", "sin", "q_weight", "k_weight", "slot_mapping", "eps")),
    **dict.fromkeys(("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride")),
    **dict.fromkeys(("cos_stride", "cos_step", "sin_stride", "sin_step")),
    **dict.fromkeys(("K_STEP", "V_STEP", "R", "TABLE", "ANGLES", "FORM")),
    "FUSE_ROPE": False,
    "LATE_TRIGGER": False,
}


def _shared(
    query: Tensor,
    v_cache: Tensor,
    params: AttentionParams,
    t: Tiling,
) -> dict[str, Any]:
    """What the decode and the prefill kernel are given alike."""
    scale, window, softcap, sinks = params
    _, num_q_heads, k_dim = query.shape
    page, num_kv_heads, v_dim = v_cache.shape[1:]
    token_stride, head_stride, step = vector_strides(query)
    return {
        "sinks": sinks,
        # exp2 of score * factor; with a softcap the kernel scales and caps the scores first.
        "factor": LOG2E.value if softcap else scale * LOG2E.value,
        "cap_in": scale / softcap if softcap else 0.0,
        "cap_out": float(softcap),
        "window": window,
        "q_token_stride": token_stride,
        "q_head_stride": head_stride,
        "HQ": num_q_heads,
        "HKV": num_kv_heads,
        "DK": k_dim,
        "DV": v_dim,
        "DK_PAD": max(MIN_DOT, triton.next_power_of_2(k_dim)),
        "DV_PAD": max(MIN_DOT, triton.next_power_of_2(v_dim)),
        "BLOCK_N": t.block_n,
        "NEAR_SPLIT": t.near_split,
        "FAR_SPLIT": t.far_split,
        "SPLIT_CHANGE": t.split_change,
        "PAGE": page,
        "Q_STEP": step,
        "HAS_WINDOW": window > 0,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": sinks is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def _decode(
    query: Tensor,
    kv: PagedKV,
    out: Tensor,
    shared: dict[str, Any],
    t: Tiling,
    arrival_counters: Tensor | None,
    by_token: bool,
    rope: dict[str, Any],
) -> None:
    """Launch the decode kernel for each token, or for each row.

    Raises:
        ValueError: there are too few counters.
    """
    num_tokens, num_heads, _ = query.shape
    page, num_kv_heads, v_dim = kv.v_cache.shape[1:]
    num_rows, table_width = kv.block_tables.shape
    num_units = num_tokens if by_token else num_rows
    spread = choose_spread(t, num_units * num_kv_heads, table_width * page, shared["window"])
    # With one segment at most, nothing is merged: these are empty, of the dtype they always have.
    num_merging = num_units if spread.max_segments > 1 else 0
    shape = (num_merging, num_heads, spread.max_segments)
    partial = torch.empty(*shape, v_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
    num_counters = num_merging * num_kv_heads
    if arrival_counters is None:
        arrival_counters = torch.zeros(num_counters, dtype=torch.int32, device=query.device)
    elif arrival_counters.numel() < num_counters:
        raise ValueError(
            f"{arrival_counters.numel()} counters of arrival where {num_counters} are needed"
        )
    group = triton.next_power_of_2(num_heads // num_kv_heads)
    overlap = has_dependent_launch(query.device)
    decode_kernel[(num_kv_heads * spread.num_workers, num_units)](
        query,
        kv.k_cache,
        kv.v_cache,
        out,
        partial,
        stats,
        arrival_counters,
        *kv[2:],
        table_stride=kv.block_tables.stride(0),
        num_rows=num_rows,
        num_workers=spread.num_workers,
        max_segments=spread.max_segments,
        **shared,
        **rope,
        BLOCK_M=max(MIN_DOT, group),
        GROUP=group,
        CHUNK=t.combine_chunk_of(group * shared["DV_PAD"]),
        BY_TOKEN=by_token,
        FIRST_SPLITS=spread.first_splits,
        UNSPLIT_BELOW=spread.unsplit_below,
        LONG_CONTEXT=spread.long_context,
        EMULATE=query.device.type == "cpu",
        PDL=overlap,
        num_warps=t.decode_warps,
        num_stages=t.decode_stages,
        launch_pdl=overlap,
    )
