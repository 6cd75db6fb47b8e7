"""The gated delta rule and Mamba-2 over few positions a row, as a Triton kernel: chunk by chunk,
whose states go from slot to slot. :mod:`.chunked` has the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.rounding import EMULATE, rounded
from .chunk_functions import (
    advance,
    delta_inner,
    has_reads,
    inner_products,
    keep_inputs,
    load_factors,
    load_mixing,
    load_reads,
    load_rows,
    load_scalars,
    matmul,
    read_state,
    ssd_inner,
    step_sizes,
)
from .chunk_inner import BATCH, POINTERS, place_of_chunk
from .device_functions import zero_padding


@triton.jit(do_not_specialize=BATCH, do_not_specialize_on_alignment=POINTERS)
def chunk_decode_kernel(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, rates, dt_bias, skip, states, chunks, out, starts, contexts,
    tables, table_rows, num_rows, num_tokens, interval, table_stride, scale, dt_min, dt_max,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, a_stride,
    a_head_stride, b_stride, b_head_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SCALARS: tl.constexpr, ROWS: tl.constexpr,
    RECORD: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    K_PAD: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr,
    L2NORM: tl.constexpr, SOFTPLUS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """As :func:`.chunk_prompt.chunk_prompt_kernel`, but that without ``chunks`` each program
    computes what would be in them itself, for any interval; rates and dt_bias ``[H]``, of Mamba-2.
    """
    DELTA: tl.constexpr = beta is not None
    DTYPE: tl.constexpr = out.dtype.element_ty
    SPLIT: tl.constexpr = key.dtype.element_ty == tl.bfloat16 and not EMULATE
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(1)
    head = tl.program_id(0) // TILES
    j = tl.arange(0, BLOCK_V)[:, None]
    v_index = tl.program_id(0) % TILES * BLOCK_V + j
    mask_v = v_index < V
    # Together, as each takes what a load of a state takes.
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1, mask=row < num_rows, other=0)
    context = tl.load(contexts + row, mask=row < num_rows, other=0)
    table_row = tl.load(table_rows + row, mask=row < num_rows, other=0)
    if row == num_rows:
        zero_padding(out + head * V + v_index, begin, num_tokens, mask_v, H * V)
        return
    if begin == end:
        return
    position = context - (end - begin)
    table = tables + table_row.to(tl.int64) * table_stride
    k_index = tl.arange(0, K_PAD)[None, :]
    mask_k = k_index < K
    index = tl.arange(0, CHUNK)
    # A chunk's queries, and below them, in the delta rule, its keys: what S is multiplied by.
    reads = tl.arange(0, CHUNK * (1 + DELTA))[:, None]
    states += tl.program_id(0) * RECORD
    SLOT: tl.constexpr = H * TILES * RECORD
    s_offsets = j * K + k_index
    k_offsets = index[:, None] * K + k_index
    read_offsets = (reads % CHUNK) * K + k_index
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

    if chunks is None and not DELTA:
        rate = tl.load(rates + head).to(tl.float32)
        bias = None
        if dt_bias is not None:
            bias = tl.load(dt_bias + head)
    i = index[:, None]
    token = begin
    left = end - begin
    while left > 0:
        # Positions [first, last) of a chunk of `size`; `token` is that of the first.
        offset = position % interval
        first = offset % CHUNK
        size = tl.minimum(CHUNK, interval - (offset - first))
        last = tl.minimum(size, first + left)
        slot = tl.load(table + (position + (last - first - 1)) // interval).to(tl.int64)
        source = tl.load(table + tl.maximum(position - 1, 0) // interval).to(tl.int64)
        record = states + source * SLOT
        # All loads are on their way before the first is waited for.
        tokens = (token - first).to(tl.int64) + index
        has_k = (i < last) & mask_k
        has_state = mask_v & mask_k & (position > 0)
        k = load_rows(
            key, tokens[:, None], k_stride, record + KEYS, k_offsets, i, first, last, mask_k
        )
        x = load_reads(
            query, key, q_stride, k_stride, record + KEYS, read_offsets, token, first, last,
            reads, mask_k, CHUNK,
        )  # fmt: skip
        v = load_rows(
            value, tokens[None, :], v_stride, record + VALUES, v_offsets, index[None, :], first,
            last, mask_v,
        )  # fmt: skip
        if chunks is not None:
            place = place_of_chunk(chunks, token, begin, row, head, CHUNK, SIZE, H)
            mixing = load_mixing(place, reads, index)
            of_key, of_query, of_update, growth = load_factors(place, index)
            state = tl.load(record + s_offsets, mask=has_state)
            tl.debug_barrier()  # else the assembler has loads that are needed late wait for this
        else:
            has_q = (i >= first) & (i < last) & mask_k
            q = tl.load(query + tokens[:, None] * q_stride, mask=has_q)
            a = load_scalars(decay, tokens, a_stride, record + SCALARS, index, first, last)
            if DELTA:
                b = load_scalars(
                    beta, tokens, b_stride, record + SCALARS + CHUNK, index, first, last
                )
                made = tl.load(record + ROWS + i * CHUNK + index[None, :], mask=i < first)
            state = tl.load(record + s_offsets, mask=has_state)
            q = tl.where(has_q, q, 0.0)
            all_k = tl.where(has_k, k, 0.0)
            products = inner_products(q, all_k)
            if DELTA:
                known = inner_products(all_k, all_k)
                squares = known
                if L2NORM:
                    squares = inner_products(q, q)
                mixing, of_key, of_query, of_update, growth = delta_inner(
                    products, known, squares, a, b, made, first, last, scale, L2NORM, SPLIT
                )
                mixing = tl.reshape(mixing, (2 * CHUNK, CHUNK))
            else:
                of_key = step_sizes(
                    a, bias, index < last, dt_min, dt_max, SOFTPLUS, decay.dtype.element_ty
                )
                mixing, of_query, of_update, growth = ssd_inner(products, rate * of_key, SPLIT)
        x = tl.where(has_reads(reads, first, last, mask_k, CHUNK), x, 0.0)
        state = tl.where(has_state, state, 0.0)
        read = read_state(state, x, SPLIT)
        v = tl.where((index < last)[None, :] & mask_v, v, 0.0)
        u, y, wide_v = advance(read, v, mixing, of_key, of_query, DELTA, SPLIT)
        if skip is not None:
            y += skipped * wide_v
        new = (index >= first) & (index < last)
        target = out + tokens[None, :] * (H * V)
        tl.store(target, rounded(y, DTYPE).to(DTYPE), mask=mask_v & new[None, :])

        record = states + slot * SLOT
        tl.debug_barrier()  # other threads of this program may still be reading
        if last == size:
            k = tl.where(has_k, k, 0.0)
            state = matmul(u * of_update[None, :], k, state * growth, SPLIT)
            tl.store(record + s_offsets, state, mask=mask_v & mask_k)
        else:
            if offset == 0:  # the state comes from another slot
                tl.store(record + s_offsets, state, mask=mask_v & mask_k)
            keep_inputs(
                record, k, v, mixing, decay, beta, tokens, a_stride, b_stride, k_offsets, v_offsets,
                index, reads, first, last, mask_k, mask_v, KEYS, VALUES, SCALARS, ROWS,
            )  # fmt: skip
        token += last - first
        left -= last - first
        position += last - first
        tl.debug_barrier()  # the next chunk's state was written by other threads
