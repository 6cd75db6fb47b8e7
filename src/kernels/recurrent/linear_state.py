"""The gated delta rule and Mamba-2 as a Triton kernel; :mod:`.cpu_linear_state` has the equations.

A program walks the tokens of one row with one head's state, or a tile of its values, in registers.
The same kernel serves decoding, where a row has one token, and long prompts, so that both give the
same bits: no choice follows the batch, and nothing that does specialises the kernel. Sums and
products are not contracted.

A program is one warp: what it sums over the keys stays in a warp's registers, and no token waits at
a barrier. The next token is asked for before the present one is worked on.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fused.rounding import rounded
from .device_functions import exp, first_slot, step_size
from .walk import StepRows

# Elements of a state that a program holds: 64 registers of a thread.
_TILE_ELEMENTS = 2048


@triton.jit
def _load_token(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, token, mask_k, mask_v,
    q_stride, k_stride, v_stride, a_stride, b_stride, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A token's query, key, value, decay and beta (0 without), float32; zeros where masked."""
    q = tl.load(query + token * q_stride, mask=mask_k, other=0.0).to(tl.float32)
    k = tl.load(key + token * k_stride, mask=mask_k, other=0.0).to(tl.float32)
    v = tl.load(value + token * v_stride, mask=mask_v, other=0.0).to(tl.float32)
    if CHANNELS:
        a = tl.load(decay + token * a_stride, mask=mask_k, other=0.0).to(tl.float32)
    else:
        a = tl.load(decay + token * a_stride).to(tl.float32)
    b = 0.0
    if beta is not None:
        b = tl.load(beta + token * b_stride).to(tl.float32)
    return q, k, v, a, b


@triton.jit(
    # What follows the batch must not make new versions of the kernel: another layout of the state
    # is another order of additions.
    do_not_specialize=[
        "interval", "table_stride", "q_stride", "q_head_stride", "k_stride", "k_head_stride",
        "v_stride", "v_head_stride", "a_stride", "a_head_stride", "b_stride", "b_head_stride",
    ],
    do_not_specialize_on_alignment=[
        "query", "key", "value", "decay", "beta", "starts", "contexts", "tables",
    ],
)  # fmt: skip
def _linear_state_kernel(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, rates, dt_bias, skip, states, out,
    starts, contexts, tables, interval, table_stride, scale, dt_min, dt_max,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    a_stride, a_head_stride, b_stride, b_head_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    L2NORM: tl.constexpr, CHANNELS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """The delta rule given ``beta``; else Mamba-2, of which ``decay`` is dt. Grid: ``(H * ceil(V /
    BLOCK_V), B)``.

    Shapes: query and key ``[T, HK, K]``, value and out ``[T, H, V]``, decay ``[T, H]`` or, with
    CHANNELS, ``[T, H, K]``, beta ``[T, H]``, rates, dt_bias and skip ``[H]``, states
    ``[slots, H, K, V]``, starts ``[B + 1]``, contexts ``[B]``, tables ``[B, M]``.
    """
    DELTA: tl.constexpr = beta is not None
    DTYPE: tl.constexpr = out.dtype.element_ty
    K_PAD: tl.constexpr = triton.next_power_of_2(K)
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(1)
    head = tl.program_id(0) // TILES
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    if begin == end:
        return
    position = tl.load(contexts + row) - (end - begin)
    token = begin.to(tl.int64)
    table = tables + row.to(tl.int64) * table_stride
    i = tl.arange(0, K_PAD)
    j = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = i < K
    mask_v = j < V
    mask = mask_k[:, None] & mask_v[None, :]
    offsets = head * (K * V) + i[:, None] * V + j[None, :]
    state = tl.zeros((K_PAD, BLOCK_V), tl.float32)
    if position > 0:
        slot = first_slot(table, position, interval)
        state = tl.load(states + slot * (H * K * V) + offsets, mask=mask, other=0.0)

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

    next_q, next_k, next_v, next_a, next_b = _load_token(
        query, key, value, decay, beta, token, mask_k, mask_v,
        q_stride, k_stride, v_stride, a_stride, b_stride, CHANNELS,
    )  # fmt: skip
    for _ in range(begin, end):
        q, k, v, a, b = next_q, next_k, next_v, next_a, next_b
        following = tl.minimum(token + 1, end - 1)
        next_q, next_k, next_v, next_a, next_b = _load_token(
            query, key, value, decay, beta, following, mask_k, mask_v,
            q_stride, k_stride, v_stride, a_stride, b_stride, CHANNELS,
        )  # fmt: skip
        x = v
        if DELTA:
            if L2NORM:
                q = tl.div_rn(q, tl.sqrt_rn(tl.sum(q * q, 0) + 1e-6))
                k = tl.div_rn(k, tl.sqrt_rn(tl.sum(k * k, 0) + 1e-6))
            q *= scale
            a = exp(a)
        else:
            dt = step_size(a, bias, SOFTPLUS, decay.dtype.element_ty)
            dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
            a = exp(rate * dt)
            v *= dt
        # Both sums are of the state before the token: neither waits for the other.
        y = tl.sum(state * (q * a)[:, None], 0)
        if DELTA:
            v = v * b - tl.sum(state * (k * b * a)[:, None], 0)
        y += tl.sum(q * k, 0) * v
        if CHANNELS:
            state *= a[:, None]
        else:
            state *= a
        state += k[:, None] * v[None, :]
        if skip is not None:
            y += tl.load(skip + head).to(tl.float32) * x
        target = out + (token * H + head) * V + j
        tl.store(target, rounded(y, DTYPE).to(DTYPE), mask=mask_v)
        position += 1
        token += 1
        if (position % interval == 0) | (token == end):
            slot = first_slot(table, position, interval)
            tl.store(states + slot * (H * K * V) + offsets, state, mask=mask)


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
    out = torch.zeros(value.shape, dtype=query.dtype, device=query.device)
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
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    limits = (1.0, dt_min, dt_max)
    options = {"L2NORM": False, "CHANNELS": False, "SOFTPLUS": dt_softplus}
    _launch((C, B, x, dt, None), (A, dt_bias, D), states, out, rows, limits, options)
    return out


def block_v(num_keys: int, num_values: int) -> int:
    """Values a program holds; of a state's shape alone, as it is part of the order of additions."""
    fitting = max(4, _TILE_ELEMENTS // triton.next_power_of_2(num_keys))
    return min(fitting, triton.next_power_of_2(num_values))


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
    if not num_rows or not len(out):
        return
    _linear_state_kernel[(num_heads * triton.cdiv(num_values, tile), num_rows)](
        *given, *per_head, states, out,
        rows.query_starts, rows.context_lens, rows.state_tables, rows.interval,
        rows.state_tables.stride(0), *limits, *strides,
        H=num_heads,
        HK=tokens[0].shape[1],
        K=num_keys,
        V=num_values,
        BLOCK_V=tile,
        num_warps=1,
        enable_fp_fusion=False,
        **options,
    )  # fmt: skip
