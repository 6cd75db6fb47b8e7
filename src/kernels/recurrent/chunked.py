"""The gated delta rule and Mamba-2 as a Triton kernel, a chunk of positions at a time.

Of a chunk that begins with state S, with g the decays' logarithms summed up from its begin:

    A[i, j] = beta[i] exp(g[i] - g[j]) (k[i] . k[j]), j < i;  P[i, j] = exp(g[i] - g[j]) (q[i] . k[j]), j <= i
    u = (I + A)^-1 (beta (v - exp(g) k S))      (Mamba-2: u = dt x)
    y = exp(g) q S + P u
    S after the chunk = exp(g[last]) S + sum over i of exp(g[last] - g[i]) k[i] (x) u[i]

(Yang et al. 2024, Dao and Gu 2024). All are matmuls, of which a row for position i adds up
nothing but zeros from positions behind i. So what a position gives does not depend on how far its
chunk has come, and one loop body computes chunks of prompts and, with the positions before it
taken from the slot, a decode step: a slot holds the state before the chunk and the inputs since
(:mod:`.chunk_layout`). The state is only written at a chunk's end.

Matmuls are of bfloat16 with float32 sums; a float32 factor is split into two bfloat16, 16 bits of
its mantissa. Of inputs in other dtypes they are of float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fused.rounding import EMULATE, rounded
from . import chunk_layout
from .device_functions import exp, first_slot, step_size, zero_padding
from .walk import StepRows

_NUM_WARPS = 4


@triton.jit
def _split(x):  # type: ignore[no-untyped-def]
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _matmul(x, y, total, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """``total + x y`` for float32 x; with SPLIT, y in bfloat16 is exact."""
    if SPLIT:
        x_high, x_low = _split(x)
        if y.dtype == tl.bfloat16:
            total = tl.dot(x_low, y, total)
            total = tl.dot(x_high, y, total)
        else:
            y_high, y_low = _split(y)
            total = tl.dot(x_low, y_high, total)
            total = tl.dot(x_high, y_low, total)
            total = tl.dot(x_high, y_high, total)
    else:
        total = tl.dot(x, y.to(tl.float32), total, input_precision="ieee")
    return total


@triton.jit
def _inner(x, y, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """``x y^T`` of tokens' queries or keys, in float32."""
    if SPLIT:
        return tl.dot(x, tl.trans(y))
    return tl.dot(x.to(tl.float32), tl.trans(y.to(tl.float32)), input_precision="ieee")


@triton.jit
def _diagonal(x, i, j):  # type: ignore[no-untyped-def]
    return tl.sum(tl.where(i == j, x, 0.0), 1)


@triton.jit
def _inverse(a, i, j, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(I + a)^-1`` of a strictly lower triangular, from blocks of 2 on by doubling them: the
    inverse of ``[[b, 0], [c, d]]`` has ``-d^-1 c b^-1`` below its diagonal."""
    x = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for LEVEL in tl.static_range(1, CHUNK.bit_length() - 1):
        SIDE: tl.constexpr = 1 << LEVEL
        below = tl.where((i // (2 * SIDE) == j // (2 * SIDE)) & (i // SIDE > j // SIDE), a, 0.0)
        left = tl.dot(x, below, input_precision="ieee")
        x -= tl.dot(left, x, input_precision="ieee")
    return x


@triton.jit
def _load_chunk(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, token, index, inside, mask_k, mask_v,
    q_stride, k_stride, v_stride, a_stride, b_stride,
):  # fmt: skip
    """Queries and keys ``[CHUNK, K]``, values ``[BLOCK_V, CHUNK]``, decays and betas ``[CHUNK]`` of
    positions ``index`` of a chunk that begins at ``token``; zeros where not ``inside``."""
    tokens = token + index
    mask = inside[:, None] & mask_k[None, :]
    q = tl.load(query + tokens[:, None] * q_stride, mask=mask, other=0.0)
    k = tl.load(key + tokens[:, None] * k_stride, mask=mask, other=0.0)
    mask = mask_v[:, None] & inside[None, :]
    v = tl.load(value + tokens[None, :] * v_stride, mask=mask, other=0.0)
    a = tl.load(decay + tokens * a_stride, mask=inside, other=0.0).to(tl.float32)
    b = a
    if beta is not None:
        b = tl.load(beta + tokens * b_stride, mask=inside, other=0.0).to(tl.float32)
    return q, k, v, a, b


@triton.jit(
    # What follows the batch must not make new versions of the kernel.
    do_not_specialize=[
        "num_rows", "num_tokens", "interval", "table_stride", "q_stride", "q_head_stride",
        "k_stride", "k_head_stride", "v_stride", "v_head_stride", "a_stride", "a_head_stride",
        "b_stride", "b_head_stride",
    ],
    do_not_specialize_on_alignment=[
        "query", "key", "value", "decay", "beta", "starts", "contexts", "tables",
    ],
)  # fmt: skip
def _chunked_kernel(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, rates, dt_bias, skip, states, out,
    starts, contexts, tables, num_rows, num_tokens, interval, table_stride,
    scale, dt_min, dt_max, q_stride, q_head_stride, k_stride, k_head_stride,
    v_stride, v_head_stride, a_stride, a_head_stride, b_stride, b_head_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    K_PAD: tl.constexpr, CHUNK: tl.constexpr, LAYOUT: tl.constexpr, L2NORM: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """The delta rule given ``beta``; else Mamba-2, of which ``decay`` is dt. Grid: ``(H * ceil(V /
    BLOCK_V), B + 1)``; the last row is that of padding.

    Shapes: query and key ``[T, HK, K]``, value and out ``[T, H, V]``, decay and beta ``[T, H]``,
    rates, dt_bias and skip ``[H]``, states ``[slots, H * ceil(V / BLOCK_V), record]``, starts
    ``[B + 1]``, contexts ``[B]``, tables ``[B, M]``.
    """
    DELTA: tl.constexpr = beta is not None
    DTYPE: tl.constexpr = out.dtype.element_ty
    KEY: tl.constexpr = key.dtype.element_ty
    VALUE: tl.constexpr = value.dtype.element_ty
    SPLIT: tl.constexpr = KEY == tl.bfloat16 and not EMULATE
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(1)
    head = tl.program_id(0) // TILES
    v_index = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = v_index < V
    begin = tl.load(starts + row)
    if row == num_rows:
        zero_padding(out + head * V + v_index, begin, num_tokens, mask_v, H * V)
        return
    end = tl.load(starts + row + 1)
    if begin == end:
        return
    position = tl.load(contexts + row) - (end - begin)
    table = tables + row.to(tl.int64) * table_stride
    k_index = tl.arange(0, K_PAD)
    mask_k = k_index < K
    # Of the slot 0: what this program keeps, as pointers to a state, keys, values and scalars.
    states += tl.program_id(0) * LAYOUT[3]
    SLOT: tl.constexpr = H * TILES * LAYOUT[3]
    s_offsets = tl.arange(0, BLOCK_V)[:, None] * K + k_index[None, :]
    index = tl.arange(0, CHUNK)
    k_offsets = index[:, None] * K + k_index[None, :]
    v_offsets = index[None, :] * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]
    mask_s = mask_v[:, None] & mask_k[None, :]

    head_k = head // (H // HK)
    query += head_k.to(tl.int64) * q_head_stride + k_index[None, :]
    key += head_k.to(tl.int64) * k_head_stride + k_index[None, :]
    value += head.to(tl.int64) * v_head_stride + v_index[:, None]
    decay += head.to(tl.int64) * a_head_stride
    out += head * V + v_index[:, None]
    if DELTA:
        beta += head.to(tl.int64) * b_head_stride
    else:
        rate = tl.load(rates + head).to(tl.float32)
        bias = None
        if dt_bias is not None:
            bias = tl.load(dt_bias + head)
    if skip is not None:
        skipped = tl.load(skip + head).to(tl.float32)

    # Positions [i0, i1) of a chunk of `full` are computed next, the first of them that of `token`.
    offset = position % interval
    i0 = offset % CHUNK
    full = tl.minimum(CHUNK, interval - (offset - i0))
    token = begin.to(tl.int64)
    i1 = tl.minimum(full, i0 + (end - begin))
    state = tl.zeros((BLOCK_V, K_PAD), tl.float32)
    record = states
    if position > 0:
        record += first_slot(table, position, interval) * SLOT
        state = tl.load(record + s_offsets, mask=mask_s, other=0.0)
    inside = (index >= i0) & (index < i1)
    q_1, k_1, v_1, a_1, b_1 = _load_chunk(
        query, key, value, decay, beta, token - i0, index, inside, mask_k, mask_v,
        q_stride, k_stride, v_stride, a_stride, b_stride,
    )  # fmt: skip
    if i0 > 0:
        old = index < i0
        keys = (record + LAYOUT[0]).to(tl.pointer_type(KEY), bitcast=True) + k_offsets
        k_1 = tl.where(
            old[:, None], tl.load(keys, mask=old[:, None] & mask_k[None, :], other=0.0), k_1
        )
        values = (record + LAYOUT[1]).to(tl.pointer_type(VALUE), bitcast=True) + v_offsets
        v_1 = tl.where(
            old[None, :], tl.load(values, mask=mask_v[:, None] & old[None, :], other=0.0), v_1
        )
        a_1 = tl.where(old, tl.load(record + LAYOUT[2] + index, mask=old, other=0.0), a_1)
        if DELTA:
            b_1 = tl.where(
                old, tl.load(record + LAYOUT[2] + CHUNK + index, mask=old, other=0.0), b_1
            )

    i, j = index[:, None], index[None, :]
    # A state that begins an interval comes from another slot than it goes to.
    is_new = offset == 0
    left = end - begin
    while left > 0:
        q, k, v, a, b = q_1, k_1, v_1, a_1, b_1
        first, last, size = i0, i1, full
        new = (index >= first) & (index < last)
        tokens = token - first + index
        token += last - first
        left -= last - first
        position += last - first
        offset = position % interval
        i0 = 0
        full = tl.minimum(CHUNK, interval - offset)
        i1 = tl.minimum(full, left)
        q_1, k_1, v_1, a_1, b_1 = _load_chunk(
            query, key, value, decay, beta, token, index, index < i1, mask_k, mask_v,
            q_stride, k_stride, v_stride, a_stride, b_stride,
        )  # fmt: skip

        raw_a = a
        scores = _inner(q, k, SPLIT)
        if DELTA:
            known = _inner(k, k, SPLIT)
            of_k = tl.full((CHUNK,), 1.0, tl.float32)
            of_q = of_k
            if L2NORM:
                of_k = tl.rsqrt(_diagonal(known, i, j) + 1e-6)
                of_q = tl.rsqrt(_diagonal(_inner(q, q, SPLIT), i, j) + 1e-6)
            of_q *= scale
            known = known * of_k[:, None] * of_k[None, :]
            scores = scores * of_q[:, None] * of_k[None, :]
        else:
            dt = step_size(a, bias, SOFTPLUS, decay.dtype.element_ty)
            dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
            dt = tl.where(index < last, dt, 0.0)
            a = rate * dt
        g = tl.cumsum(a, 0)
        grown = exp(g)
        # Nothing is taken of positions behind, the exponentials of which may be infinite.
        decayed = exp(tl.where(i >= j, g[:, None] - g[None, :], 0.0))
        scores = tl.where(i >= j, scores * decayed, 0.0)
        zeros = tl.zeros((BLOCK_V, CHUNK), tl.float32)
        read = _matmul(state, tl.trans(q), zeros, SPLIT)
        wide_v = v.to(tl.float32)
        if DELTA:
            missing = _matmul(state, tl.trans(k), zeros, SPLIT)
            missing = (wide_v - missing * (of_k * grown)[None, :]) * b[None, :]
            corrections = tl.where(i > j, known * decayed * b[:, None], 0.0)
            inverse = _inverse(corrections, i, j, CHUNK)
            u = _matmul(missing, tl.trans(inverse), zeros, SPLIT)
            read *= (of_q * grown)[None, :]
        else:
            u = wide_v * dt[None, :]
            read *= grown[None, :]
        y = _matmul(u, tl.trans(scores), read, SPLIT)
        if skip is not None:
            y += skipped * wide_v
        target = out + tokens[None, :] * (H * V)
        tl.store(target, rounded(y, DTYPE).to(DTYPE), mask=mask_v[:, None] & new[None, :])

        record = states + tl.load(table + (position - 1) // interval).to(tl.int64) * SLOT
        if last == size:
            g_last = tl.sum(tl.where(index == size - 1, g, 0.0), 0)
            weight = exp(g_last - g)
            if DELTA:
                weight *= of_k
            # Padding has decays of 0, weights of 1, and keys of zeros.
            state = _matmul(u * weight[None, :], k, state * exp(g_last), SPLIT)
            is_new = True
        elif left == 0:
            mask = new[:, None] & mask_k[None, :]
            keys = (record + LAYOUT[0]).to(tl.pointer_type(KEY), bitcast=True) + k_offsets
            tl.store(keys, k, mask=mask)
            values = (record + LAYOUT[1]).to(tl.pointer_type(VALUE), bitcast=True) + v_offsets
            tl.store(values, v, mask=mask_v[:, None] & new[None, :])
            tl.store(record + LAYOUT[2] + index, raw_a, mask=new)
            if DELTA:
                tl.store(record + LAYOUT[2] + CHUNK + index, b, mask=new)
        if is_new & ((left == 0) | (offset == 0)):
            tl.debug_barrier()  # other threads of this program may still be reading
            tl.store(record + s_offsets, state, mask=mask_s)


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
    """As :func:`.ops.delta_rule`, for decays ``[T, H]`` and states of :mod:`.chunk_layout`."""
    out = torch.empty(value.shape, dtype=query.dtype, device=query.device)
    limits = (scale, 0.0, 0.0)
    options = {"L2NORM": l2norm, "SOFTPLUS": False}
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
    """As :func:`.ops.ssd_scan`, for states of :mod:`.chunk_layout`."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    limits = (1.0, dt_min, dt_max)
    options = {"L2NORM": False, "SOFTPLUS": dt_softplus}
    _launch((C, B, x, dt, None), (A, dt_bias, D), states, out, rows, limits, options)
    return out


def _launch(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    per_head: tuple[Tensor | None, Tensor | None, Tensor | None],
    states: Tensor,
    out: Tensor,
    rows: StepRows,
    limits: tuple[float, float, float],
    options: dict[str, Any],
) -> None:
    num_rows, num_heads, num_values = len(rows.context_lens), *out.shape[1:]
    if not len(out):
        return
    # The kernel steps over tokens and heads; what lies within a head must lie side by side.
    given = [x if x is None or x.dim() == 2 or x.stride(2) == 1 else x.contiguous() for x in tokens]
    strides = [0 if x is None else x.stride(n) for x in given for n in (0, 1)]
    query, key, value = tokens[:3]
    num_keys = key.shape[2]
    layout = chunk_layout.record_layout(num_keys, num_values, key.dtype, value.dtype)
    _chunked_kernel[(states.shape[1], num_rows + 1)](
        *given, *per_head, states, out,
        rows.query_starts, rows.context_lens, rows.state_tables, num_rows, len(out), rows.interval,
        rows.state_tables.stride(0), *limits, *strides,
        H=num_heads,
        HK=key.shape[1],
        K=num_keys,
        V=num_values,
        BLOCK_V=chunk_layout.block_v(num_keys, num_values),
        K_PAD=chunk_layout.padded(num_keys),
        CHUNK=chunk_layout.CHUNK,
        LAYOUT=tuple(layout),
        num_warps=_NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
        **options,
    )  # fmt: skip
