"""Packs a plan into the input tensors of a step, without padding between requests (varlen).

    row 0            row 1   row 2                padding
    | t0 t1 t2 t3 | t4    | t5 t6 t7          | t8 ...      T tokens
    ^query_starts[0]      ^query_starts[2]    ^query_starts[B]

Padding exists only where the graph needs at least two of something. It writes into the null block,
belongs to no row, and is never sampled.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...compile.step_inputs import INPUT_NAMES, MIN_SIZE, STATE_TABLES, StepInputs
from ...engine.plan import Blocks, StepPlan
from ...engine.request import RequestInfo
from ...kernels.sampling.sampler import OF_REQUEST, SamplingInputs
from ..layout import LAYOUT, Layout, PlanArrays, StepShape, has_few_samples
from ..logprob_rows import LogprobInputs, prompt_fields, sampled_fields


@dataclass(slots=True)
class _Tables:
    """The block tables, or the state tables, of the running requests.

    Attributes:
        tokens_per_entry: positions per entry.
        filler: the null block or slot, for missing entries.
        what: name of the entries, for errors.
    """

    tokens_per_entry: int
    filler: int
    what: str
    _known: dict[str, array[int]] = field(default_factory=dict)

    def take(
        self,
        plan: StepPlan,
        whole: dict[int, Blocks],
        added: dict[int, Blocks],
        ends: Sequence[int],
        num_rows: int,
    ) -> NDArray[np.int32]:
        """The tables of the plan's rows, updated by the plan: ``[num_rows, longest]``.

        Args:
            ends: by row, one after its last position with an entry.

        Raises:
            RuntimeError: the plan releases a request that has no table.
            ValueError: a table does not cover the positions of its row.
        """
        known, names = self._known, [request.request_id for request in plan.requests]
        for name in plan.released:
            if known.pop(name, None) is None:
                raise RuntimeError(f"step {plan.step} releases {name!r}, which has no table")
        for row, new in whole.items():
            known[names[row]] = array("i", new)
        for row, new in added.items():
            known[names[row]].extend(new)
        rows = [known[name] for name in names]
        for name, ids, end in zip(names, rows, ends, strict=True):
            if len(ids) * self.tokens_per_entry < end:
                # Without this check its tokens would be written to the null block, or the null
                # slot.
                lengths = f"{len(ids)} {self.what} for {end} tokens"
                raise ValueError(f"request {name}: {lengths}")
        tables = np.full((num_rows, max([MIN_SIZE, *map(len, rows)])), self.filler, np.int32)
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
        is_long: whether the last layer may compute only the sampled tokens.
        copies: (source, destination) block ids, to be copied before the step is computed.
    """

    inputs: StepInputs
    num_sampled: int
    sampling: SamplingInputs | None
    logprobs: LogprobInputs
    copies: Sequence[tuple[int, int]] = ()
    is_long: bool = False

    def to_arrays(self) -> list[NDArray[Any]]:
        """All of it as arrays, for another process."""
        names = (*INPUT_NAMES, *self.inputs.more)
        arrays = [self.inputs.tensor(name).numpy() for name in names]
        arrays.append(np.array([self.num_sampled, self.is_long, *chain(*self.copies)], np.int64))
        arrays += [self.logprobs.sampled, self.logprobs.prompt]
        if self.sampling is not None:
            arrays += [tensor.numpy() for tensor in self.sampling.tensors()]
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Sequence[NDArray[Any]], layout: Layout = LAYOUT) -> PackedStep:
        """The inverse of :meth:`to_arrays`, of a packer with that layout."""
        tensors = list(map(torch.from_numpy, arrays))
        others = [n for n in layout.input_names("host") if n not in INPUT_NAMES]
        named = dict(zip((*INPUT_NAMES, *others), tensors, strict=False))
        inputs = {name: named.pop(name) for name in INPUT_NAMES}
        num_inputs = len(INPUT_NAMES) + len(others)
        sampling = tensors[num_inputs + 3 :]
        num_sampled, is_long, *blocks = arrays[num_inputs].tolist()
        return cls(
            StepInputs(**inputs, more=named),
            num_sampled,
            SamplingInputs.from_tensors(*sampling) if sampling else None,
            LogprobInputs(*arrays[num_inputs + 1 : num_inputs + 3]),
            list(zip(blocks[::2], blocks[1::2], strict=True)),
            bool(is_long),
        )


class CpuStepPacker:
    """Converts plans to :class:`PackedStep`, and keeps block and state tables as arrays between
    steps.

    Args:
        num_state_slots: 0 for models without recurrent layers, which have no state tables.
        state_interval: tokens per entry of a state table.
        layout: the layout of the steps.
        long_tokens: fewest tokens of a step whose last layer computes only sampled ones.
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
        long_tokens: int = sys.maxsize,
    ) -> None:
        self._layout, self._long_tokens = layout, long_tokens
        self._block_size, self._num_blocks = block_size, num_blocks
        self._num_state_slots, self._state_interval = num_state_slots, state_interval
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Forget all tables and sampled tokens, as after a failed step."""
        self._blocks = _Tables(self._block_size, self._num_blocks, "blocks")
        self._states = _Tables(self._state_interval, self._num_state_slots, "state slots")
        self._sampled = np.empty(0, np.int64)

    def remember(self, token_ids: NDArray[np.int64]) -> None:
        """Record that the plan packed last sampled ``token_ids``, which may be inputs of the next
        one."""
        self._sampled = token_ids

    def pack(self, plan: StepPlan) -> PackedStep:
        """Apply the plan's changes to block and state tables, and pack the step.

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
        ends = (step.starts + step.rows.lengths).tolist()
        tables = self._blocks.take(plan, plan.tables, plan.new_blocks, ends, shape.num_rows)
        slots = np.full(shape.num_tokens, self._num_blocks * self._block_size, np.int64)
        blocks, offsets = np.divmod(positions[:num_tokens], self._block_size)
        rows = step.rows.token_rows
        slots[:num_tokens] = tables[rows, blocks].astype(np.int64) * self._block_size + offsets

        derived = {
            "input_ids": torch.from_numpy(ids),
            "position_ids": torch.from_numpy(positions),
            "slot_mapping": torch.from_numpy(slots),
        }
        tensors = self._layout.inputs(packed, derived, shape)
        tensors["block_tables"] = torch.from_numpy(tables)
        if self._num_state_slots:
            slots_of, new_slots = plan.state_tables, plan.new_state_slots
            if plan.has_drafts:  # their states are not kept
                ends = (step.starts + step.rows.lengths - step.num_drafts).tolist()
            states = self._states.take(plan, slots_of, new_slots, ends, shape.num_rows)
            states[states < 0] = self._num_state_slots
            tensors[STATE_TABLES] = torch.from_numpy(states)
        inputs = StepInputs.of({name: t.to(self._device) for name, t in tensors.items()})
        sampled = step.sampled_requests
        logprobs = LogprobInputs(sampled_fields(sampled), prompt_fields(plan))
        # A sample's position is one after the position that it is sampled from.
        kept = packed["logits_to_keep"].numpy()[:num_sampled]
        sampling = self._sampling(sampled, (positions[kept] + 1).tolist())
        is_long = t >= self._long_tokens and has_few_samples(t, s) and not logprobs.prompt.size
        return PackedStep(inputs, num_sampled, sampling, logprobs, plan.copies, is_long)

    def _sampling(
        self, requests: Sequence[RequestInfo], positions: Sequence[int]
    ) -> SamplingInputs | None:
        """``requests``, ``positions``: per sample, its request and its own position."""
        params = [request.sampling_params for request in requests]
        if all(p.temperature == 0.0 for p in params):
            return None
        return SamplingInputs.from_lists(
            **{name: [getattr(p, name) for p in params] for name in OF_REQUEST},
            seeds=[request.seed for request in requests],
            positions=positions,
            device=self._device,
        )
