"""The gated delta rule and Mamba-2 as Triton kernels, a chunk of positions at a time.

Of a chunk that begins with state S, with g the decays' logarithms summed up from its begin:

    A[i, j] = beta[i] exp(g[i] - g[j]) (k[i] . k[j]) for j < i
    P[i, j] = exp(g[i] - g[j]) (q[i] . k[j])         for j <= i
    u = (I + A)^-1 beta (v - exp(g) k S)             (Mamba-2: u = dt x)
    y = exp(g) q S + P u
    S after the chunk = exp(g[last]) S + sum over i of exp(g[last] - g[i]) k[i] (x) u[i]

(Yang et al. 2024, Dao and Gu 2024). All are matmuls, of which a row for position i adds up
nothing but zeros from positions behind i. So what a position gives does not depend on how far its
chunk has come, and one loop body computes chunks of prompts and, with the positions before it
taken from the slot, a decode step: a slot holds the state before the chunk and the inputs since
(:mod:`.chunk_layout`). The state is only written at a chunk's end.

Matmuls are of bfloat16 with float32 sums; a float32 factor is split into two bfloat16, 16 bits of
its mantissa. Of inputs in other dtypes they are of float32.

A program walks the chunks of one row with a tile of one head's state in registers. What follows from
a chunk's queries, keys and decays alone (:mod:`.chunk_inner`) a kernel computes before, for all
chunks side by side; in a step of a token a row, whose chunks are one for each row, each program does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fused.rounding import EMULATE, rounded
from . import chunk_layout
from .chunk_inner import (
    delta_inner, halves, inner_products, load_rows, load_scalars, matmul, ssd_inner, step_sizes,
)  # fmt: skip
from .device_functions import first_slot, zero_padding
from .walk import StepRows

_NUM_WARPS = 4
# Elements that are loaded at once, where heads are of multiples of it.
_UNIT = 8
# Programs of the kernel in front beyond which those of a row share its chunks.
_MOST_PROGRAMS = 1 << 15
# What follows the batch must not make new versions of the kernels.
_BATCH = [
    "num_rows", "num_tokens", "interval", "table_stride", "q_stride", "q_head_stride", "k_stride",
    "k_head_stride", "v_stride", "v_head_stride", "a_stride", "a_head_stride", "b_stride",
    "b_head_stride",
]  # fmt: skip
_POINTERS = ["decay", "beta", "starts", "contexts", "tables"]


@triton.jit
def _prepared(chunks, token, begin, row, head, CHUNK: tl.constexpr, SIZE: tl.constexpr, H):  # type: ignore[no-untyped-def]
    """Where the kernel in front leaves what it computes of the chunk whose first token of the step
    is ``token``: of a row's chunks, all but the first begin CHUNK tokens apart."""
    number = token // CHUNK + (token > begin).to(tl.int32) + 2 * row
    return chunks + (number.to(tl.int64) * H + head) * SIZE


@triton.jit(do_not_specialize=_BATCH, do_not_specialize_on_alignment=_POINTERS)
def _inner_kernel(  # type: ignore[no-untyped-def]
    query, key, decay, beta, rates, dt_bias, states, chunks, starts, contexts, tables, interval,
    table_stride, scale, dt_min, dt_max, q_stride, q_head_stride, k_stride, k_head_stride,
    a_stride, a_head_stride, b_stride, b_head_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, K_PAD: tl.constexpr,
    CHUNK: tl.constexpr, LAYOUT: tl.constexpr, UNIT: tl.constexpr, L2NORM: tl.constexpr,
    SOFTPLUS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: ``(HK, B, programs that share the chunks of a row)``; interval a multiple of CHUNK."""
    DELTA: tl.constexpr = beta is not None
    KEY: tl.constexpr = key.dtype.element_ty
    SPLIT: tl.constexpr = KEY == tl.bfloat16 and not EMULATE
    row = tl.program_id(1)
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    position = tl.load(contexts + row) - (end - begin)
    i0 = position % CHUNK
    begin_of_chunk = begin - i0 + tl.program_id(2) * CHUNK
    if (begin_of_chunk >= end) | (begin == end):
        return
    record = states
    if position > 0:
        table = tables + row.to(tl.int64) * table_stride
        record += first_slot(table, position, interval) * (H * TILES * LAYOUT[4])
    head_k = tl.program_id(0)
    k_index = tl.arange(0, K_PAD)[None, :]
    mask_k = k_index < K
    index = tl.arange(0, CHUNK)
    cells = index[:, None] * CHUNK + index[None, :]
    q_stride, k_stride = q_stride * UNIT, k_stride * UNIT
    query += head_k.to(tl.int64) * (q_head_stride * UNIT) + k_index
    key += head_k.to(tl.int64) * (k_head_stride * UNIT) + k_index
    keys = record + head_k * (H // HK * TILES * LAYOUT[4]) + LAYOUT[0]
    offsets = index[:, None] * K + k_index

    for t in range(begin_of_chunk, end, tl.num_programs(2) * CHUNK):
        first = tl.maximum(begin - t, 0)
        last = tl.minimum(end - t, CHUNK)
        tokens = t + index.to(tl.int64)
        i = index[:, None]
        # Queries of positions before are of no matter, and kept by nobody.
        q = tl.load(query + tokens[:, None] * q_stride,
                    mask=(i >= first) & (i < last) & mask_k, other=0.0)  # fmt: skip
        k = load_rows(key, tokens[:, None], k_stride, keys, offsets, i, first, last, mask_k)
        products = inner_products(q, k)
        if DELTA:
            known = inner_products(k, k)
            squares = known
            if L2NORM:
                squares = inner_products(q, q)
        for head in range(head_k * (H // HK), (head_k + 1) * (H // HK)):
            kept = record + head * (TILES * LAYOUT[4]) + LAYOUT[2]
            a = load_scalars(
                decay + head * a_head_stride, tokens, a_stride, kept, index, first, last
            )
            place = _prepared(chunks, tl.maximum(t, begin), begin, row, head, CHUNK, SIZE, H)
            vectors = place + 2 * CHUNK * CHUNK + index
            if DELTA:
                b = load_scalars(
                    beta + head * b_head_stride, tokens, b_stride, kept + CHUNK, index, first, last
                )
                made = tl.load(kept + 2 * CHUNK + cells, mask=index[:, None] < first, other=0.0)
                mixing, of_key, of_query, of_update, growth = delta_inner(
                    products, known, squares, a, b, made, first, last, scale, L2NORM, SPLIT
                )
                half = tl.arange(0, 2)[:, None, None] * (CHUNK * CHUNK)
                tl.store(place + half + cells[None, :, :], mixing)
            else:
                bias = None
                if dt_bias is not None:
                    bias = tl.load(dt_bias + head)
                of_key = step_sizes(
                    a, bias, index < last, dt_min, dt_max, SOFTPLUS, decay.dtype.element_ty
                )
                rate = tl.load(rates + head).to(tl.float32)
                scores, of_query, of_update, growth = ssd_inner(products, rate * of_key, SPLIT)
                tl.store(place + cells, scores)
            tl.store(vectors, of_key)
            tl.store(vectors + CHUNK, of_query)
            tl.store(vectors + 2 * CHUNK, of_update)
            tl.store(vectors + 3 * CHUNK, of_update * 0.0 + growth)


@triton.jit(do_not_specialize=_BATCH, do_not_specialize_on_alignment=_POINTERS)
def _chunked_kernel(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, rates, dt_bias, skip, states, chunks, out,
    starts, contexts, tables, num_rows, num_tokens, interval, table_stride,
    scale, dt_min, dt_max, q_stride, q_head_stride, k_stride, k_head_stride,
    v_stride, v_head_stride, a_stride, a_head_stride, b_stride, b_head_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    K_PAD: tl.constexpr, CHUNK: tl.constexpr, LAYOUT: tl.constexpr, UNIT: tl.constexpr,
    L2NORM: tl.constexpr, SOFTPLUS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The delta rule given ``beta``; else Mamba-2, of which ``decay`` is dt. Grid: ``(H * ceil(V /
    BLOCK_V), B + 1)``; the last row is that of padding.

    Shapes: query and key ``[T, HK, K]``, value and out ``[T, H, V]``, decay and beta ``[T, H]``,
    rates, dt_bias and skip ``[H]``, states ``[slots, H * ceil(V / BLOCK_V), record]``, chunks None
    or what ``_inner_kernel`` wrote, starts ``[B + 1]``, contexts ``[B]``, tables ``[B, M]``.
    """
    DELTA: tl.constexpr = beta is not None
    DTYPE: tl.constexpr = out.dtype.element_ty
    KEY: tl.constexpr = key.dtype.element_ty
    VALUE: tl.constexpr = value.dtype.element_ty
    SPLIT: tl.constexpr = KEY == tl.bfloat16 and not EMULATE
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(1)
    head = tl.program_id(0) // TILES
    j = tl.arange(0, BLOCK_V)[:, None]
    v_index = tl.program_id(0) % TILES * BLOCK_V + j
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
    k_index = tl.arange(0, K_PAD)[None, :]
    mask_k = k_index < K
    index = tl.arange(0, CHUNK)
    # A chunk's queries, and below them, in the delta rule, its keys: what S is multiplied by.
    reads = tl.arange(0, CHUNK * (1 + DELTA))[:, None]
    cells = reads * CHUNK + index[None, :]
    states += tl.program_id(0) * LAYOUT[4]
    SLOT: tl.constexpr = H * TILES * LAYOUT[4]
    s_offsets = j * K + k_index
    k_offsets = index[:, None] * K + k_index
    v_offsets = index[None, :] * BLOCK_V + j

    head_k = head // (H // HK)
    q_stride, k_stride, v_stride = q_stride * UNIT, k_stride * UNIT, v_stride * UNIT
    query += head_k.to(tl.int64) * (q_head_stride * UNIT) + k_index
    key += head_k.to(tl.int64) * (k_head_stride * UNIT) + k_index
    value += head.to(tl.int64) * (v_head_stride * UNIT) + v_index
    decay += head.to(tl.int64) * a_head_stride
    out += head * V + v_index
    if DELTA:
        beta += head.to(tl.int64) * b_head_stride
    if skip is not None:
        skipped = tl.load(skip + head).to(tl.float32)

    # The next are positions [first, last) of a chunk of `size`; `token` is that of the first.
    offset = position % interval
    first = offset % CHUNK
    size = tl.minimum(CHUNK, interval - (offset - first))
    token = begin
    left = end - begin
    last = tl.minimum(size, first + left)
    record = states
    state = tl.zeros((BLOCK_V, K_PAD), tl.float32)
    if position > 0:
        record += first_slot(table, position, interval) * SLOT
        state = tl.load(record + s_offsets, mask=mask_v & mask_k, other=0.0)
    # A state that begins an interval comes from another slot than it goes to.
    is_new = offset == 0
    if chunks is not None:
        x_1 = _load_reads(
            query, key, q_stride, k_stride, record + LAYOUT[0], token, first, last, reads, mask_k,
            K, CHUNK,
        )  # fmt: skip

    while left > 0:
        tokens = (token - first).to(tl.int64) + index
        v = load_rows(
            value, tokens[None, :], v_stride, record + LAYOUT[1], v_offsets,
            index[None, :], first, last, mask_v,
        )  # fmt: skip
        k = load_rows(
            key, tokens[:, None], k_stride, record + LAYOUT[0], k_offsets,
            index[:, None], first, last, mask_k,
        )  # fmt: skip
        if chunks is not None:
            place = _prepared(chunks, token, begin, row, head, CHUNK, SIZE, H)
            vectors = place + 2 * CHUNK * CHUNK + index
            mixing = tl.load(place + cells)
            of_key = tl.load(vectors)
            of_query = tl.load(vectors + CHUNK)
            of_update = tl.load(vectors + 2 * CHUNK)
            growth = tl.load(place + 2 * CHUNK * CHUNK + 3 * CHUNK)
            x = x_1
            x_1 = _load_reads(
                query, key, q_stride, k_stride, record + LAYOUT[0], token + (last - first), 0,
                tl.minimum(CHUNK, left - (last - first)), reads, mask_k, K, CHUNK,
            )  # fmt: skip
        else:
            x = _load_reads(
                query, key, q_stride, k_stride, record + LAYOUT[0], token, first, last, reads,
                mask_k, K, CHUNK,
            )  # fmt: skip
            i = index[:, None]
            q = tl.load(
                query + tokens[:, None] * q_stride, mask=(i >= first) & (i < last) & mask_k,
                other=0.0,
            )  # fmt: skip
            kept = record + LAYOUT[2]
            a = load_scalars(decay, tokens, a_stride, kept, index, first, last)
            products = inner_products(q, k)
            if DELTA:
                b = load_scalars(beta, tokens, b_stride, kept + CHUNK, index, first, last)
                known = inner_products(k, k)
                squares = known
                if L2NORM:
                    squares = inner_products(q, q)
                made = tl.load(
                    kept + 2 * CHUNK + index[:, None] * CHUNK + index[None, :],
                    mask=index[:, None] < first, other=0.0,
                )  # fmt: skip
                mixing, of_key, of_query, of_update, growth = delta_inner(
                    products, known, squares, a, b, made, first, last, scale, L2NORM, SPLIT
                )
                mixing = tl.reshape(mixing, (2 * CHUNK, CHUNK))
            else:
                bias = None
                if dt_bias is not None:
                    bias = tl.load(dt_bias + head)
                of_key = step_sizes(
                    a, bias, index < last, dt_min, dt_max, SOFTPLUS, decay.dtype.element_ty
                )
                rate = tl.load(rates + head).to(tl.float32)
                mixing, of_query, of_update, growth = ssd_inner(products, rate * of_key, SPLIT)

        wide_v = v.to(tl.float32)
        zeros = tl.zeros((BLOCK_V, CHUNK * (1 + DELTA)), tl.float32)
        read = matmul(state, tl.trans(x), zeros, SPLIT)
        if DELTA:
            read, known = halves(read)
            u, y = halves(matmul(wide_v - known * of_key[None, :], tl.trans(mixing), zeros, SPLIT))
            y += read * of_query[None, :]
        else:
            u = wide_v * of_key[None, :]
            y = matmul(u, tl.trans(mixing), read * of_query[None, :], SPLIT)
        if skip is not None:
            y += skipped * wide_v
        new = (index >= first) & (index < last)
        target = out + tokens[None, :] * (H * V)
        tl.store(target, rounded(y, DTYPE).to(DTYPE), mask=mask_v & new[None, :])

        token += last - first
        left -= last - first
        position += last - first
        offset = position % interval
        record = states + tl.load(table + (position - 1) // interval).to(tl.int64) * SLOT
        if last == size:
            state = matmul(u * of_update[None, :], k, state * growth, SPLIT)
            is_new = True
        elif left == 0:
            tl.debug_barrier()
            tl.store(_typed(record + LAYOUT[0], KEY) + k_offsets, k, mask=new[:, None] & mask_k)
            tl.store(
                _typed(record + LAYOUT[1], VALUE) + v_offsets, v, mask=mask_v & new[None, :]
            )
            a = tl.load(decay + tokens * a_stride, mask=new).to(tl.float32)
            tl.store(record + LAYOUT[2] + index, a, mask=new)
            if DELTA:
                b = tl.load(beta + tokens * b_stride, mask=new).to(tl.float32)
                tl.store(record + LAYOUT[2] + CHUNK + index, b, mask=new)
                in_new = (reads >= first) & (reads < last)
                tl.store(record + LAYOUT[3] + cells, mixing, mask=in_new)
        if is_new & ((left == 0) | (offset == 0)):
            tl.debug_barrier()  # other threads of this program may still be reading
            tl.store(record + s_offsets, state, mask=mask_v & mask_k)
        first = 0
        size = tl.minimum(CHUNK, interval - offset)
        last = tl.minimum(size, left)


@triton.jit
def _typed(pointer, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return pointer.to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def _load_reads(  # type: ignore[no-untyped-def]
    query, key, q_stride, k_stride, kept, token, first, last, index, mask_k, K: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Queries of positions [first, last) of a chunk, the first that of ``token``, and, where
    ``index`` goes on, the keys of these and of the positions before, which the slot keeps."""
    i = index % CHUNK
    tokens = (token - first).to(tl.int64) + i
    is_key = index >= CHUNK
    is_old = is_key & (i < first)
    x = tl.where(is_key, key + tokens * k_stride, query + tokens * q_stride)
    x = tl.where(is_old, _typed(kept, key.dtype.element_ty) + i * K + tl.arange(0, mask_k.shape[1])[None, :], x)
    return tl.load(x, mask=(is_old | (i >= first)) & (i < last) & mask_k, other=0.0)


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
    num_keys = tokens[1].shape[2]
    unit = _UNIT if num_keys % _UNIT == 0 == num_values % _UNIT else 1
    query, key, value = (_aligned(x, unit) for x in tokens[:3])
    given = query, key, value, *tokens[3:]
    strides = [x.stride(n) // unit for x in (query, key, value) for n in (0, 1)]
    strides += [0 if x is None else x.stride(n) for x in tokens[3:] for n in (0, 1)]
    layout = chunk_layout.record_layout(num_keys, num_values, key.dtype, value.dtype)
    sizes = {
        "H": num_heads,
        "HK": key.shape[1],
        "K": num_keys,
        "K_PAD": chunk_layout.padded(num_keys),
        "CHUNK": chunk_layout.CHUNK,
        "LAYOUT": tuple(layout),
        "UNIT": unit,
        "SIZE": chunk_layout.PREPARED_SIZE,
        "num_warps": _NUM_WARPS,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }
    metadata = rows.query_starts, rows.context_lens, rows.state_tables
    steps = rows.interval, rows.state_tables.stride(0)
    chunks = None
    if _has_long_rows(len(out), num_rows) and rows.interval % chunk_layout.CHUNK == 0:
        num_chunks = len(out) // chunk_layout.CHUNK + 2 * num_rows + 2
        chunks = torch.empty(
            num_chunks, num_heads, chunk_layout.PREPARED_SIZE, device=out.device
        )
        sharing = _MOST_PROGRAMS // (key.shape[1] * num_rows)
        most = triton.cdiv(len(out), chunk_layout.CHUNK) + 1
        _inner_kernel[(key.shape[1], num_rows, max(1, min(sharing, most)))](
            query, key, *given[3:], *per_head[:2], states, chunks, *metadata, *steps, *limits,
            *strides[:4], *strides[6:],
            TILES=states.shape[1] // num_heads,
            **sizes,
            **options,
        )  # fmt: skip
    _chunked_kernel[(states.shape[1], num_rows + 1)](
        *given, *per_head, states, chunks, out, *metadata, num_rows, len(out), *steps, *limits,
        *strides,
        V=num_values,
        BLOCK_V=chunk_layout.block_v(num_keys, num_values),
        **sizes,
        **options,
    )  # fmt: skip


def _has_long_rows(num_tokens: int, num_rows: int) -> bool:
    """Whether what a step computes of chunks is worth a kernel of its own. Bits are the same."""
    return num_tokens > num_rows


def _aligned(x: Tensor, unit: int) -> Tensor:
    """``[T, heads, size]`` as the kernels read it: heads side by side in memory, tokens and heads in
    multiples of ``unit``, all of 16 bytes. A copy where it is not."""
    suits = x.stride(2) == 1 and all(stride % unit == 0 for stride in x.stride()[:2])
    if suits and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
