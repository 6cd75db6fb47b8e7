"""Recurrences that process token by token, as Triton kernels: the delta rule with a decay per
channel of the keys (Kimi Linear), and Mamba-1. :mod:`.cpu` has the equations.

A program processes the tokens of one row with a part of its state in registers. For the delta rule
that is a tile of one head's state, with all keys and some values; for Mamba-1 the state of some
channels. The same kernel serves decode, where a row has one token, and long prompts, so both
compute the same bits. No choice depends on the batch, no batch size specialises the kernel, and one
loop body computes every token.

A program is one warp. In the delta rule, a lane has some keys of one value: most of a sum over keys
stays in its registers, and no token waits for another warp. Tokens are prefetched.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import DeltaInputs, ScanInputs
from ..fused.rounding import exp, rounded, silu
from .cpu import result_type
from .device_functions import (
    BATCH,
    ROW_POINTERS,
    end_of_own,
    find_row,
    first_slot,
    step_size,
    zero_padding,
)
from .walk import StepRows

# Channels per program, which is one warp: two threads share the state of a channel. 16 was the
# fastest of 16, 32 and 64, for prompts and for decode.
_BLOCK_I = 16


@triton.jit
def _load_token(pointers, strides, masks, token):  # type: ignore[no-untyped-def]
    """A token's inputs in their stored dtypes, a tuple; zeros where masked."""
    loaded = ()
    for n in tl.static_range(len(pointers)):
        one = tl.load(pointers[n] + token * strides[n], mask=masks[n], other=0.0)
        loaded += (one,)  # type: ignore[assignment]
    return loaded


@triton.jit(
    do_not_specialize=BATCH,
    do_not_specialize_on_alignment=["x", "dt", "B", "C", "z", *ROW_POINTERS],
)
def _selective_scan_kernel(  # type: ignore[no-untyped-def]
    x, dt, A, B, C, D, z, dt_bias, states, out, starts, contexts, tables, table_rows, num_drafts,
    num_rows, num_tokens, interval, table_stride, unit, x_stride, dt_stride, b_stride, c_stride,
    z_stride,
    INNER: tl.constexpr, N: tl.constexpr, BLOCK_I: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Grid: ``(ceil(INNER / BLOCK_I), B + 1)``; the last row is padding.

    Shapes, with I for INNER: x, dt, z and out ``[T, I]``, A ``[I, N]``, B and C ``[T, N]``, D and
    dt_bias ``[I]``, states ``[slots, N, I]``, starts ``[B + 1]``, contexts ``[B]``, tables ``[R,
    M]``, table_rows ``[B]``, num_drafts ``[B]`` or None.

    ``unit`` is 1. It must not be a constant: the compiler would then give a thread contiguous
    elements. As an argument, it makes the compiler give a thread half of the state of one channel.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    N_PAD: tl.constexpr = triton.next_power_of_2(N)
    row = tl.program_id(1)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_i = i < INNER
    begin, end, position, table = find_row(
        starts, contexts, tables, table_rows, row, row < num_rows, table_stride
    )
    if row == num_rows:
        zero_padding(out + i, begin, num_tokens, mask_i, INNER)
        return
    if begin == end:
        return
    token = begin.to(tl.int64)
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

    if z is None:  # not read
        gate = x + i
    else:
        gate = z + i
    inputs = (x + i, dt + i, B + n, C + n, gate)
    strides = (x_stride, dt_stride, b_stride, c_stride, z_stride)
    masks = (mask_i, mask_i, mask_n, mask_n, mask_i)
    ahead = _load_token(inputs, strides, masks, token)
    table += position // interval
    left = interval - position % interval  # tokens to the end of an interval
    own_end = end_of_own(num_drafts, row, end)
    for _ in range(begin, end):
        x_t, dt_t, b_t, c_t, z_t = ahead
        x_t, dt_t, b_t = x_t.to(tl.float32), dt_t.to(tl.float32), b_t.to(tl.float32)
        c_t, z_t = c_t.to(tl.float32), z_t.to(tl.float32)
        ahead = _load_token(inputs, strides, masks, tl.minimum(token + 1, end - 1))
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
        is_kept = (left == 0) | (token == own_end)
        if num_drafts is not None:
            is_kept = is_kept & (token <= own_end)
        if is_kept:
            slot = tl.load(table).to(tl.int64)
            tl.store(states + slot * (N * INNER) + offsets, state, mask=mask)
            table += 1
            left = interval


def selective_scan(inputs: ScanInputs, states: Tensor, rows: StepRows, dt_softplus: bool) -> Tensor:
    """Same as :func:`.ops.selective_scan`."""
    x, dt, A, B, C, D, z, dt_bias = inputs
    out = x.new_empty(x.shape, dtype=result_type(inputs))
    size, inner = states.shape[1:]
    if not len(x):
        return out
    # The kernel has strides only for tokens; the elements of a token must be contiguous.
    tokens = [
        one if one is None or one.stride(1) == 1 else one.contiguous() for one in (x, dt, B, C, z)
    ]
    x_rows, dt_rows, b_rows, c_rows, z_rows = tokens
    _selective_scan_kernel[(triton.cdiv(inner, _BLOCK_I), len(rows.query_starts))](
        x_rows, dt_rows, A.contiguous(), b_rows, c_rows, D, z_rows, dt_bias, states, out,
        *rows.arguments(len(x)), 1,
        *(0 if one is None else one.stride(0) for one in tokens),
        INNER=inner,
        N=size,
        BLOCK_I=_BLOCK_I,
        SOFTPLUS=dt_softplus,
        num_warps=1,
    )  # fmt: skip
    return out


# Elements of a state per program: 64 registers per thread. With half of it, a single request's
# prompt would take three quarters of the time, but decode would take 1.5 times as long.
_TILE_ELEMENTS = 2048


@triton.jit(
    do_not_specialize=BATCH,
    do_not_specialize_on_alignment=["query", "key", "value", "decay", "beta", *ROW_POINTERS],
)
def _walked_delta_rule_kernel(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, states, out, starts, contexts, tables, table_rows, num_drafts,
    num_rows, num_tokens, interval, table_stride, unit, scale, q_stride, q_head_stride, k_stride,
    k_head_stride, v_stride, v_head_stride, a_stride, a_head_stride, b_stride, b_head_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    LANES: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """Grid: ``(H * ceil(V / BLOCK_V), B + 1)``; the last row is padding.

    Shapes: query and key ``[T, HK, K]``, value and out ``[T, H, V]``, decay ``[T, H, K]``, beta
    ``[T, H]``, states ``[slots, H, K, V]``, starts ``[B + 1]``, contexts ``[B]``, tables
    ``[R, M]``, table_rows ``[B]``, num_drafts ``[B]`` or None.

    ``unit`` is 1. It must not be a constant: the compiler would then give a thread contiguous
    values, and sums over keys would cross more lanes.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    K_PAD: tl.constexpr = triton.next_power_of_2(K)
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(1)
    head = tl.program_id(0) // TILES
    j = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = j < V
    begin, end, position, table = find_row(
        starts, contexts, tables, table_rows, row, row < num_rows, table_stride
    )
    if row == num_rows:
        zero_padding(out + head * V + j, begin, num_tokens, mask_v, H * V)
        return
    if begin == end:
        return
    token = begin.to(tl.int64)
    # A lane's keys are contiguous, so that loads of a token are wide words.
    lane, n = tl.arange(0, K_PAD) % LANES, tl.arange(0, K_PAD) // LANES
    i = lane * (K_PAD // LANES) + n
    mask_k = i < K
    mask = mask_k[None, :] & mask_v[:, None]
    # The elements of a thread differ only in the last summand, by compile-time constants.
    offsets = head * (K * V) + j[:, None] * unit + (lane * (K_PAD // LANES * V))[None, :]
    steps = (n * V)[None, :]
    state = tl.zeros((BLOCK_V, K_PAD), tl.float32)
    if position > 0:
        slot = first_slot(table, position, interval)
        state = tl.load(states + slot * (H * K * V) + offsets + steps, mask=mask, other=0.0)

    head_k = head // (H // HK)
    inputs = (
        query + head_k.to(tl.int64) * q_head_stride + i,
        key + head_k.to(tl.int64) * k_head_stride + i,
        value + head.to(tl.int64) * v_head_stride + j,
        decay + head.to(tl.int64) * a_head_stride + i,
        beta + head.to(tl.int64) * b_head_stride,
    )
    strides = (q_stride, k_stride, v_stride, a_stride, b_stride)
    masks = (mask_k, mask_k, mask_v, mask_k, True)
    ahead = _load_token(inputs, strides, masks, token)
    next_ahead = _load_token(inputs, strides, masks, tl.minimum(token + 1, end - 1))
    table += position // interval
    left = interval - position % interval  # tokens to the end of an interval
    own_end = end_of_own(num_drafts, row, end)
    for _ in range(begin, end):
        q, k, v, a, b = ahead
        q, k, v, a = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32), a.to(tl.float32)
        ahead = next_ahead
        next_ahead = _load_token(inputs, strides, masks, tl.minimum(token + 2, end - 1))
        of_q = scale
        of_k = 1.0
        if L2NORM:
            # The lengths of the vectors affect only the sums over them.
            of_q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
            of_k = tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        state *= exp(a)[None, :]
        # Both sums use the state before it changes, so neither waits for the other.
        read = tl.sum(state * q[None, :], 1)
        known = tl.sum(state * k[None, :], 1)
        d = (v - known * of_k) * (b.to(tl.float32) * of_k)
        y = (read + tl.sum(q * k, 0) * d) * of_q
        state = tl.fma(k[None, :], d[:, None], state)
        target = out + (token * H + head) * V + j
        tl.store(target, rounded(y, DTYPE).to(DTYPE), mask=mask_v)
        token += 1
        left -= 1
        is_kept = (left == 0) | (token == own_end)
        if num_drafts is not None:
            is_kept = is_kept & (token <= own_end)
        if is_kept:
            slot = tl.load(table).to(tl.int64)
            tl.store(states + slot * (H * K * V) + offsets + steps, state, mask=mask)
            table += 1
            left = interval


def delta_rule(
    inputs: DeltaInputs, states: Tensor, rows: StepRows, scale: float, l2norm: bool
) -> Tensor:
    """Same as :func:`.ops.delta_rule`, for decays ``[T, H, K]``."""
    out = inputs.query.new_empty(inputs.value.shape)
    num_heads, num_keys, num_values = states.shape[1:]
    if not len(out):
        return out
    # The kernel has strides only for tokens and heads; the elements of a head must be contiguous.
    tokens = [x if x.dim() == 2 or x.stride(2) == 1 else x.contiguous() for x in inputs]
    tile = block_v(num_keys, num_values)
    _walked_delta_rule_kernel[(num_heads * triton.cdiv(num_values, tile), len(rows.query_starts))](
        *tokens, states, out,
        *rows.arguments(len(out)), 1, scale,
        *(x.stride(n) for x in tokens for n in (0, 1)),
        H=num_heads,
        HK=inputs.query.shape[1],
        K=num_keys,
        V=num_values,
        BLOCK_V=tile,
        LANES=lanes(num_keys, tile),
        L2NORM=l2norm,
        num_warps=1,
    )  # fmt: skip
    return out


def block_v(num_keys: int, num_values: int) -> int:
    """Values per program. The number depends only on the state's shape, because it determines the
    order of additions."""
    fitting = max(4, _TILE_ELEMENTS // triton.next_power_of_2(num_keys))
    return min(fitting, triton.next_power_of_2(num_values))


def lanes(num_keys: int, num_values: int) -> int:
    """Lanes of a warp that share the keys of one of ``num_values`` values of a program."""
    return min(max(32 // num_values, 1), triton.next_power_of_2(num_keys))
