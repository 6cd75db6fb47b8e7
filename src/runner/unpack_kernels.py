"""Kernels that turn what the host staged for a step into the inputs of the graph.

The block tables of running requests stay on the device, one row of ``table_store`` a request, and
only what changed is sent. Attention reads them there: ``table_rows`` names the row of each row of
the step. Token ids that the previous step sampled are read where it left them: the host sends
``-(j + 1)`` for the j-th token that step sampled, and need not have seen it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile.step_inputs import StepInputs
from .device_buffers import StepBuffers
from .step_shapes import StepShape

_BLOCK = 256


@triton.jit(do_not_specialize=["num_updates"], do_not_specialize_on_alignment=["staged"])
def _update_tables_kernel(staged, tables, num_updates, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_updates
    where = tl.load(staged + i, mask=mask, other=0).to(tl.int64)
    block_id = tl.load(staged + num_updates + i, mask=mask, other=0)
    tl.store(tables + where, block_id, mask=mask)


def update_tables(staged: Tensor, tables: Tensor, num_updates: int) -> None:
    """Write ids of blocks and slots into the tables of requests.

    Args:
        staged: int32 ``[2 * num_updates]``: flat indices into the tables, then ids.
        tables: int32, contiguous.
    """
    if num_updates:
        _update_tables_kernel[(triton.cdiv(num_updates, _BLOCK),)](
            staged, tables, num_updates, BLOCK=_BLOCK
        )


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    staged, sampled, table_store, input_ids, position_ids, slot_mapping, query_starts, context_lens,
    table_rows, temperatures, seeds, sample_positions, result_row, null_slot,
    width,  # blocks of a row of table_store
    BUCKET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Staged as :data:`.device_buffers.DECODE_FIELDS` says. Grid: ``(BUCKET,)``."""
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

    # Padding, too, has a row that can be read.
    table_row = tl.maximum(store_row, 0)
    tl.store(table_rows + row, table_row)
    table = table_store + table_row.to(tl.int64) * width
    last = position // BLOCK_SIZE
    current = tl.load(table + last)
    if new_block >= 0:
        current = new_block
        tl.store(table + last, new_block)
    slot = current.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping + row, tl.where(is_real, slot, null_slot))


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows"],
    do_not_specialize_on_alignment=["staged"],
)
def _mixed_kernel(  # type: ignore[no-untyped-def]
    staged, sampled, table_store, input_ids, position_ids, slot_mapping, query_starts, context_lens,
    table_rows, temperatures, seeds, sample_positions, result_row, null_slot, width,
    logit_rows, num_tokens, num_rows,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Staged one behind the other: token ids, positions and rows of the table store (-1: padding),
    ``[num_tokens]`` each; query starts ``[num_rows + 1]``; context lengths, rows of the table
    store, tokens to keep, low and high words of the seeds and bits of the temperatures
    ``[num_rows]``; where the step's tokens are to go.

    Grid: chunks of the longest of these, by 3.
    """
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
            table_store + store_row.to(tl.int64) * width + position // BLOCK_SIZE,
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
        store_row = tl.load(rows_at + 2 * num_rows + 1 + i, mask=mask, other=0)
        tl.store(table_rows + i, store_row, mask=mask)
    else:
        if tl.program_id(0) == 0:
            tl.store(result_row, tl.load(kept_at + 4 * num_rows))
        mask = i < num_rows
        kept = tl.load(kept_at + i, mask=mask, other=0)
        tl.store(logit_rows + i, kept.to(tl.int64), mask=mask)
        low = tl.load(kept_at + num_rows + i, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(kept_at + 2 * num_rows + i, mask=mask, other=0).to(tl.int64)
        tl.store(seeds + i, low | (high << 32), mask=mask)
        temperature = tl.load(kept_at + 3 * num_rows + i, mask=mask, other=0)
        tl.store(temperatures + i, temperature.to(tl.float32, bitcast=True), mask=mask)
        position = tl.load(staged + num_tokens + kept, mask=mask, other=0)
        tl.store(sample_positions + i, (position + 1).to(tl.int64), mask=mask)


@triton.jit
def _state_tables_kernel(  # type: ignore[no-untyped-def]
    table_rows, query_starts, context_lens, state_store, state_tables, interval, width,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The entries that a step looks at, of each row that has tokens. Grid: ``(rows,)``.

    Args:
        table_rows: row of ``state_store`` of each row. width: entries of a state table.
    """
    row = tl.program_id(0)
    length = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
    if length > 0:
        end = tl.load(context_lens + row)
        source = state_store + tl.load(table_rows + row).to(tl.int64) * width
        target = state_tables + row.to(tl.int64) * width
        first = tl.maximum(end - length - 1, 0) // interval
        last = (end - 1) // interval
        for begin in range(first, last + 1, CHUNK):
            i = begin + tl.arange(0, CHUNK)
            mask = i <= last
            tl.store(target + i, tl.load(source + i, mask=mask, other=0), mask=mask)


def unpack(
    b: StepBuffers, shape: StepShape, block_size: int, null_slot: int, state_interval: int = 0
) -> StepInputs:
    """Unpack ``b.staged``, a step of this shape, into the graph's inputs; can be captured.

    ``b.table_store`` gets the new blocks of a decode step.

    Args:
        null_slot: the slot padding writes its KV to.
        state_interval: tokens of an entry of a state table, where ``b`` has such tables.
    """
    tensors = (
        b.staged, b.sampled, b.table_store, b.input_ids, b.position_ids, b.slot_mapping,
        b.query_starts, b.context_lens, b.table_rows, b.temperatures, b.seeds, b.sample_positions,
        b.result_row, null_slot, b.width,
    )  # fmt: skip
    num_tokens, num_rows = shape.num_tokens, shape.num_rows
    if shape.is_decode:
        _decode_kernel[(num_rows,)](*tensors, BUCKET=num_rows, BLOCK_SIZE=block_size)
        _take_state_tables(b, num_rows, state_interval)
        return b.decode_inputs(num_rows)
    num_chunks = triton.cdiv(max(num_tokens, num_rows + 1), _BLOCK)
    _mixed_kernel[(num_chunks, 3)](
        *tensors, b.logit_rows, num_tokens, num_rows, BLOCK_SIZE=block_size, CHUNK=_BLOCK
    )
    _take_state_tables(b, num_rows, state_interval)
    return b.mixed_inputs(num_tokens, num_rows)


def _take_state_tables(b: StepBuffers, num_rows: int, interval: int) -> None:
    """After the other inputs of the step, which it reads."""
    if b.state_store is not None:
        _state_tables_kernel[(num_rows,)](
            *(b.table_rows, b.query_starts, b.context_lens, b.state_store, b.state_tables),
            *(interval, b.state_width),
            CHUNK=16,
        )
