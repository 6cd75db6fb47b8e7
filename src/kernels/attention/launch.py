"""Host side of the attention kernels: tiles, grids and launches of ``paged_attention``.

Everything here depends only on shapes and dtypes. No code waits for the device, so calls can be
captured in a CUDA graph and replayed with other contents.

- At most as many tokens as rows (decode, with or without padding): one decode program, or several
  workers, per token and KV head. The last one to arrive combines the results of all. With few rows
  the kernel also normalises, rotates and stores (:func:`fused_rope_attention`).
- More tokens: the decode kernel serves rows of one query and the prefill kernel the others. Each
  leaves the other's rows unchanged. On Hopper :mod:`.prefill_sm90` may replace the prefill kernel,
  with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .. import e4m3
from ..arguments import AttentionParams, PagedKV, RopeInputs
from ..device import (
    Gpu,
    count_sms,
    has_dependent_launch,
    triggers_dependents_late,
    vector_strides,
)
from ..fused.e4m3_groups import GROUP, SMALLEST_SCALE, QuantizedRows, empty_rows
from ..registry import registry
from .decode import decode_kernel
from .online_softmax import LOG2E, dot_size
from .prefill import prefill_kernel
from .tiling import Tiling, choose_spread, choose_tiling, for_card, warps_and_registers


@dataclass(slots=True)
class _Call:
    """One attention call: its tensors, and the arguments that its kernels share."""

    query: Tensor
    kv: PagedKV
    out: Tensor
    tiling: Tiling
    shared: dict[str, Any]
    arrival_counters: Tensor | None
    order: Tensor | None


def paged_attention(
    query: Tensor,
    kv: PagedKV,
    params: AttentionParams,
    tiling: Tiling | None = None,
    arrival_counters: Tensor | None = None,
    rows: QuantizedRows | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Same as :func:`.ops.paged_attention`; shapes are given there.

    ``query`` may be strided in tokens and heads. Matmuls have operands of the query's dtype and
    float32 accumulators; float32 operands are multiplied in float32, not TF32. The block size may
    be any power of two.

    Args:
        tiling: a tiling to use instead of :func:`choose_tiling`'s; may change the bits.
        arrival_counters: int32 zeros, left as zeros, for calls that follow one another on one
            stream. They must have one element per unit and KV head if there are fewer of these than
            ``unsplit_from`` of the tiling :func:`.for_card`; otherwise none is needed. With None
            the call creates them, at the cost of one more launch.
        rows: from :func:`quantized_like`: the call quantises outputs into them and returns their
            values.
        order: from :func:`.triton_backend.longest_first`; None for the order of the batch. Changes
            no bits.

    Raises:
        ValueError: the block size is not a power of two, or there are too few counters.
    """
    call = _prepared(query, kv, params, tiling, arrival_counters, rows, order)
    (num_tokens, num_heads, _), out, num_rows = query.shape, call.out, len(kv.context_lens)
    if num_tokens == 0 or num_rows == 0:
        if rows is not None:
            rows.scales.fill_(SMALLEST_SCALE.value)
        return out.zero_()
    by_token = num_tokens <= num_rows
    _decode(call, by_token)
    if by_token:
        return out
    t, shared = call.tiling, call.shared
    by_arch = registry().find("prefill_attention", "", Gpu.of(query.device).arch)
    if by_arch is not None and by_arch.function("launch")(call.query, kv, out, shared, t):
        return out
    group = num_heads // shared["HKV"]
    block_m = max(t.block_m, triton.next_power_of_2(group))
    num_tiles = num_tokens // (block_m // group) + num_rows + 1
    prefill_kernel[(num_tiles * shared["HKV"] * t.prefill_parts,)](
        call.query, kv.k_cache, kv.v_cache, out, *kv[2:],
        **shared,
        BLOCK_M=block_m,
        PARTS=t.prefill_parts,
        # All rows at once: thousands of programs search for their row, and most find none.
        ROWS=min(2048, triton.next_power_of_2(num_rows + 1)),
        num_warps=t.prefill_warps,
        num_stages=t.prefill_stages,
    )  # fmt: skip
    return out


def fused_rope_attention(
    inputs: RopeInputs,
    slot_mapping: Tensor,
    kv: PagedKV,
    params: AttentionParams,
    tiling: Tiling | None = None,
    arrival_counters: Tensor | None = None,
    rows: QuantizedRows | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """:func:`..fused.norm_rope_store.norm_rope_store` and :func:`paged_attention` of its result in
    one launch, with the same bits if :func:`.decode_prologue.fits`. Arguments: see these functions.

    The step must not have more tokens than rows. Rows of several new tokens are stored several
    times.

    Returns:
        ``[T, Hq, Dv]``, or the values of ``rows``.

    Raises:
        ValueError: no tokens, or more tokens than rows; a block size that is not a power of two; or
            too few counters.
    """
    num_tokens, num_rows = len(inputs.query), len(kv.context_lens)
    if not 0 < num_tokens <= num_rows:
        raise ValueError(f"{num_tokens} tokens of {num_rows} rows: one to as many as rows needed")
    call = _prepared(inputs.query, kv, params, tiling, arrival_counters, rows, order)
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (inputs.key, inputs.value))
    cos, sin = inputs.cos, inputs.sin
    *strides, step = vector_strides(call.query, key, value)
    angles = 8 if all(x.stride(2) == 1 and x.stride(1) % 8 == 0 for x in (cos, sin)) else 1
    names = (f"{x}_{of}_stride" for x in "qkv" for of in ("token", "head"))
    call.shared |= dict(zip(names, strides, strict=True)) | {
        "key": key,
        "value": value,
        "cos": cos,
        "sin": sin,
        "q_weight": inputs.q_weight,
        "k_weight": inputs.k_weight,
        "slot_mapping": slot_mapping,
        "eps": inputs.eps,
        "STEP": step,
        "cos_stride": cos.stride(1) // angles,
        "cos_step": None if angles > 1 else cos.stride(2),
        "sin_stride": sin.stride(1) // angles,
        "sin_step": None if angles > 1 else sin.stride(2),
        "R": inputs.rotary_dim,
        "TABLE": cos.shape[2],
        "FORM": "" if inputs.q_weight is None else inputs.form,
        # The same setting as for norm_rope_store. The rest of the kernel states explicitly where to
        # contract.
        "enable_fp_fusion": False,
    }
    _decode(call, by_token=True)
    return call.out


def can_quantize(v_dim: int) -> bool:
    """Whether each group of channels that share a scale belongs to one head of ``v_dim`` values."""
    return v_dim % GROUP == 0


def quantized_like(query: Tensor, v_cache: Tensor) -> QuantizedRows:
    """Quantised rows ``[T, Hq * Dv]`` for the outputs of ``query [T, Hq, Dk]``.

    Raises:
        ValueError: a group of channels would span several heads.
    """
    v_dim = e4m3.head_dim(v_cache)
    if not can_quantize(v_dim):
        raise ValueError(f"heads of {v_dim} values: {GROUP} or a multiple of it share scales")
    return empty_rows(len(query), query.shape[1] * v_dim, query.device)


def factors(params: AttentionParams) -> tuple[float, float | None, float | None]:
    """(factor, cap_in, cap_out) of :class:`.online_softmax.Scoring`."""
    scale, softcap = params.scale, params.softcap
    # The weight is exp2(score * factor). With a softcap the kernel first scales and caps the
    # scores.
    if softcap:
        return LOG2E.value, scale / softcap, float(softcap)
    return scale * LOG2E.value, None, None


def _prepared(
    query: Tensor,
    kv: PagedKV,
    params: AttentionParams,
    tiling: Tiling | None,
    arrival_counters: Tensor | None,
    rows: QuantizedRows | None,
    order: Tensor | None,
) -> _Call:
    """Arguments as in :func:`paged_attention`.

    Raises:
        ValueError: the block size is not a power of two.
    """
    page = kv.v_cache.shape[1]
    if page & (page - 1):
        raise ValueError(f"block size {page}: the Triton kernels need a power of two")
    if query.stride(2) != 1:
        query = query.contiguous()
    num_tokens, num_heads, k_dim = query.shape
    v_dim = e4m3.head_dim(kv.v_cache)
    t = tiling or choose_tiling(query.dtype, k_dim, v_dim, kv.v_cache.dtype)
    out = query.new_empty(num_tokens, num_heads, v_dim) if rows is None else rows.values
    shared = shared_arguments(query, kv, params, t, rows)
    return _Call(query, kv, out, t, shared, arrival_counters, order)


def shared_arguments(
    query: Tensor,
    kv: PagedKV,
    params: AttentionParams,
    t: Tiling,
    rows: QuantizedRows | None = None,
) -> dict[str, Any]:
    """Arguments that the decode and prefill kernels share."""
    factor, cap_in, cap_out = factors(params)
    token_stride, head_stride, step = vector_strides(query)
    return {
        "sinks": params.sinks,
        "factor": factor,
        "cap_in": cap_in,
        "cap_out": cap_out,
        "window": params.window or None,
        "scales": None if rows is None else rows.scales,
        "num_tokens": len(query),
        "num_rows": len(kv.context_lens),
        "q_token_stride": token_stride,
        "q_head_stride": head_stride,
        "table_stride": kv.block_tables.stride(0),
        "HQ": query.shape[1],
        "HKV": kv.v_cache.shape[2],
        "DK": query.shape[2],
        "DV": e4m3.head_dim(kv.v_cache),
        "BLOCK_N": t.block_n,
        "NEAR_SPLIT": t.near_split,
        "FAR_SPLIT": t.far_split,
        "SPLIT_CHANGE": t.split_change,
        "PAGE": kv.v_cache.shape[1],
        "STEP": step,
    }


def _decode(call: _Call, by_token: bool) -> None:
    """Launch the decode kernel: that of this architecture, or the generic one where that does not
    apply.

    Args:
        by_token: one program per token and KV head; else one per row and KV head.

    Raises:
        ValueError: there are too few counters.
    """
    query, kv, shared, order = call.query, call.kv, call.shared, call.order
    arrival_counters = call.arrival_counters
    by_arch = registry().find("decode_attention", "", Gpu.of(query.device).arch)
    if by_arch is not None and by_arch.function("launch")(
        query, kv, call.out, shared, call.tiling, arrival_counters, by_token, order
    ):
        return
    num_heads, num_kv_heads, v_dim = shared["HQ"], shared["HKV"], shared["DV"]
    num_units = shared["num_tokens" if by_token else "num_rows"]
    num_programs = num_units * num_kv_heads
    t = for_card(call.tiling, count_sms(query.device))
    length = kv.block_tables.shape[1] * shared["PAGE"]
    spread = choose_spread(t, num_programs, length, shared["window"] or 0)
    fuses_rope = "key" in shared
    num_warps, registers = warps_and_registers(t, num_programs, spread, fuses_rope)
    # With at most one segment there is nothing to merge: these are empty, of the usual dtypes.
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
    is_late = fuses_rope and triggers_dependents_late(num_units)
    if num_programs < t.some_unsplit_from or num_units != shared["num_rows"]:
        order = None
    grid: tuple[int, ...] = (num_kv_heads * spread.num_workers, num_units)
    if order is not None:  # second workers, which mostly have no work, come last
        grid = (num_kv_heads, num_units, spread.num_workers)
    decode_kernel[grid](
        query, kv.k_cache, kv.v_cache, call.out, partial, stats, arrival_counters, *kv[2:], order,
        num_workers=spread.num_workers,
        max_segments=spread.max_segments,
        **shared,
        CHUNK=t.combine_chunk_of(group * dot_size(v_dim)),
        BY_TOKEN=by_token,
        FIRST_SPLITS=spread.first_splits,
        UNSPLIT_BELOW=spread.unsplit_below,
        LONG_CONTEXT=spread.long_context,
        TRIGGER="" if not overlap else "late" if is_late else "early",
        num_warps=num_warps,
        num_stages=t.decode_stages,
        launch_pdl=overlap,
        **({"maxnreg": registers} if registers else {}),
    )  # fmt: skip
