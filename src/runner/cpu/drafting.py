"""Draft tokens with a second model, behind the steps of a CPU runner.

The second model (the drafter) has KV caches of its own and uses the target's block tables: position
p of a request is in the same block and offset of both. After each step of the target the drafter
computes the same positions, up to the last accepted sample. So prefix hits, preemption, copies of
blocks and rejected draft tokens need no rules of their own.

    target        t0 t1 t2 d0 d1       samples s2 s3 s4; d0 = s2, d1 is wrong
    draft model   t0 t1 t2 d0 s3       position p has token p; s3 only if tokens are wanted
    mtp, eagle3   t1 t2 s2 s3          position p has token p + 1 and the target's hidden state p

The last position gives the first draft token. Each further one takes a pass over one position per
row, with the previous draft token. Samples use the request's own parameters, seed and positions,
so that both models draw with the same noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...compile.step_inputs import MIN_SIZE, StepInputs
from ...engine.plan import StepPlan
from ...kernels.sampling.sampler import SamplingInputs, sample
from ..draft_model import DraftModel
from .pack import PackedStep


class _Row(NamedTuple):
    """Positions that the drafter computes for one row of a plan.

    Attributes:
        row: its index in the plan, and in the block tables.
        start: its first position.
        token_ids: int64, one per position.
        first: the token of the step whose hidden states belong to the first position.
        last_sample: the index among the step's samples of its last accepted one; -1 if none.
        wanted: number of tokens to draft.
    """

    row: int
    start: int
    token_ids: NDArray[np.int64]
    first: int
    last_sample: int
    wanted: int

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(slots=True, eq=False)
class _Pass:
    """One call of the drafter. ``kept``: per row with logits, its index among the rows, and the
    index of its last token."""

    inputs: StepInputs
    kept: list[tuple[int, int]]


class CpuDrafting:
    """The drafter of a runner, with its KV caches.

    Args:
        num_blocks, block_size: of the runner. Block ``num_blocks`` is the null block.
    """

    def __init__(self, model: DraftModel, *, num_blocks: int, block_size: int) -> None:
        self.kv_caches = model.allocate_kv(num_blocks, block_size)
        self._forward = model.bind(self.kv_caches)
        self._is_shifted = model.needs_hidden
        self._block_size, self._null_slot = block_size, num_blocks * block_size

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (source, destination), before a step."""
        for caches in self.kv_caches if copies else ():
            for cache in caches:
                for source, destination in copies:
                    cache[destination] = cache[source]

    def draft(
        self,
        plan: StepPlan,
        packed: PackedStep,
        token_ids: NDArray[np.int64],
        hidden: Tensor | None,
    ) -> dict[str, list[int]]:
        """Compute the positions of a step, and draft tokens behind its rows.

        Args:
            token_ids: ``[num_sampled]``, the samples of the step.
            hidden: ``[T, H]``, the hidden states of the step, for a drafter that reads them.

        Returns:
            Draft tokens by request id, as many as the plan wants.
        """
        tables = packed.inputs.block_tables.numpy()
        rows = self._rows(plan, packed.inputs.input_ids[0].numpy(), token_ids)
        if not rows:
            return {}
        first_states = None
        if self._is_shifted:
            assert hidden is not None, "the target has no hidden states"
            places = [np.arange(r.first, r.first + len(r.token_ids)) for r in rows]
            first_states = hidden[torch.from_numpy(np.concatenate(places))]
        step = self._packed(rows, tables)
        states = self._call(step, first_states)
        found: dict[str, list[int]] = {
            plan.requests[r.row].request_id: [] for r in rows if r.wanted
        }
        for num_found in range(max(r.wanted for r in rows)):
            logits, last_states = states
            drawn = [rows[i] for i, _ in step.kept]
            tokens = sample(logits, _sampling(packed.sampling, drawn, num_found)).tolist()
            for r, token in zip(drawn, tokens, strict=True):
                found[plan.requests[r.row].request_id].append(token)
            going = [i for i, r in enumerate(drawn) if r.wanted > num_found + 1]
            if not going:
                break
            if last_states is not None:
                last_states = last_states[torch.tensor([step.kept[i][1] for i in going])]
            rows = [
                drawn[i]._replace(start=drawn[i].end, token_ids=np.array([tokens[i]], np.int64))
                for i in going
            ]
            step = self._packed(rows, tables)
            states = self._call(step, last_states)
        return found

    def _rows(
        self, plan: StepPlan, ids: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> list[_Row]:
        """What the drafter computes first: the step's positions without rejected draft tokens."""
        found: list[_Row] = []
        begin = num_samples = 0
        accepted = plan.accepted(token_ids.tolist())
        for row, samples in enumerate(accepted):
            num_tokens, wanted = plan.num_tokens[row], plan.wanted_drafts.get(row, 0)
            num_kept = num_tokens - max(0, plan.num_samples[row] - max(1, len(samples)))
            own = ids[begin : begin + num_kept]
            next_id = samples[-1] if samples else plan.next_token_ids.get(row, 0)
            if self._is_shifted:
                own = np.append(own[1:], next_id)
            elif wanted:
                own = np.append(own, next_id)
            last_sample = num_samples + len(samples) - 1 if samples else -1
            found.append(_Row(row, plan.starts[row], own, begin, last_sample, wanted))
            begin += num_tokens
            num_samples += plan.num_samples[row]
        return found

    def _packed(self, rows: Sequence[_Row], tables: NDArray[np.int32]) -> _Pass:
        """The inputs of a call over these rows, with logits of the last position of each row that
        wants tokens. Padding is written to the null block and belongs to no row."""
        lengths = [len(r.token_ids) for r in rows]
        num_tokens, num_rows = sum(lengths), len(rows)
        ends = np.cumsum(lengths)
        kept = [(i, int(ends[i]) - 1) for i, r in enumerate(rows) if r.wanted]
        t, b, s = (max(n, MIN_SIZE) for n in (num_tokens, num_rows, len(kept)))
        size = self._block_size
        ids, positions = np.zeros(t, np.int64), np.zeros(t, np.int64)
        slots = np.full(t, self._null_slot, np.int64)
        ids[:num_tokens] = np.concatenate([r.token_ids for r in rows])
        positions[:num_tokens] = np.concatenate([np.arange(r.start, r.end) for r in rows])
        table_rows = np.zeros(b, np.int32)
        table_rows[:num_rows] = [r.row for r in rows]
        blocks, offsets = np.divmod(positions[:num_tokens], size)
        of_token = np.repeat(table_rows[:num_rows], lengths)
        slots[:num_tokens] = tables[of_token, blocks].astype(np.int64) * size + offsets
        starts = np.full(b + 1, num_tokens, np.int32)
        starts[0], starts[1 : num_rows + 1] = 0, ends
        context_lens = np.zeros(b, np.int32)
        context_lens[:num_rows] = [r.end for r in rows]
        logits_to_keep = np.full(s, kept[-1][1] if kept else 0, np.int64)
        logits_to_keep[: len(kept)] = [place for _, place in kept]
        tensors = {
            "input_ids": ids,
            "position_ids": positions,
            "logits_to_keep": logits_to_keep,
            "slot_mapping": slots,
            "query_starts": starts,
            "context_lens": context_lens,
            "block_tables": tables,
            "table_rows": table_rows,
        }
        inputs = StepInputs.of({name: torch.from_numpy(array) for name, array in tensors.items()})
        return _Pass(inputs, kept)

    def _call(self, step: _Pass, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits of the rows that want tokens, and hidden states of all positions."""
        num_tokens = step.inputs.input_ids.shape[1]
        if hidden is not None and len(hidden) < num_tokens:
            padding = hidden.new_zeros(num_tokens - len(hidden), hidden.shape[1])
            hidden = torch.cat([hidden, padding])
        logits, states = self._forward(step.inputs, hidden)
        return logits[: len(step.kept)], states


def _sampling(
    sampling: SamplingInputs | None, rows: Sequence[_Row], num_found: int
) -> SamplingInputs | None:
    """The parameters of the rows' next tokens: those of their last accepted samples, at the
    positions behind them."""
    if sampling is None:
        return None
    places = torch.tensor([r.last_sample for r in rows])
    *others, positions = (tensor[places] for tensor in sampling.tensors())
    return SamplingInputs.from_tensors(*others, positions + 1 + num_found)
