"""Kernels that turn what the host staged for a step into the inputs of the graph.

The block tables of running requests stay on the device, one row of ``table_store`` a request, and
only what changed is sent. Token ids that the previous step sampled are read where it left them: the
host sends ``-(j + 1)`` for the j-th token that step sampled, and need not have seen it.
"""

from __future__ import annotations

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
DECODE_FIELDS = 7
"""int32 fields a row in the staged form of a decode step, each an array ``[bucket]``: token id,
position, row of the table store (-1: padding), new block id (-1: none), seed (low word, high word),
bits of the float32 temperature. Two more words follow: the number of rows that are no padding, and
where the step's tokens are to go."""


def decode_size(bucket: int) -> int:
    """int32 elements of the staged form of a decode step."""
    return DECODE_FIELDS * bucket + 2


@triton.jit(do_not_specialize=["num_updates"])
def _update_tables_kernel(staged, table_store, num_updates, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_updates
    where = tl.load(staged + i, mask=mask, other=0).to(tl.int64)
    block_id = tl.load(staged + num_updates + i, mask=mask, other=0)
    tl.store(table_store + where, block_id, mask=mask)


def update_tables(staged: Tensor, table_store: Tensor, num_updates: int) -> None:
    """Write block ids into the table store.

    Args:
        staged: int32 ``[2 * num_updates]``: flat indices into the store, then block ids.
        table_store: int32 ``[rows, M]``, contiguous.
    """
    if num_updates:
        _update_tables_kernel[(triton.cdiv(num_updates, _BLOCK),)](
            staged, table_store, num_updates, BLOCK=_BLOCK
        )


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    staged,
    sampled,
    table_store,
    input_ids,
    position_ids,
    slot_mapping,
    query_starts,
    context_lens,
    block_tables,
    temperatures,
    seeds,
    sample_positions,
    result_row,
    null_slot,
    store_stride,
    table_stride,
    BUCKET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    token_id = tl.load(staged + row)
    position = tl.load(staged + BUCKET + row)
    store_row = tl.load(staged + 2 * BUCKET + row)
    new_block = tl.load(staged + 3 * BUCKET + row)
    low = tl.load(staged + 4 * BUCKET + row).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(staged + 5 * BUCKET + row).to(tl.int64)
    temperature = tl.load(staged + 6 * BUCKET + row).to(tl.float32, bitcast=True)
    num_rows = tl.load(staged + 7 * BUCKET)
    is_real = store_row >= 0

    fed = tl.load(sampled + tl.maximum(-1 - token_id, 0))
    tl.store(input_ids + row, tl.where(token_id < 0, fed, token_id.to(tl.int64)))
    tl.store(position_ids + row, position.to(tl.int64))
    if row == 0:
        tl.store(query_starts, 0)
        tl.store(result_row, tl.load(staged + 7 * BUCKET + 1))
    tl.store(query_starts + row + 1, tl.where(is_real, row + 1, num_rows))
    tl.store(context_lens + row, tl.where(is_real, position + 1, 0))
    tl.store(temperatures + row, temperature)
    tl.store(seeds + row, low | (high << 32))
    tl.store(sample_positions + row, (position + 1).to(tl.int64))

    table = table_store + tl.maximum(store_row, 0).to(tl.int64) * store_stride
    last = position // BLOCK_SIZE
    current = tl.load(table + last)
    if new_block >= 0:
        current = new_block
        tl.store(table + last, new_block)
    slot = current.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping + row, tl.where(is_real, slot, null_slot))
    if is_real:
        target = block_tables + row.to(tl.int64) * table_stride
        for first in range(0, last, CHUNK):
            i = first + tl.arange(0, CHUNK)
            tl.store(target + i, tl.load(table + i, mask=i < last, other=0), mask=i < last)
        tl.store(target + last, current)


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_kept"],
    do_not_specialize_on_alignment=["staged"],
)
def _mixed_kernel(  # type: ignore[no-untyped-def]
    staged,
    sampled,
    table_store,
    input_ids,
    position_ids,
    slot_mapping,
    query_starts,
    context_lens,
    block_tables,
    logit_rows,
    temperatures,
    seeds,
    sample_positions,
    result_row,
    null_slot,
    store_stride,
    table_stride,
    num_tokens,
    num_rows,
    num_kept,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    part = tl.program_id(1)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    rows_at = staged + 3 * num_tokens
    kept_at = rows_at + 3 * num_rows + 1
    if part == 0:
        mask = i < num_tokens
        token_id = tl.load(staged + i, mask=mask, other=0)
        position = tl.load(staged + num_tokens + i, mask=mask, other=0)
        store_row = tl.load(staged + 2 * num_tokens + i, mask=mask, other=-1)
        is_real = store_row >= 0
        fed = tl.load(sampled + tl.maximum(-1 - token_id, 0), mask=mask, other=0)
        tl.store(input_ids + i, tl.where(token_id < 0, fed, token_id.to(tl.int64)), mask=mask)
        tl.store(position_ids + i, position.to(tl.int64), mask=mask)
        block_id = tl.load(
            table_store + store_row.to(tl.int64) * store_stride + position // BLOCK_SIZE,
            mask=mask & is_real,
            other=0,
        )
        slot = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slot_mapping + i, tl.where(is_real, slot, null_slot), mask=mask)
    elif part == 1:
        mask = i < num_rows + 1
        tl.store(query_starts + i, tl.load(rows_at + i, mask=mask, other=0), mask=mask)
        mask = i < num_rows
        lengths = tl.load(rows_at + num_rows + 1 + i, mask=mask, other=0)
        tl.store(context_lens + i, lengths, mask=mask)
    elif part == 2:
        if tl.program_id(0) == 0:
            tl.store(result_row, tl.load(kept_at + 4 * num_kept))
        mask = i < num_kept
        kept = tl.load(kept_at + i, mask=mask, other=0)
        tl.store(logit_rows + i, kept.to(tl.int64), mask=mask)
        low = tl.load(kept_at + num_kept + i, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(kept_at + 2 * num_kept + i, mask=mask, other=0).to(tl.int64)
        tl.store(seeds + i, low | (high << 32), mask=mask)
        temperature = tl.load(kept_at + 3 * num_kept + i, mask=mask, other=0)
        tl.store(temperatures + i, temperature.to(tl.float32, bitcast=True), mask=mask)
        position = tl.load(staged + num_tokens + kept, mask=mask, other=0)
        tl.store(sample_positions + i, (position + 1).to(tl.int64), mask=mask)
    else:
        row = part - 3
        length = tl.load(rows_at + num_rows + 1 + row)
        store_row = tl.load(rows_at + 2 * num_rows + 1 + row)
        mask = i * BLOCK_SIZE < length
        block_id = tl.load(
            table_store + tl.maximum(store_row, 0).to(tl.int64) * store_stride + i,
            mask=mask,
            other=0,
        )
        tl.store(block_tables + row.to(tl.int64) * table_stride + i, block_id, mask=mask)


class StepTensors(Protocol):
    """What a step is unpacked from and into, on the device; T, B and M are the most there can be.

    Attributes:
        staged: int32, what the host sent. sampled: int64, the tokens of the step before.
        table_store: int32 ``[rows, M]``, a request's block table a row.
        input_ids, position_ids, slot_mapping: int64 ``[T]``, written.
        query_starts: int32 ``[B + 1]``, context_lens: int32 ``[B]``, written.
        block_tables: int32 ``[B, M]``, written: the rows of the store, as far as they are in use.
        logit_rows: int64 ``[B]``, written by :func:`unpack_mixed` alone.
        temperatures: float32, seeds, sample_positions: int64, each ``[B]``, written.
        result_row: int32 ``[1]``, written: where the step's tokens are to go.
    """

    staged: Tensor
    sampled: Tensor
    table_store: Tensor
    input_ids: Tensor
    position_ids: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    temperatures: Tensor
    seeds: Tensor
    sample_positions: Tensor
    result_row: Tensor


def unpack_decode(b: StepTensors, *, bucket: int, block_size: int, null_slot: int) -> None:
    """Unpack a decode step of ``bucket`` rows, padding included; can be captured.

    ``b.staged`` is laid out as :data:`DECODE_FIELDS` says; ``b.table_store`` gets the new blocks.

    Args:
        null_slot: the slot padding writes its KV to.
    """
    _decode_kernel[(bucket,)](
        b.staged,
        b.sampled,
        b.table_store,
        b.input_ids,
        b.position_ids,
        b.slot_mapping,
        b.query_starts,
        b.context_lens,
        b.block_tables,
        b.temperatures,
        b.seeds,
        b.sample_positions,
        b.result_row,
        null_slot,
        b.table_store.stride(0),
        b.block_tables.stride(0),
        BUCKET=bucket,
        BLOCK_SIZE=block_size,
        CHUNK=128,
        num_warps=4,
    )


def unpack_mixed(
    b: StepTensors,
    *,
    num_tokens: int,
    num_rows: int,
    num_kept: int,
    max_num_blocks: int,
    block_size: int,
    null_slot: int,
) -> None:
    """Unpack a step of any kind; can be captured.

    ``b.staged`` holds, one behind the other: token ids, positions and rows of the table store (-1:
    padding), ``[num_tokens]`` each; query starts ``[num_rows + 1]``, context lengths and rows of
    the table store ``[num_rows]``; tokens to keep, low and high words of the seeds and bits of the
    temperatures ``[num_kept]``; where the step's tokens are to go.

    Args:
        max_num_blocks: blocks of the longest row.
        null_slot: the slot padding writes its KV to.
    """
    chunk = 256
    longest = max(num_tokens, num_rows + 1, num_kept, max_num_blocks)
    _mixed_kernel[(triton.cdiv(longest, chunk), 3 + num_rows)](
        b.staged,
        b.sampled,
        b.table_store,
        b.input_ids,
        b.position_ids,
        b.slot_mapping,
        b.query_starts,
        b.context_lens,
        b.block_tables,
        b.logit_rows,
        b.temperatures,
        b.seeds,
        b.sample_positions,
        b.result_row,
        null_slot,
        b.table_store.stride(0),
        b.block_tables.stride(0),
        num_tokens,
        num_rows,
        num_kept,
        BLOCK_SIZE=block_size,
        CHUNK=chunk,
        num_warps=4,
    )
