"""Causal depthwise convolution over a few positions as a Triton kernel.

A program computes a tile of channels for a part of a row's tokens. Only the program of a row's
first part reads the row's state, so it also writes the states of the whole row: no program reads
what another one writes. Taps are added in order, without contracting multiplications and additions.
So a token's bits do not depend on its place, nor on the tile size, which is different in steps with
one token per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fused.rounding import rounded, rounded_silu
from .cpu import activated
from .device_functions import (
    BATCH,
    ROW_POINTERS,
    end_of_own,
    find_row,
    first_slot,
    part_of_row,
    zero_padding,
)
from .walk import StepRows

# (tokens, channels, warps) of a tile. Any choice gives the same bits: all operations are
# elementwise.
_TILE = 4, 256, 4
_TILE_OF_DECODING = 1, 512, 2
_PART = 32
_SILU = ("silu", "swish")


@triton.jit
def _load_inputs(  # type: ignore[no-untyped-def]
    x, history, j, begin, has_history, channels, mask, x_stride, C: tl.constexpr, K: tl.constexpr
):
    """``[len(j), len(channels)]`` of a row's inputs, with j counted from its first token in the
    step. The K - 1 inputs before that come from ``history``; without it they are zeros."""
    old = (j < 0)[:, None] & mask & has_history
    before = tl.load(history + (j + (K - 1))[:, None] * C + channels[None, :], mask=old, other=0.0)
    new = (j >= 0)[:, None] & mask
    rows = (begin + j).to(tl.int64)[:, None] * x_stride
    return tl.where(old, before, tl.load(x + rows + channels[None, :], mask=new, other=0.0))


@triton.jit(do_not_specialize=BATCH, do_not_specialize_on_alignment=["x", *ROW_POINTERS])
def _short_conv_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, states, out, starts, contexts, tables, table_rows, num_drafts, num_rows,
    num_tokens, interval, table_stride, x_stride, C: tl.constexpr, K: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, PART: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Grid: ``(ceil(C / BLOCK_C), programs + 1)``. The first program is for padding. If a tile has
    one token, the others serve one row each; else :func:`.part_of_row` assigns them. Shapes: x and
    out ``[T, C]``, weight ``[C, K]``, bias ``[C]``, states ``[slots, K - 1, C]``, starts ``[B +
    1]``, contexts ``[B]``, tables ``[R, M]``, table_rows ``[B]``, num_drafts ``[B]`` or None;
    interval >= K - 1."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channels < C
    if tl.program_id(1) == 0:
        zero_padding(out + channels, tl.load(starts + num_rows), num_tokens, mask_c, C)
        return
    row = tl.program_id(1) - 1
    first = 0
    if BLOCK_T > 1:
        row, number = part_of_row(starts, num_rows, row, PART, 1)
        first = number * PART
    begin, end, position, table = find_row(
        starts, contexts, tables, table_rows, row, True, table_stride
    )
    length = end - begin
    if first >= length:
        return
    last = length
    if BLOCK_T > 1:
        last = tl.minimum(first + PART, length)
    mask = mask_c[None, :]
    history = states
    has_history = position > 0
    if has_history:
        history += first_slot(table, position, interval) * ((K - 1) * C)

    taps = ()
    for tap in tl.static_range(K):
        taps += (tl.load(weight + channels * K + tap, mask=mask_c, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    if bias is not None:
        shift = tl.load(bias + channels, mask=mask_c, other=0.0).to(tl.float32)
    for start in range(first, last, BLOCK_T):
        j = start + tl.arange(0, BLOCK_T)
        inside = (j < last)[:, None] & mask
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for tap in tl.static_range(K):
            before = j - (K - 1 - tap)
            if start >= K - 1:  # all of them belong to the step
                rows = (begin + before).to(tl.int64)[:, None] * x_stride
                inputs = tl.load(x + rows + channels[None, :], mask=inside, other=0.0)
            else:
                inputs = _load_inputs(
                    x, history, before, begin, has_history, channels, inside, x_stride, C, K
                )
            total += rounded(inputs.to(tl.float32), DTYPE) * taps[tap][None, :]
        if bias is not None:
            total += shift[None, :]
        total = rounded(total, DTYPE)
        if SILU:
            total = rounded_silu(total, DTYPE)
        target = out + (begin + j).to(tl.int64)[:, None] * C + channels[None, :]
        tl.store(target, total.to(DTYPE), mask=inside)

    if (first == 0) & (K > 1):
        K_PAD: tl.constexpr = triton.next_power_of_2(max(K - 1, 1))
        i = tl.arange(0, K_PAD)
        kept = (i < K - 1)[:, None] & mask
        length = end_of_own(num_drafts, row, end) - begin
        offsets = i[:, None] * C + channels[None, :]
        # Of the states to write, only those of the first and the last interval can contain inputs
        # of the old state, and either write may overwrite it. So both are read before.
        first_end = tl.minimum(interval - position % interval, length)
        of_first = _load_inputs(
            x, history, i + (first_end - (K - 1)), begin, has_history, channels, kept, x_stride,
            C, K,
        )  # fmt: skip
        of_last = _load_inputs(
            x, history, i + (length - (K - 1)), begin, has_history, channels, kept, x_stride, C, K
        )
        tl.debug_barrier()  # other threads of this program may still be reading
        slot = first_slot(table, position + first_end, interval)
        tl.store(states + slot * ((K - 1) * C) + offsets, of_first, mask=kept)
        for end in range(first_end + interval, length, interval):
            inputs = _load_inputs(
                x, states, i + (end - (K - 1)), begin, False, channels, kept, x_stride, C, K
            )
            slot = first_slot(table, position + end, interval)
            tl.store(states + slot * ((K - 1) * C) + offsets, inputs, mask=kept)
        slot = first_slot(table, position + length, interval)
        tl.store(states + slot * ((K - 1) * C) + offsets, of_last, mask=kept)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StepRows, activation: str
) -> Tensor:
    """Same as :func:`.ops.short_conv`; ``rows.interval`` is at least K - 1."""
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    num_rows, (channels, width) = len(rows.context_lens), weight.shape
    if len(x):
        x = x if x.stride(1) == 1 else x.contiguous()
        is_decoding = len(x) <= num_rows
        block_t, block_c, num_warps = _TILE_OF_DECODING if is_decoding else _TILE
        parts = num_rows if is_decoding else len(x) // _PART + num_rows
        grid = triton.cdiv(channels, block_c), parts + 1
        _short_conv_kernel[grid](
            x, weight.contiguous(), bias, states, out,
            *rows.arguments(len(x)), x.stride(0),
            C=channels,
            K=width,
            BLOCK_C=block_c,
            BLOCK_T=block_t,
            PART=_PART,
            SILU=activation in _SILU,
            num_warps=num_warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return (out if activation in _SILU else activated(out, activation)).to(x.dtype)
