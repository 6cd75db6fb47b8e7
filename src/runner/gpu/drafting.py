"""The drafter of a GPU runner: draft tokens with a second model, queued behind each step.

It computes what :mod:`..cpu.drafting` computes, without waiting for the device. After the target's
samples, one call computes the positions of the step, so that the drafter's KV is complete, whether
or not the plan wants draft tokens. Rejected draft tokens are computed as well: their positions are
written again before anything reads them. Then each call adds a draft token to every row that wants
one more. Kernels count the accepted draft tokens (:mod:`.draft_kernels`); the host gets their
number with the results.

Draft tokens are sampled with the request's temperature, seed and positions, and without its top_k,
top_p and min_p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...compile.step_fields import GPU, LAST, Field
from ...compile.step_inputs import MIN_SIZE, StepOutputs
from ...engine.plan import StepPlan
from ...kernels.sampling.gumbel import sample_simple
from ..draft_model import GpuDraftModel
from ..layout import PlanArrays, StepShape
from ..pinned import IntArray
from .cuda_graphs import capture_calls
from .device_buffers import StepBuffers
from .draft_kernels import DraftBuffers, accept, keep, place

MOST_CALLS_PER_SHAPE: Final = 3
"""Most calls, and graphs, of the drafter behind steps of one shape."""


def _num_wanted(step: PlanArrays) -> IntArray | int:
    return _by_row(step, step.plan.wanted_drafts)


def _next_token_ids(step: PlanArrays) -> IntArray | int:
    return _by_row(step, step.plan.next_token_ids)


def _by_row(step: PlanArrays, values: Mapping[int, int]) -> IntArray | int:
    if not values:
        return 0
    found = np.zeros(step.counts["row"], np.int32)
    found[list(values)] = list(values.values())
    return found


DRAFT_FIELDS: Final = (
    Field("num_wanted", "row", _num_wanted, forms=GPU),
    Field("next_token_ids", "row", _next_token_ids, forms=("mixed",)),
    Field(
        "sample_bounds",
        "bound",
        lambda step: step.rows.sample_bounds,
        padding=LAST,
        forms=("mixed",),
    ),
)
"""Fields of a step that only drafting reads."""


class DraftCall(NamedTuple):
    """A call of the drafter.

    Attributes:
        shape: of the step, or the decode step of as many rows.
        kind: "fill" computes the positions of the step; "first" also samples a draft token behind
            each row; "next" computes one more position of each row, and samples behind it.
    """

    shape: StepShape
    kind: Literal["fill", "first", "next"]


class QueuedDrafts(NamedTuple):
    """Draft tokens of a queued step.

    Attributes:
        tokens: int64 ``[rows, MAX_DRAFT_TOKENS]``, in pinned memory.
        wanted: (row, request id, number of tokens) of each row that wants some.
    """

    tokens: Tensor
    wanted: tuple[tuple[int, str, int], ...]

    def read(self) -> dict[str, list[int]]:
        """Draft tokens by request id, of a step that was computed."""
        return {
            request_id: self.tokens[row, :num_wanted].tolist()
            for row, request_id, num_wanted in self.wanted
        }


class GpuDrafting:
    """A drafter with its KV caches, which have the blocks of the target's.

    Args:
        model: the drafter. buffers: of the runner's steps.
        num_blocks, block_size: of the runner. Block ``num_blocks`` is the null block.
        num_results: number of steps whose results are kept.
    """

    def __init__(
        self,
        model: GpuDraftModel,
        buffers: StepBuffers,
        *,
        num_blocks: int,
        block_size: int,
        num_results: int,
    ) -> None:
        self.kv_caches = model.allocate_kv(num_blocks, block_size)
        self._forward = model.bind(self.kv_caches)
        self._fill = model.bind_fill(self.kv_caches)
        self._is_shifted = model.needs_hidden
        self._block_size, self._null_slot = block_size, num_blocks * block_size
        self._step, self._own = buffers, DraftBuffers.of(buffers)
        self._results = torch.zeros(
            num_results,
            *self._own.tokens.shape,
            dtype=torch.int64,
            pin_memory=torch.cuda.is_available(),
        )
        # Hidden states of the target ``[T, H]``, and of the drafter ``[R, H]``.
        self._target_states: Tensor | None = None
        self._states: Tensor | None = None
        self._graphs: dict[DraftCall, torch.cuda.CUDAGraph] = {}
        self._buckets: tuple[int, ...] = ()

    # Steps ------------------------------------------------------------------------------------

    def keep_states(self, outputs: StepOutputs) -> None:
        """Keep the hidden states of a step of the target until :meth:`queue`; can be captured. Both
        models' graphs share their memory."""
        if self._is_shifted:
            states = outputs.for_drafter
            assert states is not None, "the target has no hidden states"
            if self._target_states is None:
                self._target_states = _zeros_like(states, self._step.num_tokens)
            self._target_states[: len(states)].copy_(states)

    def queue(self, plan: StepPlan, shape: StepShape, result_row: int) -> QueuedDrafts | None:
        """Queue the drafter's part of a step, whose samples are queued.

        Args:
            shape: as the step was packed. result_row: the place of its results.
        """
        wanted, is_shifted = plan.wanted_drafts, self._is_shifted
        self._call(DraftCall(shape, "first" if wanted and is_shifted else "fill"))
        if not wanted:
            return None
        num_rows = len(plan)
        call = DraftCall(StepShape.decode(self._bucket(num_rows)), "next")
        for _ in range(max(wanted.values()) - is_shifted):
            self._call(call)
        found = self._results[result_row, :num_rows]
        found.copy_(self._own.tokens[:num_rows], non_blocking=True)
        ids = plan.requests
        return QueuedDrafts(
            found, tuple((row, ids[row].request_id, n) for row, n in wanted.items())
        )

    def _call(self, call: DraftCall) -> None:
        graph = self._graphs.get(call)
        if graph is None:
            self.run(call)
        else:
            graph.replay()

    def _bucket(self, num_rows: int) -> int:
        return next((n for n in self._buckets if n >= num_rows), max(num_rows, MIN_SIZE))

    def run(self, call: DraftCall) -> None:
        """Queue a call. A graph captures this call."""
        if call.kind == "next":
            self._run_next(call.shape.num_rows)
        else:
            self._run_step(call.shape, has_logits=call.kind == "first")

    def _run_step(self, shape: StepShape, *, has_logits: bool) -> None:
        b, own, states = self._step, self._own, None
        accept(own, b, shape, is_shifted=self._is_shifted)
        kept = own.last_tokens[: shape.num_rows]
        inputs = replace(b.inputs(shape), logits_to_keep=kept)
        if self._is_shifted:
            assert self._target_states is not None, "keep_states was called"
            states = self._target_states[: shape.num_tokens]
            inputs = replace(inputs, input_ids=own.next_ids[: shape.num_tokens].unsqueeze(0))
        if not has_logits:
            self._fill(inputs, states)
            return
        logits, states = self._forward(inputs, states)
        assert states is not None, "a drafter that reads hidden states returns some"
        torch.index_select(states, 0, kept, out=self._own_states(states)[: len(kept)])
        self._sample(logits, is_first=True)

    def _run_next(self, num_rows: int) -> None:
        inputs = place(self._own, self._step, num_rows, self._block_size, self._null_slot)
        states = None if self._states is None else self._states[:num_rows]
        logits, found = self._forward(inputs, states)
        if states is not None:
            assert found is not None, "a drafter that reads hidden states returns some"
            states.copy_(found)
        self._sample(logits, is_first=False)

    def _sample(self, logits: Tensor, *, is_first: bool) -> None:
        own = self._own
        draws = own.temperatures, own.seeds, own.sample_positions, own.sampled
        sample_simple(logits, *draws)
        keep(own, len(logits), is_first=is_first)

    def _own_states(self, states: Tensor) -> Tensor:
        """Created by the first call, which is not captured."""
        if self._states is None:
            self._states = _zeros_like(states, self._step.num_rows)
        return self._states

    # Warm-up ----------------------------------------------------------------------------------

    def calls(self, shapes: Sequence[StepShape]) -> list[DraftCall]:
        """The calls behind steps of these shapes."""
        found = [DraftCall(shape, "fill") for shape in shapes]
        if self._is_shifted:
            found += [DraftCall(shape, "first") for shape in shapes]
        return found + [DraftCall(shape, "next") for shape in shapes if shape.is_decode]

    def run_worst_case(self, shape: StepShape) -> None:
        """Run the calls behind a step of this shape, the largest, which is staged."""
        self._own.clear()
        for call in [*self.calls([shape]), DraftCall(StepShape.decode(shape.num_rows), "next")]:
            self.run(call)

    def run_blank(self, shape: StepShape) -> None:
        """Run the calls behind an empty step, some of whose kernels may be missing."""
        for call in self.calls([shape]):
            self._own.clear()
            self.run(call)

    def capture(self, shapes: Sequence[StepShape], pool: object) -> None:
        """Capture the calls behind steps of these shapes, in the memory of the target's graphs."""
        # Largest first; "next" reads hidden states that "first" allocates.
        calls = sorted(
            self.calls(shapes), key=lambda call: (call.shape, call.kind == "first"), reverse=True
        )
        self._graphs = capture_calls({call: partial(self.run, call) for call in calls}, pool)
        self._buckets = tuple(sorted(shape.num_rows for shape in shapes if shape.is_decode))

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def close(self) -> None:
        self._graphs = {}


def _zeros_like(states: Tensor, num_rows: int) -> Tensor:
    return states.new_zeros(num_rows, states.shape[1])
