"""Kernels that unpack the staged integers of a step into the inputs of the graph.

The block tables of running requests stay on the device, one row of ``table_store`` per request, and
only changes are sent. Attention reads them there: ``table_rows`` gives the store row of each row of
the step. Token ids that the preceding step sampled are read on the device: the host sends ``-(j +
1)`` for the j-th token that step sampled, and need not have received it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...compile.step_inputs import StepInputs
from ..layout import StepShape
from .device_buffers import StepBuffers

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
    token_ids, positions, table_rows, new_blocks, packed_seeds, packed_temperatures,
    num_padding_rows, packed_result_row,
    sampled, table_store, input_ids, position_ids, slot_mapping,
    temperatures, seeds, sample_positions, result_row, null_slot,
    width,  # blocks per row of table_store
    query_starts, context_lens,
    BUCKET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The first two lines of arguments are fields as packed by the host. Grid: ``(BUCKET,)``."""
    row = tl.program_id(0)
    token_id = tl.load(token_ids + row)
    position = tl.load(positions + row)
    new_block = tl.load(new_blocks + row)
    num_rows = BUCKET - tl.load(num_padding_rows)
    is_real = row < num_rows

    fed = tl.load(sampled + tl.maximum(-1 - token_id, 0))
    tl.store(input_ids + row, tl.where(token_id < 0, fed, token_id.to(tl.int64)))
    tl.store(position_ids + row, position.to(tl.int64))
    if row == 0:
        tl.store(query_starts, 0)
        tl.store(result_row, tl.load(packed_result_row))
    tl.store(query_starts + row + 1, tl.where(is_real, row + 1, num_rows))
    tl.store(context_lens + row, tl.where(is_real, position + 1, 0))
    tl.store(temperatures + row, tl.load(packed_temperatures + row))
    tl.store(seeds + row, tl.load(packed_seeds + row))
    tl.store(sample_positions + row, (position + 1).to(tl.int64))

    table_row = tl.load(table_rows + row)
    table = table_store + table_row.to(tl.int64) * width
    last = position // BLOCK_SIZE
    current = tl.load(table + last)
    if new_block >= 0:
        current = new_block
        tl.store(table + last, new_block)
    slot = current.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping + row, tl.where(is_real, slot, null_slot))


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _mixed_kernel(  # type: ignore[no-untyped-def]
    token_ids, positions, token_rows, logits_to_keep, packed_seeds, packed_temperatures,
    packed_result_row,
    sampled, table_store, input_ids, position_ids, slot_mapping,
    temperatures, seeds, sample_positions, result_row, null_slot, width,
    num_tokens, num_rows,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The first two lines of arguments are fields as packed by the host.

    Grid: chunks of the longest of these, by 2.
    """
    part = tl.program_id(1)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    if part == 0:
        mask = i < num_tokens
        token_id = tl.load(token_ids + i, mask=mask, other=0)
        position = tl.load(positions + i, mask=mask, other=0)
        table_row = tl.load(token_rows + i, mask=mask, other=-1)
        is_real = table_row >= 0
        fed = tl.load(sampled + tl.maximum(-1 - token_id, 0), mask=mask, other=0)
        tl.store(input_ids + i, tl.where(token_id < 0, fed, token_id.to(tl.int64)), mask=mask)
        tl.store(position_ids + i, position.to(tl.int64), mask=mask)
        block_id = tl.load(
            table_store + table_row.to(tl.int64) * width + position // BLOCK_SIZE,
            mask=mask & is_real,
            other=0,
        )
        slot = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slot_mapping + i, tl.where(is_real, slot, null_slot), mask=mask)
    else:
        if tl.program_id(0) == 0:
            tl.store(result_row, tl.load(packed_result_row))
        mask = i < num_rows
        seed = tl.load(packed_seeds + i, mask=mask, other=0)
        tl.store(seeds + i, seed, mask=mask)
        temperature = tl.load(packed_temperatures + i, mask=mask, other=0.0)
        tl.store(temperatures + i, temperature, mask=mask)
        kept = tl.load(logits_to_keep + i, mask=mask, other=0)
        position = tl.load(positions + kept, mask=mask, other=0)
        tl.store(sample_positions + i, (position + 1).to(tl.int64), mask=mask)


def unpack(b: StepBuffers, shape: StepShape, block_size: int, null_slot: int) -> StepInputs:
    """Unpack ``b.staged``, a step of this shape, into the graph's inputs; can be captured.

    ``b.table_store`` gets the new blocks of a decode step.

    Args:
        null_slot: the slot to which padding writes its KV.
    """
    packed, inputs = b.packed(shape), b.inputs(shape)
    targets = (
        b.sampled, b.table_store, b.derived["input_ids"], b.derived["position_ids"],
        b.derived["slot_mapping"], b.temperatures, b.seeds, b.sample_positions, b.result_row,
        null_slot, b.width,
    )  # fmt: skip
    num_tokens, num_rows = shape.num_tokens, shape.num_rows
    if shape.is_decode:
        names: tuple[str, ...] = (
            "token_ids", "positions", "table_rows", "new_blocks", "seeds", "temperatures",
            "num_padding_rows", "result_row",
        )  # fmt: skip
        _decode_kernel[(num_rows,)](
            *(packed[name] for name in names),
            *(*targets, inputs.query_starts, inputs.context_lens),
            BUCKET=num_rows, BLOCK_SIZE=block_size,
        )  # fmt: skip
    else:
        names = (
            "token_ids", "positions", "token_rows", "logits_to_keep", "seeds", "temperatures",
            "result_row",
        )  # fmt: skip
        num_chunks = triton.cdiv(max(num_tokens, num_rows), _BLOCK)
        _mixed_kernel[(num_chunks, 2)](
            *(packed[name] for name in names), *(*targets, num_tokens, num_rows),
            BLOCK_SIZE=block_size, CHUNK=_BLOCK,
        )  # fmt: skip
    return inputs
