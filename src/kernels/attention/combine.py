"""Storing the outputs of the attention kernels, and combining the splits of split-KV decode.

Outputs are stored in the model's dtype, or quantised to e4m3 for the next matmul
(:mod:`..fused.e4m3_groups`). Quantisation starts from the output rounded to the model's dtype, so
its values equal those of :func:`..fused.quantize_rows.quantize_rows` of a stored output. Head sizes
are then multiples of 128.

Combine: the last program of a group to arrive folds all segments (Flash-Decoding, Dao et al. 2023),
as in the last-block reduction of CUDA's threadFenceReduction sample. An atomic counter per unit and
KV head elects that program, so no second kernel is needed. Latency limits the combine: the loads of
one chunk are in flight together, and the loads of the next chunk wait for the folds of this one. So
a chunk is as large as the registers of the decode kernel allow. With few segments the chunk is
smaller, because missing segments are folded, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..fused.e4m3_groups import GROUP, SMALLEST_SCALE, quantized
from .online_softmax import empty_state, finish, fold

_GROUP = tl.constexpr(GROUP)


class Results(NamedTuple):
    """Destination of the outputs of M lines (one query head of a token each): D values each."""

    target: Any  # pointers [M, D]; to e4m3 if there are scales
    mask: Any
    scales: Any  # pointers to float32, [M, D / 128]; 0 if outputs are not quantised
    scales_mask: Any


@triton.jit
def results_at(  # type: ignore[no-untyped-def]
    out, scales, num_tokens, tokens, heads, is_line, part,
    D: tl.constexpr, HQ: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The :class:`Results` of the D values from element ``part`` on.

    Args:
        out: ``[T, HQ, DV]``. scales: ``[HQ * DV / 128, T]``, or None. num_tokens: T.
        tokens: int64 ``[M]``, or one token of all lines. heads: query heads, ``[M]``. is_line: mask
            of the lines. part: 0, or with scales a multiple of 128.
    """
    dims = part + tl.arange(0, D)
    target = out + (tokens * HQ + heads)[:, None] * DV + dims[None, :]
    mask = is_line[:, None] & (dims < DV)[None, :]
    if scales is not None:
        groups = part // _GROUP + tl.arange(0, D // _GROUP)
        columns = heads.to(tl.int64)[:, None] * (DV // _GROUP) + groups[None, :]
        # If all lines have one token, ``tokens`` is a scalar.
        scale_target = scales + columns * num_tokens + (tl.zeros_like(heads) + tokens)[:, None]
    else:
        scale_target = 0
    return Results(target, mask, scale_target, is_line[:, None])


@triton.jit
def store_lines(  # type: ignore[no-untyped-def]
    result, results, DTYPE: tl.constexpr, QUANTIZE: tl.constexpr
):
    """Store float32 ``result [M, D]``, rounded to the model's DTYPE."""
    M: tl.constexpr = result.shape[0]
    D: tl.constexpr = result.shape[1]
    rounded = result.to(DTYPE)
    if QUANTIZE:
        GROUPS: tl.constexpr = D // _GROUP
        values, scales = quantized(tl.reshape(rounded.to(tl.float32), (M * GROUPS, _GROUP)))
        tl.store(results.target, tl.reshape(values, (M, D)), mask=results.mask)
        tl.store(results.scales, tl.reshape(scales, (M, GROUPS)), mask=results.scales_mask)
    else:
        tl.store(results.target, rounded, mask=results.mask)


@triton.jit
def store_zeros(results, QUANTIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """:func:`store_lines` with zeros."""
    DTYPE: tl.constexpr = results.target.dtype.element_ty
    tl.store(results.target, tl.zeros(results.target.shape, DTYPE), mask=results.mask)
    if QUANTIZE:
        scales = tl.full(results.scales.shape, SMALLEST_SCALE, tl.float32)
        tl.store(results.scales, scales, mask=results.scales_mask)


@triton.jit
def _fold_segments(  # type: ignore[no-untyped-def]
    partial, stats, index, first, num_segments, total, factor,
    DV: tl.constexpr, DV_PAD: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The total with segments ``first`` to ``first + CHUNK``, loaded together and folded in order.

    Segments beyond the last one are empty and change nothing.
    """
    dims = tl.arange(0, DV_PAD)
    for i in tl.static_range(CHUNK):
        segment = tl.zeros((GROUP,), tl.int32) + (first + i)
        here = index + segment
        some = segment < num_segments
        # Load from L2, where other programs stored them.
        acc = tl.load(
            partial + here[:, None] * DV + dims[None, :],
            mask=some[:, None] & (dims < DV)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        row_max = tl.load(stats + here * 2, mask=some, other=float("-inf"), cache_modifier=".cg")
        row_sum = tl.load(stats + here * 2 + 1, mask=some, other=0.0, cache_modifier=".cg")
        total = fold(total, (row_max, row_sum[:, None], acc), factor)
    return total


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    partial, stats, out, scales, num_tokens, sinks, unit, token, head, num_segments, max_segments,
    factor,
    HQ: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, FEW: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Fold the segments of the query heads of one unit and KV head, and store the outputs.

    Args:
        partial, stats, out, scales: as in :func:`.decode.decode_kernel`.
        CHUNK: segments loaded at once. FEW: segments loaded at once if there are no more. If twice
            as many suffice, that many are. DTYPE: the model's.
    """
    in_group = tl.arange(0, GROUP)
    is_head = in_group < G
    # Beyond the group, use its last head again, whose row_sum is not 0.
    heads = head * G + tl.minimum(in_group, G - 1)
    index = (unit.to(tl.int64) * HQ + heads) * max_segments
    total = empty_state(GROUP, 1, DV_PAD)
    MORE: tl.constexpr = min(2 * FEW, CHUNK)
    if num_segments <= FEW:
        total = _fold_segments(
            partial, stats, index, 0, num_segments, total, factor, DV, DV_PAD, GROUP, FEW
        )
    elif num_segments <= MORE:
        total = _fold_segments(
            partial, stats, index, 0, num_segments, total, factor, DV, DV_PAD, GROUP, MORE
        )
    else:
        for first in range(0, num_segments, CHUNK):
            total = _fold_segments(
                partial, stats, index, first, num_segments, total, factor, DV, DV_PAD, GROUP, CHUNK
            )
    result = finish(total, sinks, heads, is_head, factor)
    results = results_at(
        out, scales, num_tokens, token.to(tl.int64), heads, is_head, 0, DV_PAD, HQ, DV
    )
    store_lines(result, results, DTYPE, scales is not None)


@triton.jit
def is_last_arrival(counter, expected):  # type: ignore[no-untyped-def]
    """Whether this program is the last of ``expected`` programs to call this. The last one resets
    the counter to 0.

    After the call, this program can load from L2 (``cache_modifier=".cg"``) what the other programs
    stored before. The barrier orders the stores of all threads before the atomic. The atomic
    releases them to the whole GPU and acquires those of the other programs.

    Args:
        counter: pointer to an int32, 0 before the first program arrives.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter, 0)
    return is_last
