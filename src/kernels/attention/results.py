"""Store step of the attention kernels: outputs in the model's dtype, or quantised to e4m3 for the
matmul behind (:mod:`..fused.e4m3_groups`).

What is quantised is the output as it would have been stored, rounded to the model's dtype, so that
the numbers are those of :func:`..fused.quantize_rows.quantize_rows` of a stored output. Heads have
whole groups of 128 values then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..fused.e4m3_groups import GROUP, SMALLEST_SCALE, quantized

_GROUP = tl.constexpr(GROUP)


class Results(NamedTuple):
    """Where the outputs of M lines, a query head of a token each, go: D values of each."""

    target: Any  # pointers [M, D]; to e4m3 if there are scales
    mask: Any
    scales: Any  # pointers to float32, [M, D / 128]; 0 if outputs are not quantised
    scales_mask: Any


@triton.jit
def results_at(  # type: ignore[no-untyped-def]
    out, scales, num_tokens, tokens, heads, is_line, part,
    D: tl.constexpr, HQ: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The :class:`Results` of the D values from ``part`` on.

    Args:
        out: ``[T, HQ, DV]``. scales: ``[HQ * DV / 128, T]``, or None. num_tokens: T.
        tokens: int64 ``[M]``, or one of all lines. heads: query heads, ``[M]``. is_line: which of
            the lines are there. part: 0, or with scales a multiple of 128.
    """
    dims = part + tl.arange(0, D)
    target = out + (tokens * HQ + heads)[:, None] * DV + dims[None, :]
    mask = is_line[:, None] & (dims < DV)[None, :]
    if scales is not None:
        groups = part // _GROUP + tl.arange(0, D // _GROUP)
        columns = heads.to(tl.int64)[:, None] * (DV // _GROUP) + groups[None, :]
        # A token of all lines is a number.
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
    """:func:`store_lines` of zeros."""
    DTYPE: tl.constexpr = results.target.dtype.element_ty
    tl.store(results.target, tl.zeros(results.target.shape, DTYPE), mask=results.mask)
    if QUANTIZE:
        scales = tl.full(results.scales.shape, SMALLEST_SCALE, tl.float32)
        tl.store(results.scales, scales, mask=results.scales_mask)
