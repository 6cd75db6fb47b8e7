"""Mamba-1's recurrence as a Triton kernel; :mod:`.cpu_selective_scan` has the equations.

A program walks the tokens of one row with the states of some channels in registers. As of
:mod:`.walked_delta_rule`: one kernel for decoding and prompts, and no choice that follows the
batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fused.rounding import rounded, silu
from .cpu_selective_scan import result_type
from .device_functions import exp, first_slot, step_size, zero_padding
from .walk import StepRows

# Channels of a program, which is one warp: two threads share the state of one. Of 16, 32 and 64 the
# quickest for prompts and for decoding.
_BLOCK_I = 16


@triton.jit
def _load_token(  # type: ignore[no-untyped-def]
    x, dt, B, C, z, token, mask_i, mask_n, x_stride, dt_stride, b_stride, c_stride, z_stride,
):  # fmt: skip
    """A token's x, dt, B, C and z (x without) as they lie in memory; zeros where masked."""
    x_t = tl.load(x + token * x_stride, mask=mask_i, other=0.0)
    dt_t = tl.load(dt + token * dt_stride, mask=mask_i, other=0.0)
    b_t = tl.load(B + token * b_stride, mask=mask_n, other=0.0)
    c_t = tl.load(C + token * c_stride, mask=mask_n, other=0.0)
    z_t = x_t
    if z is not None:
        z_t = tl.load(z + token * z_stride, mask=mask_i, other=0.0)
    return x_t, dt_t, b_t, c_t, z_t


@triton.jit(
    # As of walked_delta_rule: what follows the batch must not make new versions of the kernel.
    do_not_specialize=[
        "num_rows", "num_tokens", "interval", "table_stride", "unit", "x_stride", "dt_stride",
        "b_stride", "c_stride", "z_stride",
    ],
    do_not_specialize_on_alignment=[
        "x", "dt", "B", "C", "z", "starts", "contexts", "tables", "table_rows",
    ],
)  # fmt: skip
def _selective_scan_kernel(  # type: ignore[no-untyped-def]
    x, dt, A, B, C, D, z, dt_bias, states, out, starts, contexts, tables, table_rows, num_rows,
    num_tokens, interval, table_stride, unit, x_stride, dt_stride, b_stride, c_stride, z_stride,
    INNER: tl.constexpr, N: tl.constexpr, BLOCK_I: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Grid: ``(ceil(INNER / BLOCK_I), B + 1)``; the last row is that of padding.

    Shapes, I being INNER: x, dt, z and out ``[T, I]``, A ``[I, N]``, B and C ``[T, N]``, D and
    dt_bias ``[I]``, states ``[slots, N, I]``, starts ``[B + 1]``, contexts ``[B]``, tables
    ``[R, M]``, table_rows ``[B]``.

    ``unit`` is 1. The compiler, which must not know, would otherwise give a thread what lies side
    by side; so it gives a thread half of the state of one channel.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    N_PAD: tl.constexpr = triton.next_power_of_2(N)
    row = tl.program_id(1)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_i = i < INNER
    begin = tl.load(starts + row)
    table_row = tl.load(table_rows + row, mask=row < num_rows, other=0)
    if row == num_rows:
        zero_padding(out + i, begin, num_tokens, mask_i, INNER)
        return
    end = tl.load(starts + row + 1)
    if begin == end:
        return
    position = tl.load(contexts + row) - (end - begin)
    token = begin.to(tl.int64)
    table = tables + table_row.to(tl.int64) * table_stride
    n = tl.arange(0, N_PAD)
    mask_n = n < N
    mask = mask_n[None, :] & mask_i[:, None]
    offsets = n[None, :] * INNER + i[:, None] * unit
    state = tl.zeros((BLOCK_I, N_PAD), tl.float32)
    if position > 0:
        slot = first_slot(table, position, interval)
        state = tl.load(states + slot * (N * INNER) + offsets, mask=mask, other=0.0)
    rates = tl.load(A + i[:, None] * N + n[None, :] * unit, mask=mask, other=0.0).to(tl.float32)
    bias = None
    if dt_bias is not None:
        bias = tl.load(dt_bias + i, mask=mask_i, other=0.0)

    x += i
    dt += i
    B += n
    C += n
    if z is not None:
        z += i
    x_1, dt_1, b_1, c_1, z_1 = _load_token(
        x, dt, B, C, z, token, mask_i, mask_n, x_stride, dt_stride, b_stride, c_stride, z_stride
    )
    table += position // interval
    left = interval - position % interval  # tokens to the end of an interval
    for _ in range(begin, end):
        x_t, dt_t, b_t = x_1.to(tl.float32), dt_1.to(tl.float32), b_1.to(tl.float32)
        c_t, z_t = c_1.to(tl.float32), z_1.to(tl.float32)
        x_1, dt_1, b_1, c_1, z_1 = _load_token(
            x, dt, B, C, z, tl.minimum(token + 1, end - 1), mask_i, mask_n,
            x_stride, dt_stride, b_stride, c_stride, z_stride,
        )  # fmt: skip
        dt_t = step_size(dt_t, bias, SOFTPLUS, dt.dtype.element_ty)
        added = b_t[None, :] * (dt_t * x_t)[:, None]
        state = exp(rates * dt_t[:, None]) * state + added
        # Hugging Face's modules read a state that is rounded to the dtype of their inputs.
        y = rounded(tl.sum(rounded(state, DTYPE) * c_t[None, :], 1), DTYPE)
        if D is not None:
            SUM: tl.constexpr = DTYPE if D.dtype.element_ty == DTYPE else tl.float32
            skip = tl.load(D + i, mask=mask_i, other=0.0).to(tl.float32)
            y = rounded(y + rounded(x_t * skip, SUM), SUM)
        if z is not None:
            y *= rounded(silu(z_t), z.dtype.element_ty)
        OUT: tl.constexpr = out.dtype.element_ty
        tl.store(out + token * INNER + i, rounded(y, OUT).to(OUT), mask=mask_i)
        token += 1
        left -= 1
        if (left == 0) | (token == end):
            slot = tl.load(table).to(tl.int64)
            tl.store(states + slot * (N * INNER) + offsets, state, mask=mask)
            table += 1
            left = interval


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    rows: StepRows,
    dt_softplus: bool,
) -> Tensor:
    """As :func:`.ops.selective_scan`."""
    out = torch.empty(x.shape, dtype=result_type(x, D, z), device=x.device)
    num_rows, (size, inner) = len(rows.context_lens), states.shape[1:]
    if not len(x):
        return out
    # The kernel steps over tokens; what a token has must lie side by side.
    tokens = [
        one if one is None or one.stride(1) == 1 else one.contiguous() for one in (x, dt, B, C, z)
    ]
    x_rows, dt_rows, b_rows, c_rows, z_rows = tokens
    _selective_scan_kernel[(triton.cdiv(inner, _BLOCK_I), num_rows + 1)](
        x_rows, dt_rows, A.contiguous(), b_rows, c_rows, D, z_rows, dt_bias, states, out,
        rows.query_starts, rows.context_lens, rows.state_tables, rows.table_rows, num_rows,
        len(x), rows.interval, rows.state_tables.stride(0), 1,
        *(0 if one is None else one.stride(0) for one in tokens),
        INNER=inner,
        N=size,
        BLOCK_I=_BLOCK_I,
        SOFTPLUS=dt_softplus,
        num_warps=1,
    )  # fmt: skip
    return out
