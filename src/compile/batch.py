"""Packs a plan into the tensors of a step.

    row 0            row 1   row 2                padding
    | t0 t1 t2 t3 | t4    | t5 t6 t7          | t8 ...      T tokens
    ^query_starts[0]      ^query_starts[2]    ^query_starts[B]

Padding, where the graph needs at least two of something, writes into the null block, belongs to
no row, and is never sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagespec.compile.staging import TokenSource
from pagespec.compile.step_inputs import MIN_SIZE, StepInputs
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.kernels.sampling import SamplingInputs

_INITIAL_BLOCKS = 16
_MAX_STALE_TABLES = 64


@dataclass(slots=True)
class _Table:
    """A request's block table as an array that grows by doubling."""

    request: Request
    blocks: NDArray[np.int32]
    num_blocks: int = 0

    def update(self, num_new: int) -> NDArray[np.int32]:
        table = self.request.block_table
        # New ids were appended to what is known. Anything else (a new admission, or one after a
        # preemption, whose ids are all new) is read afresh.
        known = self.num_blocks if self.num_blocks + num_new == len(table) else 0
        if len(table) > len(self.blocks):
            grown = np.empty(max(len(table), 2 * len(self.blocks)), np.int32)
            grown[:known] = self.blocks[:known]
            self.blocks = grown
        if known < len(table):
            self.blocks[known : len(table)] = table[known:]
        self.num_blocks = len(table)
        return self.blocks[: self.num_blocks]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Inputs of the graph and of the sampler.

    Attributes:
        num_sampled: how many of ``inputs.logits_to_keep`` are real.
        sampling: None if every sampled row is greedy.
    """

    inputs: StepInputs
    num_sampled: int
    sampling: SamplingInputs | None


class BatchPacker:
    """Turns plans into :class:`PackedStep`; keeps block tables as arrays between steps.

    Relies on ``StepPlan.new_blocks``: a block table changes only by appending those ids, unless
    they are the whole table.
    """

    def __init__(self, *, block_size: int, num_blocks: int, device: torch.device) -> None:
        self._block_size = block_size
        self._null_slot = num_blocks * block_size
        self._null_block = num_blocks
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Know nothing of the steps before."""
        self._tables: dict[int, _Table] = {}
        self._tokens = TokenSource()
        self._sampled: NDArray[np.int64] | None = None

    def note(self, plan: StepPlan | None, token_ids: NDArray[np.int64] | None = None) -> None:
        """``plan`` was computed and sampled ``token_ids``, which the next plan may feed before
        its requests know them; None forgets the previous plan."""
        self._tokens.note(plan)
        self._sampled = token_ids

    def pack(self, plan: StepPlan) -> PackedStep:
        """Reads the plan's requests; writes nothing to them.

        Raises:
            ValueError: a block table does not cover the positions of its row.
        """
        num_rows = len(plan)
        lengths = np.array(plan.num_tokens, np.int64)
        starts = np.array(plan.starts, np.int64)
        num_tokens = int(lengths.sum())
        padded_tokens = max(num_tokens, MIN_SIZE)
        padded_rows = max(num_rows, MIN_SIZE)

        query_starts = np.zeros(padded_rows + 1, np.int32)
        np.cumsum(lengths, out=query_starts[1 : num_rows + 1])
        query_starts[num_rows + 1 :] = num_tokens
        context_lens = np.zeros(padded_rows, np.int32)
        context_lens[:num_rows] = starts + lengths

        ids = np.zeros((1, padded_tokens), np.int64)
        ids[0, :num_tokens] = self._tokens.all_ids(plan)
        if self._sampled is not None:
            fed = np.flatnonzero(ids[0] < 0)
            ids[0, fed] = self._sampled[-1 - ids[0, fed]]
        rows = np.repeat(np.arange(num_rows), lengths)
        positions = np.zeros((1, padded_tokens), np.int64)
        positions[0, :num_tokens] = (
            np.arange(num_tokens) - query_starts[:num_rows][rows] + starts[rows]
        )
        tables = self._block_tables(plan, padded_rows)
        slots = np.full(padded_tokens, self._null_slot, np.int64)
        blocks, offsets = np.divmod(positions[0, :num_tokens], self._block_size)
        slots[:num_tokens] = tables[rows, blocks].astype(np.int64) * self._block_size + offsets

        sampled = np.flatnonzero(np.array(plan.sampled, bool))
        kept = np.zeros(max(len(sampled), MIN_SIZE), np.int64)
        kept[: len(sampled)] = query_starts[sampled + 1] - 1
        if 0 < len(sampled) < MIN_SIZE:
            kept[len(sampled) :] = kept[0]
        inputs = StepInputs(
            input_ids=self._to_device(ids),
            position_ids=self._to_device(positions),
            logits_to_keep=self._to_device(kept),
            slot_mapping=self._to_device(slots),
            query_starts=self._to_device(query_starts),
            context_lens=self._to_device(context_lens),
            block_tables=self._to_device(tables),
        )
        return PackedStep(inputs, len(sampled), self._sampling(plan, sampled.tolist()))

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _block_tables(self, plan: StepPlan, padded_rows: int) -> NDArray[np.int32]:
        for request in plan.preempted:
            self._tables.pop(id(request), None)
        known = self._tables
        rows = []
        for row, request in enumerate(plan.requests):
            # The entry holds the request, so its id cannot be reused while the entry lives.
            table = known.get(id(request))
            if table is None:
                table = known[id(request)] = _Table(request, np.empty(_INITIAL_BLOCKS, np.int32))
            blocks = table.update(len(plan.new_blocks.get(row, ())))
            needed = plan.starts[row] + plan.num_tokens[row]
            if len(blocks) * self._block_size < needed:
                # Unnoticed, its tokens would go to the null block.
                raise ValueError(f"{request!r}: its block table does not cover {needed} tokens")
            rows.append(blocks)
        if len(known) > 2 * len(rows) + _MAX_STALE_TABLES:
            current = {id(request) for request in plan.requests}
            self._tables = {key: table for key, table in known.items() if key in current}
        width = max([MIN_SIZE, *map(len, rows)])
        tables = np.full((padded_rows, width), self._null_block, np.int32)
        for row, blocks in enumerate(rows):
            tables[row, : len(blocks)] = blocks
        return tables

    def _sampling(self, plan: StepPlan, sampled: Iterable[int]) -> SamplingInputs | None:
        requests = [plan.requests[row] for row in sampled]
        params = [request.sampling_params for request in requests]
        if all(p.temperature == 0.0 for p in params):
            return None
        # The sampled token will sit one past the last position computed.
        positions = [plan.starts[row] + plan.num_tokens[row] for row in sampled]
        return SamplingInputs.from_lists(
            temperature=[p.temperature for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            seeds=[request.seed for request in requests],
            positions=positions,
            device=self._device,
        )
