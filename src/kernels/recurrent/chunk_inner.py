"""What positions of a chunk have to do with each other, whatever its state, as a Triton kernel: for
all chunks of a step side by side. :mod:`.chunked` has the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.rounding import EMULATE
from .chunk_functions import (
    delta_inner,
    inner_products,
    load_rows,
    load_scalars,
    ssd_inner,
    step_sizes,
)
from .device_functions import first_slot, part_of_row

# What follows the batch must not make new versions of the kernels.
BATCH = [
    "num_rows", "num_tokens", "interval", "table_stride", "q_stride", "q_head_stride", "k_stride",
    "k_head_stride", "v_stride", "v_head_stride", "a_stride", "a_head_stride", "b_stride",
    "b_head_stride",
]  # fmt: skip
POINTERS = ["decay", "beta", "starts", "contexts", "tables", "table_rows"]


@triton.jit
def place_of_chunk(chunks, token, begin, row, head, CHUNK: tl.constexpr, SIZE: tl.constexpr, H):  # type: ignore[no-untyped-def]
    """Where ``chunk_inner_kernel`` leaves what it computes of the chunk whose first token of the
    step is ``token``: of a row's chunks, all but the first begin CHUNK tokens apart."""
    number = token // CHUNK + (token > begin).to(tl.int32) + 2 * row
    return chunks + (number.to(tl.int64) * H + head) * SIZE


@triton.jit(do_not_specialize=BATCH, do_not_specialize_on_alignment=POINTERS)
def chunk_inner_kernel(  # type: ignore[no-untyped-def]
    query, key, decay, beta, rates, dt_bias, states, chunks, starts, contexts, tables,
    table_rows, interval, table_stride, scale, dt_min, dt_max, q_stride, q_head_stride,
    k_stride, k_head_stride, a_stride, a_head_stride, b_stride, b_head_stride, num_rows,
    KEYS: tl.constexpr, SCALARS: tl.constexpr, RECORD: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, K_PAD: tl.constexpr,
    CHUNK: tl.constexpr, UNIT: tl.constexpr, L2NORM: tl.constexpr,
    SOFTPLUS: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid: ``(H / HEADS, programs)``, HEADS being of one head of keys. The programs are one for
    each row if ``num_rows`` is 0, else one for each chunk, dealt as :func:`.part_of_row` says: a
    row of n tokens lies in ``n // CHUNK + 2`` chunks at most. Interval a multiple of CHUNK. Shapes
    as of :func:`.chunk_prompt.chunk_prompt_kernel`; rates and dt_bias ``[H]``, of Mamba-2.
    ``chunks`` are the results of :func:`.chunk_functions.delta_inner`.
    """
    DELTA: tl.constexpr = beta is not None
    SPLIT: tl.constexpr = key.dtype.element_ty == tl.bfloat16 and not EMULATE
    row = tl.program_id(1)
    number = 0
    if num_rows > 0:
        row, number = part_of_row(starts, num_rows, row, CHUNK, 2)
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    position = tl.load(contexts + row) - (end - begin)
    table_row = tl.load(table_rows + row)
    i0 = position % CHUNK
    begin_of_chunk = begin - i0 + number * CHUNK
    if (begin_of_chunk >= end) | (begin == end):
        return
    end_of_chunks = end
    if num_rows > 0:
        end_of_chunks = begin_of_chunk + 1
    record = states
    if position > 0:
        table = tables + table_row.to(tl.int64) * table_stride
        record += first_slot(table, position, interval) * (H * TILES * RECORD)
    first_head = tl.program_id(0) * HEADS
    head_k = first_head // (H // HK)
    k_index = tl.arange(0, K_PAD)[None, :]
    mask_k = k_index < K
    index = tl.arange(0, CHUNK)
    cells = index[:, None] * CHUNK + index[None, :]
    q_stride, k_stride = q_stride * UNIT, k_stride * UNIT
    query += head_k.to(tl.int64) * (q_head_stride * UNIT) + k_index
    key += head_k.to(tl.int64) * (k_head_stride * UNIT) + k_index
    keys = record + first_head * (TILES * RECORD) + KEYS
    offsets = index[:, None] * K + k_index

    for t in range(begin_of_chunk, end_of_chunks, CHUNK):
        first = tl.maximum(begin - t, 0)
        last = tl.minimum(end - t, CHUNK)
        tokens = t + index.to(tl.int64)
        i = index[:, None]
        # Queries of positions before are of no matter: no slot keeps them.
        q = tl.load(query + tokens[:, None] * q_stride,
                    mask=(i >= first) & (i < last) & mask_k, other=0.0)  # fmt: skip
        k = load_rows(key, tokens[:, None], k_stride, keys, offsets, i, first, last, mask_k)
        k = tl.where((i < last) & mask_k, k, 0.0)
        products = inner_products(q, k)
        if DELTA:
            known = inner_products(k, k)
            squares = known
            if L2NORM:
                squares = inner_products(q, q)
        for head in range(first_head, first_head + HEADS):
            kept = record + head * (TILES * RECORD) + SCALARS
            a = load_scalars(
                decay + head * a_head_stride, tokens, a_stride, kept, index, first, last
            )
            place = place_of_chunk(chunks, tl.maximum(t, begin), begin, row, head, CHUNK, SIZE, H)
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
