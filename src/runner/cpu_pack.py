"""Packs a plan into the input tensors of a step, without padding between requests (varlen).

    row 0            row 1   row 2                padding
    | t0 t1 t2 t3 | t4    | t5 t6 t7          | t8 ...      T tokens
    ^query_starts[0]      ^query_starts[2]    ^query_starts[B]

Padding, where the graph needs at least two of something, writes into the null block, belongs to
no row, and is never sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..compile.step_inputs import INPUT_NAMES, MIN_SIZE, STATE_TABLES, StepInputs
from ..engine.plan import Blocks, StepPlan
from ..engine.request import RequestInfo
from ..kernels.sampling.sampler import OF_REQUEST, SamplingInputs
from .layout import LAYOUT, Layout, PlanArrays, StepShape
from .logprobs import LogprobInputs, prompt_fields, sampled_fields

_INITIAL_BLOCKS = 16


class _Table:
    """A request's block or state table as an array that grows by doubling."""

    def __init__(self, blocks: Blocks) -> None:
        self._ids = np.empty(max(len(blocks), _INITIAL_BLOCKS), np.int32)
        self._num_blocks = 0
        self.append(blocks)

    def append(self, blocks: Blocks) -> None:
        begin, end = self._num_blocks, self._num_blocks + len(blocks)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), np.int32)
            grown[:begin] = self._ids[:begin]
            self._ids = grown
        self._ids[begin:end] = blocks
        self._num_blocks = end

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: self._num_blocks]


def _taken_in(
    known: dict[str, _Table], plan: StepPlan, whole: dict[int, Blocks], added: dict[int, Blocks]
) -> list[NDArray[np.int32]]:
    """The tables of the plan's rows, updated by the plan.

    Raises:
        RuntimeError: it releases a request that has none.
    """
    names = [request.request_id for request in plan.requests]
    for name in plan.released:
        if name not in known:
            raise RuntimeError(f"step {plan.step} releases {name!r}, which has no table")
        del known[name]
    for row, table in whole.items():
        known[names[row]] = _Table(table)
    for row, ids in added.items():
        known[names[row]].append(ids)
    return [known[name].ids for name in names]


def _check_lengths(
    plan: StepPlan, rows: Sequence[NDArray[np.int32]], tokens_per_entry: int, what: str
) -> None:
    for request, start, num_tokens, ids in zip(
        plan.requests, plan.starts, plan.num_tokens, rows, strict=True
    ):
        needed = start + num_tokens
        if len(ids) * tokens_per_entry < needed:
            # Unnoticed, its tokens would go to the null block, or the null slot.
            name = request.request_id
            raise ValueError(f"request {name}: {len(ids)} {what} for {needed} tokens")


def _as_matrix(rows: Sequence[NDArray[np.int32]], num_rows: int, filler: int) -> NDArray[np.int32]:
    tables = np.full((num_rows, max([MIN_SIZE, *map(len, rows)])), filler, np.int32)
    for row, ids in enumerate(rows):
        tables[row, : len(ids)] = ids
    return tables


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Inputs of the graph and of the sampler.

    Attributes:
        num_sampled: how many of ``inputs.logits_to_keep`` are real.
        sampling: None if every sampled row is greedy.
        logprobs: the requested log-probabilities.
        copies: (source, destination) block ids, to be copied before the step is computed.
    """

    inputs: StepInputs
    num_sampled: int
    sampling: SamplingInputs | None
    logprobs: LogprobInputs
    copies: Sequence[tuple[int, int]] = ()

    def to_arrays(self) -> list[NDArray[Any]]:
        """All of it, for another process."""
        names = (*INPUT_NAMES, *self.inputs.more)
        arrays = [self.inputs.tensor(name).numpy() for name in names]
        arrays.append(np.array([self.num_sampled, *chain(*self.copies)], np.int64))
        arrays += [self.logprobs.sampled, self.logprobs.prompt]
        if self.sampling is not None:
            arrays += [tensor.numpy() for tensor in self.sampling.tensors()]
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Sequence[NDArray[Any]], layout: Layout = LAYOUT) -> PackedStep:
        """What :meth:`to_arrays` gave, of a packer with that layout."""
        tensors = list(map(torch.from_numpy, arrays))
        others = [n for n in layout.input_names("host") if n not in INPUT_NAMES]
        named = dict(zip((*INPUT_NAMES, *others), tensors, strict=False))
        inputs = {name: named.pop(name) for name in INPUT_NAMES}
        num_inputs = len(INPUT_NAMES) + len(others)
        sampling = tensors[num_inputs + 3 :]
        num_sampled, *blocks = arrays[num_inputs].tolist()
        return cls(
            StepInputs(**inputs, more=named),
            num_sampled,
            SamplingInputs.from_tensors(*sampling) if sampling else None,
            LogprobInputs(*arrays[num_inputs + 1 : num_inputs + 3]),
            list(zip(blocks[::2], blocks[1::2], strict=True)),
        )


class CpuStepPacker:
    """Turns plans into :class:`PackedStep`; keeps block and state tables as arrays between steps.

    Args:
        num_state_slots: 0 of models without recurrent layers, which have no state tables.
        state_interval: tokens of an entry of a state table.
        layout: of the steps.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        device: torch.device,
        num_state_slots: int = 0,
        state_interval: int = 0,
        layout: Layout = LAYOUT,
    ) -> None:
        self._layout = layout
        self._num_state_slots, self._state_interval = num_state_slots, state_interval
        self._block_size = block_size
        self._null_slot = num_blocks * block_size
        self._null_block = num_blocks
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Forget all tables and sampled tokens, as after a failed step."""
        self._tables: dict[str, _Table] = {}
        self._state_tables: dict[str, _Table] = {}
        self._sampled = np.empty(0, np.int64)

    def remember(self, token_ids: NDArray[np.int64]) -> None:
        """The plan packed last sampled ``token_ids``, which the next one may feed."""
        self._sampled = token_ids

    def pack(self, plan: StepPlan) -> PackedStep:
        """Takes in the plan's block and state tables, and packs the step.

        Raises:
            ValueError: a table does not cover the positions of its row.
            RuntimeError: the plan releases a request that was not admitted since the last reset.
        """
        num_rows = len(plan)
        step = PlanArrays(plan, table_rows=np.arange(num_rows, dtype=np.int32))
        num_tokens, num_sampled = plan.total_num_tokens, step.counts["sample"]
        t, b, s = (max(n, MIN_SIZE) for n in (num_tokens, num_rows, num_sampled))
        shape = StepShape(t, b, s, "host")
        array = np.empty(self._layout.num_words(shape), np.int32)
        self._layout.pack(step, shape, array)
        packed = self._layout.views(torch.from_numpy(array), shape)

        ids = packed["token_ids"].numpy().astype(np.int64)
        fed = np.flatnonzero(ids < 0)
        ids[fed] = self._sampled[-1 - ids[fed]]
        positions = packed["positions"].numpy().astype(np.int64)
        tables = self._block_tables(plan, shape.num_rows)
        slots = np.full(shape.num_tokens, self._null_slot, np.int64)
        blocks, offsets = np.divmod(positions[:num_tokens], self._block_size)
        rows = np.repeat(np.arange(num_rows), step.lengths)
        slots[:num_tokens] = tables[rows, blocks].astype(np.int64) * self._block_size + offsets

        derived = {
            "input_ids": torch.from_numpy(ids),
            "position_ids": torch.from_numpy(positions),
            "slot_mapping": torch.from_numpy(slots),
        }
        tensors = self._layout.inputs(packed, derived, shape)
        tensors["block_tables"] = torch.from_numpy(tables)
        if self._num_state_slots:
            tensors[STATE_TABLES] = torch.from_numpy(self._tables_of_states(plan, shape.num_rows))
        inputs = StepInputs.of({name: t.to(self._device) for name, t in tensors.items()})
        sampled = step.sampled_requests
        logprobs = LogprobInputs(sampled_fields(sampled), prompt_fields(plan))
        # A sample will sit one past the position that it is sampled from.
        kept = packed["logits_to_keep"].numpy()[:num_sampled]
        sampling = self._sampling(sampled, (positions[kept] + 1).tolist())
        return PackedStep(inputs, num_sampled, sampling, logprobs, plan.copies)

    def _block_tables(self, plan: StepPlan, padded_rows: int) -> NDArray[np.int32]:
        rows = _taken_in(self._tables, plan, plan.tables, plan.new_blocks)
        _check_lengths(plan, rows, self._block_size, "blocks")
        return _as_matrix(rows, padded_rows, self._null_block)

    def _tables_of_states(self, plan: StepPlan, padded_rows: int) -> NDArray[np.int32]:
        rows = _taken_in(self._state_tables, plan, plan.state_tables, plan.new_state_slots)
        _check_lengths(plan, rows, self._state_interval, "state slots")
        tables = _as_matrix(rows, padded_rows, self._num_state_slots)
        tables[tables < 0] = self._num_state_slots
        return tables

    def _sampling(
        self, requests: Sequence[RequestInfo], positions: Sequence[int]
    ) -> SamplingInputs | None:
        """``requests``, ``positions``: of each sample its request and its own position."""
        params = [request.sampling_params for request in requests]
        if all(p.temperature == 0.0 for p in params):
            return None
        return SamplingInputs.from_lists(
            **{name: [getattr(p, name) for p in params] for name in OF_REQUEST},
            seeds=[request.seed for request in requests],
            positions=positions,
            device=self._device,
        )
