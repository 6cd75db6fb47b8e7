"""The gated delta rule and Mamba-2 as a Triton kernel; :mod:`.cpu_linear_state` has the equations.

A program walks the tokens of one row with a tile of one head's state in registers: all keys, some
values. The same kernel serves decoding, where a row has one token, and long prompts, so that both
give the same bits: no choice follows the batch, nothing that does specialises the kernel, and one
loop body computes every token.

A program is one warp: a lane has some keys of one value, so that most of a sum over keys stays in
its registers, and no token waits for another warp. The tokens to come are asked for two ahead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fused.rounding import rounded
from .device_functions import exp, first_slot, step_size, zero_padding
from .walk import StepRows

# Elements of a state that a program holds: 64 registers of a thread. With half of it the prompt of
# one request alone would take three quarters of the time, and decoding half more.
_TILE_ELEMENTS = 2048


@triton.jit
def _load_token(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, token, mask_k, mask_v,
    q_stride, k_stride, v_stride, a_stride, b_stride, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A token's query, key, value, decay and beta (0 without) as they lie in memory; zeros where
    masked."""
    q = tl.load(query + token * q_stride, mask=mask_k, other=0.0)
    k = tl.load(key + token * k_stride, mask=mask_k, other=0.0)
    v = tl.load(value + token * v_stride, mask=mask_v, other=0.0)
    if CHANNELS:
        a = tl.load(decay + token * a_stride, mask=mask_k, other=0.0)
    else:
        a = tl.load(decay + token * a_stride)
    b = 0.0
    if beta is not None:
        b = tl.load(beta + token * b_stride)
    return q, k, v, a, b


@triton.jit(
    # What follows the batch must not make new versions of the kernel: another layout of the state
    # is another order of additions.
    do_not_specialize=[
        "num_rows", "num_tokens", "interval", "table_stride", "unit", "q_stride", "q_head_stride",
        "k_stride", "k_head_stride", "v_stride", "v_head_stride", "a_stride", "a_head_stride",
        "b_stride", "b_head_stride",
    ],
    do_not_specialize_on_alignment=[
        "query", "key", "value", "decay", "beta", "starts", "contexts", "tables",
    ],
)  # fmt: skip
def _linear_state_kernel(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, rates, dt_bias, skip, states, out,
    starts, contexts, tables, num_rows, num_tokens, interval, table_stride, unit,
    scale, dt_min, dt_max, q_stride, q_head_stride, k_stride, k_head_stride,
    v_stride, v_head_stride, a_stride, a_head_stride, b_stride, b_head_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    LANES: tl.constexpr, L2NORM: tl.constexpr, CHANNELS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """The delta rule given ``beta``; else Mamba-2, of which ``decay`` is dt. Grid: ``(H * ceil(V /
    BLOCK_V), B + 1)``; the last row is that of padding.

    Shapes: query and key ``[T, HK, K]``, value and out ``[T, H, V]``, decay ``[T, H]`` or, with
    CHANNELS, ``[T, H, K]``, beta ``[T, H]``, rates, dt_bias and skip ``[H]``, states
    ``[slots, H, K, V]``, starts ``[B + 1]``, contexts ``[B]``, tables ``[B, M]``.

    ``unit`` is 1. The compiler, which must not know, would otherwise give a thread values that lie
    side by side, and sums over keys would cross more lanes.
    """
    DELTA: tl.constexpr = beta is not None
    DTYPE: tl.constexpr = out.dtype.element_ty
    K_PAD: tl.constexpr = triton.next_power_of_2(K)
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(1)
    head = tl.program_id(0) // TILES
    j = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = j < V
    begin = tl.load(starts + row)
    if row == num_rows:
        zero_padding(out + head * V + j, begin, num_tokens, mask_v, H * V)
        return
    end = tl.load(starts + row + 1)
    if begin == end:
        return
    position = tl.load(contexts + row) - (end - begin)
    token = begin.to(tl.int64)
    table = tables + row.to(tl.int64) * table_stride
    # A lane's keys lie side by side, so that what is loaded of a token comes in wide words.
    lane, n = tl.arange(0, K_PAD) % LANES, tl.arange(0, K_PAD) // LANES
    i = lane * (K_PAD // LANES) + n
    mask_k = i < K
    mask = mask_k[None, :] & mask_v[:, None]
    # Of a thread's elements only the last summand differs, by numbers the compiler knows.
    offsets = head * (K * V) + j[:, None] * unit + (lane * (K_PAD // LANES * V))[None, :]
    steps = (n * V)[None, :]
    state = tl.zeros((BLOCK_V, K_PAD), tl.float32)
    if position > 0:
        slot = first_slot(table, position, interval)
        state = tl.load(states + slot * (H * K * V) + offsets + steps, mask=mask, other=0.0)

    head_k = head // (H // HK)
    query += head_k.to(tl.int64) * q_head_stride + i
    key += head_k.to(tl.int64) * k_head_stride + i
    value += head.to(tl.int64) * v_head_stride + j
    decay += head.to(tl.int64) * a_head_stride
    if CHANNELS:
        decay += i
    if DELTA:
        beta += head.to(tl.int64) * b_head_stride
    else:
        rate = tl.load(rates + head).to(tl.float32)
        bias = None
        if dt_bias is not None:
            bias = tl.load(dt_bias + head)
    if skip is not None:
        skipped = tl.load(skip + head).to(tl.float32)

    q_1, k_1, v_1, a_1, b_1 = _load_token(
        query, key, value, decay, beta, token, mask_k, mask_v,
        q_stride, k_stride, v_stride, a_stride, b_stride, CHANNELS,
    )  # fmt: skip
    q_2, k_2, v_2, a_2, b_2 = _load_token(
        query, key, value, decay, beta, tl.minimum(token + 1, end - 1), mask_k, mask_v,
        q_stride, k_stride, v_stride, a_stride, b_stride, CHANNELS,
    )  # fmt: skip
    table += position // interval
    left = interval - position % interval  # tokens to the end of an interval
    for _ in range(begin, end):
        q, k, v, a = q_1.to(tl.float32), k_1.to(tl.float32), v_1.to(tl.float32), a_1.to(tl.float32)
        b = b_1
        q_1, k_1, v_1, a_1, b_1 = q_2, k_2, v_2, a_2, b_2
        q_2, k_2, v_2, a_2, b_2 = _load_token(
            query, key, value, decay, beta, tl.minimum(token + 2, end - 1), mask_k, mask_v,
            q_stride, k_stride, v_stride, a_stride, b_stride, CHANNELS,
        )  # fmt: skip
        if DELTA:
            of_q = scale
            of_k = 1.0
            if L2NORM:
                # Of the vectors' lengths only the sums over them need to know.
                of_q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
                of_k = tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            a = exp(a)
            if CHANNELS:
                state *= a[None, :]
            else:
                state *= a
            # Both sums are of the state before it changes: neither waits for the other.
            read = tl.sum(state * q[None, :], 1)
            known = tl.sum(state * k[None, :], 1)
            d = (v - known * of_k) * (b.to(tl.float32) * of_k)
            y = (read + tl.sum(q * k, 0) * d) * of_q
            state = tl.fma(k[None, :], d[:, None], state)
        else:
            dt = step_size(a, bias, SOFTPLUS, decay.dtype.element_ty)
            dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
            d = v * dt
            state *= exp(rate * dt)
            state = tl.fma(k[None, :], d[:, None], state)
            y = tl.sum(state * q[None, :], 1)
        if skip is not None:
            y += skipped * v
        target = out + (token * H + head) * V + j
        tl.store(target, rounded(y, DTYPE).to(DTYPE), mask=mask_v)
        token += 1
        left -= 1
        if (left == 0) | (token == end):
            slot = tl.load(table).to(tl.int64)
            tl.store(states + slot * (H * K * V) + offsets + steps, state, mask=mask)
            table += 1
            left = interval


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: StepRows,
    scale: float,
    l2norm: bool,
) -> Tensor:
    """As :func:`.ops.delta_rule`."""
    out = torch.empty(value.shape, dtype=query.dtype, device=query.device)
    limits = (scale, 0.0, 0.0)
    options = {"L2NORM": l2norm, "CHANNELS": decay.dim() == 3, "SOFTPLUS": False}
    _launch(
        (query, key, value, decay, beta), (None, None, None), states, out, rows, limits, options
    )
    return out


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    rows: StepRows,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """As :func:`.ops.ssd_scan`."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    limits = (1.0, dt_min, dt_max)
    options = {"L2NORM": False, "CHANNELS": False, "SOFTPLUS": dt_softplus}
    _launch((C, B, x, dt, None), (A, dt_bias, D), states, out, rows, limits, options)
    return out


def block_v(num_keys: int, num_values: int) -> int:
    """Values a program holds; of a state's shape alone, as it is part of the order of additions."""
    fitting = max(4, _TILE_ELEMENTS // triton.next_power_of_2(num_keys))
    return min(fitting, triton.next_power_of_2(num_values))


def lanes(num_keys: int, num_values: int) -> int:
    """Lanes of a warp that share the keys of one of ``num_values`` values of a program."""
    return min(max(32 // num_values, 1), triton.next_power_of_2(num_keys))


def _launch(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    per_head: tuple[Tensor | None, Tensor | None, Tensor | None],
    states: Tensor,
    out: Tensor,
    rows: StepRows,
    limits: tuple[float, float, float],
    options: dict[str, Any],
) -> None:
    num_heads, num_keys, num_values = states.shape[1:]
    # The kernel steps over tokens and heads; what lies within a head must lie side by side.
    given = [x if x is None or x.dim() == 2 or x.stride(2) == 1 else x.contiguous() for x in tokens]
    strides = [0 if x is None else x.stride(n) for x in given for n in (0, 1)]
    tile = block_v(num_keys, num_values)
    num_rows = len(rows.context_lens)
    if not len(out):
        return
    _linear_state_kernel[(num_heads * triton.cdiv(num_values, tile), num_rows + 1)](
        *given, *per_head, states, out,
        rows.query_starts, rows.context_lens, rows.state_tables, num_rows, len(out), rows.interval,
        rows.state_tables.stride(0), 1, *limits, *strides,
        H=num_heads,
        HK=tokens[0].shape[1],
        K=num_keys,
        V=num_values,
        BLOCK_V=tile,
        LANES=lanes(num_keys, tile),
        num_warps=1,
        **options,
    )  # fmt: skip
