"""The gated delta rule and Mamba-2 in chunks as three Triton kernels; :mod:`.chunked` has the
equations.

``chunk_inner_kernel`` computes everything that does not depend on the states, for all chunks of a
step in parallel. Then ``chunk_prompt_kernel`` processes the chunks of prompts in order.
``chunk_decode_kernel`` serves few positions per row, with states that move from slot to slot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.rounding import EMULATE, rounded
from .device_functions import (
    BATCH,
    ROW_POINTERS,
    advance,
    delta_inner,
    end_of_own,
    find_row,
    first_slot,
    has_reads,
    inner_products,
    keep_inputs,
    load_factors,
    load_mixing,
    load_reads,
    load_rows,
    load_scalars,
    matmul,
    part_of_row,
    read_state,
    reads_of,
    ssd_inner,
    step_sizes,
    zero_padding,
)

POINTERS = ["decay", "beta", *ROW_POINTERS]


@triton.jit
def place_of_chunk(chunks, token, begin, row, head, CHUNK: tl.constexpr, SIZE: tl.constexpr, H):  # type: ignore[no-untyped-def]
    """The place where ``chunk_inner_kernel`` stores its results for the chunk whose first token in
    the step is ``token``. All chunks of a row but the first begin CHUNK tokens apart."""
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
    """Grid: ``(H / HEADS, programs)``, where the HEADS share one key head. If ``num_rows`` is 0
    there is one program per row, else one per chunk, assigned by :func:`.part_of_row`: a row of n
    tokens spans at most ``n // CHUNK + 2`` chunks. The interval is a multiple of CHUNK. Shapes: see
    ``chunk_prompt_kernel``; for Mamba-2, rates and dt_bias ``[H]``. ``chunks`` are the results of
    :func:`.device_functions.delta_inner`.
    """
    DELTA: tl.constexpr = beta is not None
    SPLIT: tl.constexpr = key.dtype.element_ty == tl.bfloat16 and not EMULATE
    row = tl.program_id(1)
    number = 0
    if num_rows > 0:
        row, number = part_of_row(starts, num_rows, row, CHUNK, 2)
    begin, end, position, table = find_row(
        starts, contexts, tables, table_rows, row, True, table_stride
    )
    begin_of_chunk = begin - position % CHUNK + number * CHUNK
    if (begin_of_chunk >= end) | (begin == end):
        return
    end_of_chunks = end
    if num_rows > 0:
        end_of_chunks = begin_of_chunk + 1
    record = states
    if position > 0:
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
        # Queries of earlier positions are not needed: no slot keeps them.
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


@triton.jit(do_not_specialize=BATCH, do_not_specialize_on_alignment=POINTERS)
def chunk_prompt_kernel(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, skip, states, chunks, out, starts, contexts, tables,
    table_rows, num_drafts, num_rows, num_tokens, interval, table_stride, q_stride, q_head_stride,
    k_stride, k_head_stride, v_stride, v_head_stride, a_stride, a_head_stride,
    b_stride, b_head_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SCALARS: tl.constexpr, ROWS: tl.constexpr,
    RECORD: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    K_PAD: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The delta rule if ``beta`` is given; else Mamba-2, with ``decay`` as dt. Grid: ``(H * ceil(V
    / BLOCK_V), B + 1)``; the last row is padding. A program processes the chunks of one row with
    one tile of a head's state in registers.

    Shapes: query and key ``[T, HK, K]``, value and out ``[T, H, V]``, decay and beta ``[T, H]``,
    skip ``[H]``, states ``[slots, H * ceil(V / BLOCK_V), record]``, starts ``[B + 1]``, contexts
    ``[B]``, tables ``[R, M]``, table_rows ``[B]``, num_drafts ``[B]`` or None. ``chunks`` is the
    result of the preceding kernel. The interval is a multiple of CHUNK. ``key``, ``query`` and
    ``value`` have strides in units of UNIT elements.
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
    begin, end, position, table = find_row(
        starts, contexts, tables, table_rows, row, row < num_rows, table_stride
    )
    if row == num_rows:
        zero_padding(out + head * V + v_index, begin, num_tokens, mask_v, H * V)
        return
    if begin == end:
        return
    k_index = tl.arange(0, K_PAD)[None, :]
    mask_k = k_index < K
    index = tl.arange(0, CHUNK)
    # A chunk's queries, followed in the delta rule by its keys: the factors of S.
    reads = tl.arange(0, CHUNK * (1 + DELTA))[:, None]
    states += tl.program_id(0) * RECORD
    SLOT: tl.constexpr = H * TILES * RECORD
    s_offsets = j * K + k_index
    k_offsets = index[:, None] * K + k_index
    read_offsets = (reads % CHUNK) * K + k_index
    v_offsets = index[None, :] * BLOCK_V + j

    head_k = head // (H // HK)
    q_stride, k_stride, v_stride = q_stride * UNIT, k_stride * UNIT, v_stride * UNIT
    query += head_k.to(tl.int64) * (q_head_stride * UNIT)
    key += head_k.to(tl.int64) * (k_head_stride * UNIT)
    value += head.to(tl.int64) * (v_head_stride * UNIT)
    decay += head.to(tl.int64) * a_head_stride
    out += head * V
    if DELTA:
        beta += head.to(tl.int64) * b_head_stride
    if skip is not None:
        skipped = tl.load(skip + head).to(tl.float32)

    # The next positions are [first, last) of the chunk whose first position is that of `token`.
    # Only in a row's first chunk may the slot keep positions.
    first = position % CHUNK
    token = begin - first
    left = end - begin
    last = tl.minimum(CHUNK, first + left)
    slot = tl.load(table + tl.maximum(position - 1, 0) // interval).to(tl.int64)
    record = states + slot * SLOT
    x = load_reads(
        query + k_index, key + k_index, q_stride, k_stride, record + KEYS, read_offsets, begin,
        first, last, reads, mask_k, CHUNK,
    )  # fmt: skip
    tokens = token.to(tl.int64) + index
    v = load_rows(
        value + v_index, tokens[None, :], v_stride, record + VALUES, v_offsets, index[None, :],
        first, last, mask_v,
    )  # fmt: skip
    k = load_rows(
        key + k_index, tokens[:, None], k_stride, record + KEYS, k_offsets, index[:, None], first,
        last, mask_k,
    )  # fmt: skip
    place = place_of_chunk(chunks, begin, begin, row, head, CHUNK, SIZE, H)
    mixing = load_mixing(place, reads, index)
    state = tl.load(record + s_offsets, mask=mask_v & mask_k & (position > 0), other=0.0)
    own_left = end_of_own(num_drafts, row, end) - begin
    # A state that begins an interval comes from another slot than its destination.
    is_new = position % interval == 0
    until_next = interval - position % interval
    table += position // interval
    record = states + tl.load(table).to(tl.int64) * SLOT
    x = tl.where(has_reads(reads, first, last, mask_k, CHUNK), x, 0.0)
    v = tl.where((index < last)[None, :] & mask_v, v, 0.0)
    k = tl.where((index < last)[:, None] & mask_k, k, 0.0)
    # Addresses of the inputs and outputs of `token`. From here on everything advances by one chunk
    # per iteration.
    query += token.to(tl.int64) * q_stride
    key += token.to(tl.int64) * k_stride
    value += token.to(tl.int64) * v_stride
    out += token.to(tl.int64) * (H * V)
    place_1 = place_of_chunk(chunks, token + CHUNK, begin, row, head, CHUNK, SIZE, H)

    while left > 0:
        of_key, of_query, of_update, growth = load_factors(place, index)
        left -= last - first
        until_next -= last - first
        # Loads for the next chunk are in flight while this one is computed. After a row's last
        # chunk, `chunks` has valid memory, too.
        last_1 = tl.minimum(CHUNK, left)
        query += CHUNK * q_stride
        key += CHUNK * k_stride
        value += CHUNK * v_stride
        x_1 = tl.load(
            reads_of(query, key, q_stride, k_stride, reads, k_index, CHUNK, DELTA),
            mask=(reads % CHUNK < last_1) & mask_k, other=0.0,
        )  # fmt: skip
        v_1 = tl.load(
            value + (index[None, :] * v_stride + v_index),
            mask=(index < last_1)[None, :] & mask_v, other=0.0,
        )  # fmt: skip
        k_1 = tl.load(
            key + (index[:, None] * k_stride + k_index),
            mask=(index < last_1)[:, None] & mask_k, other=0.0,
        )  # fmt: skip
        mixing_1 = load_mixing(place_1, reads, index)

        read = read_state(state, x, SPLIT)
        u, y, wide_v = advance(read, v, mixing, of_key, of_query, DELTA, SPLIT)
        if skip is not None:
            y += skipped * wide_v
        new = (index >= first) & (index < last)
        target = out + (index[None, :] * (H * V) + v_index)
        tl.store(target, rounded(y, DTYPE).to(DTYPE), mask=mask_v & new[None, :])

        own_last = last
        has_next = left > 0
        is_due = (left == 0) | (until_next == 0)
        if num_drafts is not None:
            own_left -= last - first
            has_next = own_left > 0
            is_due = (own_left == 0) | ((own_left > 0) & (until_next == 0))
            own_last = tl.minimum(last, last + own_left)
            if (own_last > first) & (own_last < last):
                # The chunk continues with draft tokens: the state before it and a tail are kept.
                if is_new:
                    tl.debug_barrier()
                    tl.store(record + s_offsets, state, mask=mask_v & mask_k)
                if last == CHUNK:
                    keep_inputs(
                        record, k, v, mixing, decay, beta, token.to(tl.int64) + index, a_stride,
                        b_stride, k_offsets, v_offsets, index, reads, first, own_last, mask_k,
                        mask_v, KEYS, VALUES, SCALARS, ROWS,
                    )  # fmt: skip
        if last == CHUNK:
            state = matmul(u * of_update[None, :], k, state * growth, SPLIT)
            is_new = True
        else:
            keep_inputs(
                record, k, v, mixing, decay, beta, token.to(tl.int64) + index, a_stride, b_stride,
                k_offsets, v_offsets, index, reads, first, own_last, mask_k, mask_v, KEYS, VALUES,
                SCALARS, ROWS,
            )  # fmt: skip
        if is_new & is_due:
            tl.debug_barrier()  # other threads of this program may still be reading
            tl.store(record + s_offsets, state, mask=mask_v & mask_k)
        if until_next == 0:
            until_next = interval
            table += 1
            record = states + tl.load(table, mask=has_next, other=0).to(tl.int64) * SLOT
        token += CHUNK
        out += CHUNK * H * V
        place = place_1
        place_1 += H * SIZE
        first = 0
        last = last_1
        x, v, k, mixing = x_1, v_1, k_1, mixing_1


@triton.jit(do_not_specialize=BATCH, do_not_specialize_on_alignment=POINTERS)
def chunk_decode_kernel(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, rates, dt_bias, skip, states, chunks, out, starts, contexts,
    tables, table_rows, num_drafts, num_rows, num_tokens, interval, table_stride, scale, dt_min,
    dt_max, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, a_stride,
    a_head_stride, b_stride, b_head_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SCALARS: tl.constexpr, ROWS: tl.constexpr,
    RECORD: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    K_PAD: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr,
    L2NORM: tl.constexpr, SOFTPLUS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Same as ``chunk_prompt_kernel``, but without ``chunks`` each program computes their contents
    itself, for any interval; for Mamba-2, rates and dt_bias ``[H]``.
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
    begin, end, position, table = find_row(
        starts, contexts, tables, table_rows, row, row < num_rows, table_stride
    )
    if row == num_rows:
        zero_padding(out + head * V + v_index, begin, num_tokens, mask_v, H * V)
        return
    if begin == end:
        return
    k_index = tl.arange(0, K_PAD)[None, :]
    mask_k = k_index < K
    index = tl.arange(0, CHUNK)
    # A chunk's queries, followed in the delta rule by its keys: the factors of S.
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
    if num_drafts is not None:
        own_left = end_of_own(num_drafts, row, end) - begin
        carried = tl.zeros((BLOCK_V, K_PAD), tl.float32)  # the state, from the second chunk on
    while left > 0:
        # Positions [first, last) of a chunk of `size`; `token` is that of the first.
        offset = position % interval
        first = offset % CHUNK
        size = tl.minimum(CHUNK, interval - (offset - first))
        last = tl.minimum(size, first + left)
        has_own = None
        is_first = None
        if num_drafts is not None:  # chunks of draft tokens only have no entries
            has_own = own_left > 0
            is_first = token == begin
        slot = table + (position + (last - first - 1)) // interval
        slot = tl.load(slot, mask=has_own).to(tl.int64)
        source = table + tl.maximum(position - 1, 0) // interval
        source = tl.load(source, mask=is_first).to(tl.int64)
        record = states + source * SLOT
        # All loads are issued before the first is waited for.
        tokens = (token - first).to(tl.int64) + index
        has_k = (i < last) & mask_k
        has_state = mask_v & mask_k & (position > 0)
        if num_drafts is not None:
            has_state = has_state & is_first
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
            tl.debug_barrier()  # otherwise ptxas makes late loads wait for this one
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
        if num_drafts is not None:
            state = tl.where(is_first, state, carried)
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
        own_last = last
        is_moved = offset == 0
        if num_drafts is not None:
            own_left -= last - first
            own_last = tl.minimum(last, last + own_left)
            is_moved = is_moved & (own_last > first)
            carried = matmul(u * of_update[None, :], tl.where(has_k, k, 0.0), state * growth, SPLIT)
        if own_last == size:
            if num_drafts is not None:
                state = carried
            else:
                k = tl.where(has_k, k, 0.0)
                state = matmul(u * of_update[None, :], k, state * growth, SPLIT)
            tl.store(record + s_offsets, state, mask=mask_v & mask_k)
        else:
            if is_moved:  # the state comes from another slot
                tl.store(record + s_offsets, state, mask=mask_v & mask_k)
            keep_inputs(
                record, k, v, mixing, decay, beta, tokens, a_stride, b_stride, k_offsets, v_offsets,
                index, reads, first, own_last, mask_k, mask_v, KEYS, VALUES, SCALARS, ROWS,
            )  # fmt: skip
        token += last - first
        left -= last - first
        position += last - first
        tl.debug_barrier()  # other threads wrote the next chunk's state
