"""The gated delta rule and Mamba-2 over the chunks of prompts, as a Triton kernel behind that of
:mod:`.chunk_inner`. :mod:`.chunked` has the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.rounding import EMULATE, rounded
from .chunk_functions import (
    advance,
    has_reads,
    keep_inputs,
    load_factors,
    load_mixing,
    load_reads,
    load_rows,
    matmul,
    read_state,
    reads_of,
)
from .chunk_inner import BATCH, POINTERS, place_of_chunk
from .device_functions import zero_padding


@triton.jit(do_not_specialize=BATCH, do_not_specialize_on_alignment=POINTERS)
def chunk_prompt_kernel(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, skip, states, chunks, out, starts, contexts, tables,
    table_rows, num_rows, num_tokens, interval, table_stride, q_stride, q_head_stride,
    k_stride, k_head_stride, v_stride, v_head_stride, a_stride, a_head_stride,
    b_stride, b_head_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SCALARS: tl.constexpr, ROWS: tl.constexpr,
    RECORD: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    K_PAD: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The delta rule given ``beta``; else Mamba-2, of which ``decay`` is dt. Grid: ``(H * ceil(V /
    BLOCK_V), B + 1)``; the last row is that of padding. A program walks the chunks of one row with
    one tile of a head's state in registers.

    Shapes: query and key ``[T, HK, K]``, value and out ``[T, H, V]``, decay and beta ``[T, H]``,
    skip ``[H]``, states ``[slots, H * ceil(V / BLOCK_V), record]``, starts ``[B + 1]``, contexts
    ``[B]``, tables ``[R, M]``, table_rows ``[B]``; chunks is what the kernel in front wrote. The
    interval is a multiple of CHUNK. ``key``, ``query`` and ``value`` have strides in units of UNIT
    elements.
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
    query += head_k.to(tl.int64) * (q_head_stride * UNIT)
    key += head_k.to(tl.int64) * (k_head_stride * UNIT)
    value += head.to(tl.int64) * (v_head_stride * UNIT)
    decay += head.to(tl.int64) * a_head_stride
    out += head * V
    if DELTA:
        beta += head.to(tl.int64) * b_head_stride
    if skip is not None:
        skipped = tl.load(skip + head).to(tl.float32)

    # The next are positions [first, last) of the chunk of which `token` is the first. Only of a
    # row's first chunk there may be positions that the slot keeps.
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
    # A state that begins an interval comes from another slot than it goes to.
    is_new = position % interval == 0
    until_next = interval - position % interval
    table += position // interval
    record = states + tl.load(table).to(tl.int64) * SLOT
    x = tl.where(has_reads(reads, first, last, mask_k, CHUNK), x, 0.0)
    v = tl.where((index < last)[None, :] & mask_v, v, 0.0)
    k = tl.where((index < last)[:, None] & mask_k, k, 0.0)
    # Where the inputs and outputs of `token` are; from here on all is a chunk further each time.
    query += token.to(tl.int64) * q_stride
    key += token.to(tl.int64) * k_stride
    value += token.to(tl.int64) * v_stride
    out += token.to(tl.int64) * (H * V)
    place_1 = place_of_chunk(chunks, token + CHUNK, begin, row, head, CHUNK, SIZE, H)

    while left > 0:
        of_key, of_query, of_update, growth = load_factors(place, index)
        left -= last - first
        until_next -= last - first
        # Loads for the next chunk, on their way while this one is computed. Behind a row's last
        # there is something in `chunks`, too.
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

        if last == CHUNK:
            state = matmul(u * of_update[None, :], k, state * growth, SPLIT)
            is_new = True
        else:
            keep_inputs(
                record, k, v, mixing, decay, beta, token.to(tl.int64) + index, a_stride, b_stride,
                k_offsets, v_offsets, index, reads, first, last, mask_k, mask_v, KEYS, VALUES,
                SCALARS, ROWS,
            )  # fmt: skip
        if is_new & ((left == 0) | (until_next == 0)):
            tl.debug_barrier()  # other threads of this program may still be reading
            tl.store(record + s_offsets, state, mask=mask_v & mask_k)
        if until_next == 0:
            until_next = interval
            table += 1
            record = states + tl.load(table, mask=left > 0, other=0).to(tl.int64) * SLOT
        token += CHUNK
        out += CHUNK * H * V
        place = place_1
        place_1 += H * SIZE
        first = 0
        last = last_1
        x, v, k, mixing = x_1, v_1, k_1, mixing_1
