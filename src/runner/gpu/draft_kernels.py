"""Kernels between the steps of a target and the calls of its drafter, and between these calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...compile.step_inputs import StepInputs
from ...engine.runner import MAX_DRAFT_TOKENS
from ..layout import StepShape
from .device_buffers import StepBuffers

_CHUNK = 256


@dataclass(frozen=True, slots=True, eq=False)
class DraftBuffers:
    """What the drafter's calls read and write, at fixed addresses. R is the most rows of a step, T
    the most tokens.

    Attributes:
        next_ids: int64 ``[T]``, the token behind each token of a step.
        last_tokens: int64 ``[R]``, the token of the step that each row's first draft token follows.
        ids, positions: int64 ``[R]``, the token that each row computes in its next call, and where.
        num_wanted, num_drafted: int32 ``[R]``. table_rows: int32 ``[R]``.
        temperatures: float32 ``[R]``. seeds, sample_positions: int64 ``[R]``, the latter of the
            next draft token. sampled: int64 ``[R]``.
        tokens: int64 ``[R, MAX_DRAFT_TOKENS]``, the draft tokens of each row.
        input_ids, position_ids, slot_mapping, logits_to_keep: int64 ``[R]``. query_starts: int32
            ``[R + 1]``. context_lens: int32 ``[R]``. Inputs of a call with a token per row.
    """

    next_ids: Tensor
    last_tokens: Tensor
    ids: Tensor
    positions: Tensor
    num_wanted: Tensor
    num_drafted: Tensor
    table_rows: Tensor
    temperatures: Tensor
    seeds: Tensor
    sample_positions: Tensor
    sampled: Tensor
    tokens: Tensor
    input_ids: Tensor
    position_ids: Tensor
    slot_mapping: Tensor
    logits_to_keep: Tensor
    query_starts: Tensor
    context_lens: Tensor

    @classmethod
    def of(cls, b: StepBuffers) -> DraftBuffers:
        """Zeros for the largest steps of these buffers."""
        num_rows, device = b.num_rows, b.staged.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def arange(end: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.arange(end, dtype=dtype, device=device)

        return cls(
            next_ids=zeros(b.num_tokens),
            last_tokens=zeros(num_rows),
            ids=zeros(num_rows),
            positions=zeros(num_rows),
            num_wanted=zeros(num_rows, dtype=torch.int32),
            num_drafted=zeros(num_rows, dtype=torch.int32),
            table_rows=zeros(num_rows, dtype=torch.int32),
            temperatures=zeros(num_rows, dtype=torch.float32),
            seeds=zeros(num_rows),
            sample_positions=zeros(num_rows),
            sampled=zeros(num_rows),
            tokens=zeros(num_rows, MAX_DRAFT_TOKENS),
            input_ids=zeros(num_rows),
            position_ids=zeros(num_rows),
            slot_mapping=zeros(num_rows),
            logits_to_keep=arange(num_rows),
            query_starts=arange(num_rows + 1, torch.int32),
            context_lens=zeros(num_rows, dtype=torch.int32),
        )

    def clear(self) -> None:
        """Reset what kernels write, so that none reads values of another shape where a kernel that
        is still compiled was skipped."""
        for tensor in (self.next_ids, self.last_tokens, self.input_ids, self.position_ids):
            tensor.zero_()
        for tensor in (self.num_wanted, self.num_drafted, self.table_rows, self.slot_mapping):
            tensor.zero_()
        self.context_lens.fill_(1)

    def inputs(self, num_rows: int, block_tables: Tensor) -> StepInputs:
        """The inputs of a call with a token per row."""
        return StepInputs(
            input_ids=self.input_ids[:num_rows].unsqueeze(0),
            position_ids=self.position_ids[:num_rows].unsqueeze(0),
            logits_to_keep=self.logits_to_keep[:num_rows],
            slot_mapping=self.slot_mapping[:num_rows],
            query_starts=self.query_starts[: num_rows + 1],
            context_lens=self.context_lens[:num_rows],
            block_tables=block_tables,
            table_rows=self.table_rows[:num_rows],
        )


@triton.jit
def _accept_kernel(  # type: ignore[no-untyped-def]
    query_starts, packed_table_rows, packed_num_wanted,
    sample_bounds, next_token_ids,  # None in decode steps
    input_ids, position_ids, sampled, packed_temperatures, packed_seeds,
    next_ids, last_tokens, ids, positions, num_wanted, num_drafted, table_rows,
    temperatures, seeds, sample_positions,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The first two lines of arguments are fields of the step. Grid: ``(rows,)``.

    The target's samples are compared with the draft tokens of the row, which are its last tokens.
    """
    row = tl.program_id(0)
    begin = tl.load(query_starts + row)
    end = tl.load(query_starts + row + 1)
    if sample_bounds is None:
        first_sample = row
        num_samples = tl.minimum(end - begin, 1)
        following = (row * 0).to(tl.int64)
    else:
        first_sample = tl.load(sample_bounds + row)
        num_samples = tl.load(sample_bounds + row + 1) - first_sample
        following = tl.load(next_token_ids + row).to(tl.int64)

    num_accepted = num_samples * 0
    is_right = num_samples > 1
    for i in range(num_samples - 1):
        draft = tl.load(input_ids + end - num_samples + 1 + i)
        is_right = is_right & (draft == tl.load(sampled + first_sample + i))
        num_accepted += is_right.to(tl.int32)
    num_rejected = tl.maximum(num_samples - 1, 0) - num_accepted
    last = tl.maximum(end - 1 - num_rejected, 0)
    last_sample = first_sample + num_accepted
    if num_samples > 0:
        following = tl.load(sampled + last_sample)
        tl.store(temperatures + row, tl.load(packed_temperatures + last_sample))
        tl.store(seeds + row, tl.load(packed_seeds + last_sample))

    if next_ids is not None:
        for at in range(begin, end, CHUNK):
            token = at + tl.arange(0, CHUNK)
            behind = tl.load(input_ids + token + 1, mask=token + 1 < end, other=0)
            behind = tl.where(token == last, following, behind)
            tl.store(next_ids + token, behind, mask=token < end)
    position = tl.load(position_ids + last)
    tl.store(last_tokens + row, last.to(tl.int64))
    tl.store(ids + row, following)
    tl.store(positions + row, position + 1)
    tl.store(sample_positions + row, position + 2)
    tl.store(num_wanted + row, tl.load(packed_num_wanted + row))
    tl.store(num_drafted + row, 0)
    tl.store(table_rows + row, tl.load(packed_table_rows + row))


def accept(d: DraftBuffers, b: StepBuffers, shape: StepShape, *, is_shifted: bool) -> None:
    """Begin drafting behind a step of this shape that was sampled: which draft tokens are accepted,
    and where each row goes on. ``is_shifted``: also write ``d.next_ids``."""
    packed, inputs = b.packed(shape), b.inputs(shape)
    _accept_kernel[(shape.num_rows,)](
        inputs.query_starts, packed["table_rows"], packed["num_wanted"],
        packed.get("sample_bounds"), packed.get("next_token_ids"),
        b.derived["input_ids"], b.derived["position_ids"], b.sampled, b.temperatures, b.seeds,
        d.next_ids if is_shifted else None, d.last_tokens, d.ids, d.positions, d.num_wanted,
        d.num_drafted, d.table_rows, d.temperatures, d.seeds, d.sample_positions,
        CHUNK=_CHUNK,
    )  # fmt: skip


@triton.jit
def _place_kernel(  # type: ignore[no-untyped-def]
    ids, positions, num_wanted, num_drafted, table_rows, table_store,
    input_ids, position_ids, slot_mapping, context_lens, null_slot, width,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: ``(rows,)``."""
    row = tl.program_id(0)
    is_drafting = tl.load(num_drafted + row) < tl.load(num_wanted + row)
    position = tl.where(is_drafting, tl.load(positions + row), 0)
    table = table_store + tl.load(table_rows + row).to(tl.int64) * width
    block_id = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(input_ids + row, tl.where(is_drafting, tl.load(ids + row), 0))
    tl.store(position_ids + row, position)
    tl.store(slot_mapping + row, tl.where(is_drafting, slot, null_slot))
    tl.store(context_lens + row, (position + 1).to(tl.int32))


def place(
    d: DraftBuffers, b: StepBuffers, num_rows: int, block_size: int, null_slot: int
) -> StepInputs:
    """The inputs of the next call with a token per row. A row that wants no more tokens computes
    position 0 again, and writes to ``null_slot``."""
    _place_kernel[(num_rows,)](
        d.ids, d.positions, d.num_wanted, d.num_drafted, d.table_rows, b.table_store,
        d.input_ids, d.position_ids, d.slot_mapping, d.context_lens, null_slot, b.width,
        BLOCK_SIZE=block_size,
    )  # fmt: skip
    return d.inputs(num_rows, b.table_store)


@triton.jit
def _keep_kernel(  # type: ignore[no-untyped-def]
    sampled, tokens, ids, positions, sample_positions, num_wanted, num_drafted,
    IS_FIRST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Grid: ``(rows,)``."""
    row = tl.program_id(0)
    num = tl.load(num_drafted + row)
    if num < tl.load(num_wanted + row):
        token = tl.load(sampled + row)
        tl.store(tokens + row * MOST + num, token)
        tl.store(ids + row, token)
        tl.store(num_drafted + row, num + 1)
        tl.store(sample_positions + row, tl.load(sample_positions + row) + 1)
        if not IS_FIRST:
            tl.store(positions + row, tl.load(positions + row) + 1)


def keep(d: DraftBuffers, num_rows: int, *, is_first: bool) -> None:
    """Store the tokens that a call sampled, for the host and for the next call.

    Args:
        is_first: the call computed the positions of the step, not the next ones.
    """
    _keep_kernel[(num_rows,)](
        d.sampled, d.tokens, d.ids, d.positions, d.sample_positions, d.num_wanted, d.num_drafted,
        IS_FIRST=is_first, MOST=MAX_DRAFT_TOKENS,
    )  # fmt: skip
