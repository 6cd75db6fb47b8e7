"""Samples the steps of a GPU runner: in the graph, and after it.

The graph's last kernel samples greedy rows and rows with only a temperature. After the graph
follow, in steps that have them: rows that use top-k, top-p or min-p, edited rows, constrained rows,
and log-probabilities. Only constrained rows wait, for bitmasks that the host computes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...compile.captured_model import CapturedModel
from ...compile.step_inputs import StepOutputs
from ...engine.plan import StepPlan, StepResult
from ...kernels.sampling.draw_functions import Results
from ...kernels.sampling.gumbel import sample_simple
from ...kernels.sampling.logprob_rows import LOGPROB_FIELDS
from ...kernels.sampling.top_k_top_p import TRUNCATED_FIELDS, sample_truncated
from ...structured.grammars import Grammars
from ...structured.matchers import ConstrainedRows, Masks
from ..bases import OnLogits
from ..constrained import LateMatchers
from ..layout import StepShape
from ..pinned import PinnedRing
from .device_buffers import StepBuffers
from .drafting import GpuDrafting, QueuedDrafts
from .edits import GpuEdits
from .logprobs import GpuLogprobs, WideRows, max_logprob_rows, read_logprobs
from .pack import StagedStep

_POLL_S = 20e-6


@dataclass(slots=True, eq=False)
class GpuStepHandle:
    """A step queued on the device. Once ``event`` has passed, ``token_ids`` and ``logprobs`` are
    filled, and the results of ``wide``. The first ``num_logprobs`` log-probabilities belong to
    sampled rows.

    Attributes:
        constrained: rows that are sampled once their bitmasks are computed. Until then there is no
            ``event`` and no ``logprobs``.
        failures, failed_samples: see :class:`.StepResult`.
        drafts: draft tokens that the plan wants.
    """

    token_ids: Tensor
    constrained: ConstrainedRows | None = None
    event: torch.cuda.Event | None = None
    logprobs: Tensor | None = None
    num_logprobs: int = 0
    wide: WideRows | None = None
    failures: dict[str, str] = field(default_factory=dict)
    failed_samples: dict[str, int] = field(default_factory=dict)
    drafts: QueuedDrafts | None = None

    def is_computed(self, wait_s: float) -> bool:
        """Whether the step has been computed, after at most ``wait_s`` seconds."""
        end = time.perf_counter() + wait_s
        while self.event is None or not self.event.query():
            if time.perf_counter() > end:
                return False
            time.sleep(_POLL_S)
        return True


class GpuStep(NamedTuple):
    """A step whose graph is queued, with whole logits where these are needed.

    Attributes:
        plan: None on ranks without a plan; they have nothing to edit.
        truncated: fields of the rows that use top_k, top_p or min_p, as staged.
        store_rows: see :attr:`.pack.GpuStepPacker.store_rows`.
        wide: rows with more than ``MAX_TOP`` most likely tokens.
        handle: created by :meth:`GpuStepSampler.sample_behind`.
    """

    plan: StepPlan | None
    staged: StagedStep
    outputs: StepOutputs
    truncated: Tensor
    store_rows: list[int]
    wide: WideRows | None = None
    handle: GpuStepHandle | None = None


class GpuStepSampler:
    """Samples steps, and stores tokens and log-probabilities in host memory.

    Args:
        captured: the model.
        buffers: of the runner's steps.
        num_results: number of steps whose results are kept: at least one more than can be in
            flight.
        max_model_len: most tokens per request, or slightly more.
        processed_logprobs, on_logits: see :class:`.LocalRunner`.
        drafting: drafts behind each step; None: no plan wants draft tokens.

    Attributes:
        edits: for edited rows. matchers: for constrained rows.
    """

    def __init__(
        self,
        captured: CapturedModel,
        buffers: StepBuffers,
        grammars: Grammars,
        *,
        num_results: int,
        max_model_len: int,
        processed_logprobs: bool = False,
        on_logits: OnLogits | None = None,
        drafting: GpuDrafting | None = None,
    ) -> None:
        num_tokens, num_rows = buffers.num_tokens, buffers.num_rows
        self._captured, self._buffers, self._on_logits = captured, buffers, on_logits
        self._drafting = drafting
        self._ring = PinnedRing(num_results, num_rows, torch.int64)
        self._results = Results(self._ring.tensor, buffers.result_row)
        self._logprobs = GpuLogprobs(
            captured,
            num_results,
            max_logprob_rows(num_tokens, num_rows),
            buffers.temperatures if processed_logprobs else None,
        )
        self._blank_hidden: Tensor | None = None
        self.edits = GpuEdits(
            buffers, self._results, max_model_len, self._logprobs if processed_logprobs else None
        )
        self.matchers = LateMatchers(grammars, self.edits.masks.make_space)

    # A step, in this order --------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> tuple[int, bool]:
        """The place of a plan's tokens in the ring, and whether rows of the plan may be edited."""
        self._logprobs.begin()
        is_edited = self.edits.look(plan)
        return self._ring.take()[0], is_edited

    def wait_for(self, result_row: int) -> None:
        """Wait until no queued step stores there, on ranks that have no plans."""
        self._ring.wait_for(result_row)

    def sample(self, logits: Tensor) -> None:
        """Sample all rows, greedily or with their temperature. Graphs capture this call."""
        sample_simple(logits, *self._buffers.draws, self._results, self._captured.vocab_shard)

    def sample_behind(self, step: GpuStep) -> GpuStepHandle:
        """Queue the work after the graph. :meth:`finish` samples constrained rows later."""
        plan, staged, (logits, hidden, _), truncated, store_rows, *_ = step
        has_logprobs = bool(staged.num_logprobs or staged.num_prompt_logprobs)
        is_whole = has_logprobs or staged.is_edited or self._on_logits is not None
        if len(truncated) or is_whole:
            logits = self._captured.whole_logits(logits)
        if len(truncated):
            self._sample_truncated(logits, truncated)
        if plan is not None:
            self.edits.keep_history(plan, staged.shape, store_rows)
        constrained = None if plan is None else self.matchers.take(plan)
        handle = GpuStepHandle(
            self._ring.tensor[staged.result_row, : staged.num_sampled], constrained
        )
        step = step._replace(outputs=StepOutputs(logits, hidden), handle=handle)
        if self._on_logits is not None and plan is not None:
            self._on_logits(plan, logits[: staged.num_sampled])
        self.matchers.begin(step, self.finish)
        return handle

    def results(self, handle: GpuStepHandle) -> StepResult:
        """The results of a computed step."""
        found = handle.logprobs
        logprobs = None if found is None else read_logprobs(found, handle.num_logprobs, handle.wide)
        result = self.matchers.result(handle, logprobs)
        return result if handle.drafts is None else replace(result, drafts=handle.drafts.read())

    # Its parts --------------------------------------------------------------------------------

    def _sample_truncated(self, logits: Tensor, truncated: Tensor) -> None:
        """Sample rows that use top_k, top_p or min_p again; ``truncated`` as staged."""
        sample_truncated(logits, truncated, *self._buffers.draws, self._results)

    def finish(self, step: GpuStep, masks: Masks | None = None) -> None:
        """Queue the rest of a step after its graph. Its inputs stay unchanged until the next step
        is sent."""
        plan, staged, (logits, hidden, _), truncated, store_rows, wide, handle = step
        assert handle is not None, "it was begun"
        if plan is not None and (staged.is_edited or masks):
            sampled = logits[: staged.num_sampled]
            found = self.edits.sample(plan, sampled, store_rows, masks)
            handle.failures, handle.failed_samples = found
        if staged.is_edited:
            self._take_rank_0_tokens(len(logits))
        if staged.num_logprobs or staged.num_prompt_logprobs:
            b = self._buffers
            fields = staged.logprob_fields(b.staged)
            handle.logprobs = self._logprobs.queue(
                staged.result_row,
                *(logits, b.sampled, truncated, *fields, hidden),
                wide,
            )
            handle.wide = wide
            handle.num_logprobs = staged.num_logprobs // LOGPROB_FIELDS
        if self._drafting is not None and plan is not None:
            handle.drafts = self._drafting.queue(plan, staged.shape, staged.result_row)
        handle.event = self._ring.release(staged.result_row)

    def _take_rank_0_tokens(self, num_rows: int) -> None:
        """With several ranks, take the tokens of rows that rank 0 has edited; only rank 0 has the
        plan."""
        communicator, sampled = self._captured.communicator, self._buffers.sampled[:num_rows]
        if communicator.num_ranks > 1:
            own = sampled.to(torch.int32).unsqueeze(1)
            tokens = communicator.all_gather(own, [1] * communicator.num_ranks)[:, 0]
            # If a rank was lost they may have any value, and the next step embeds them.
            sampled.copy_(tokens.clamp(0, self._captured.loaded.vocab_size - 1))

    # Warm-up ----------------------------------------------------------------------------------

    def run_worst_case(self, outputs: StepOutputs, shape: StepShape) -> None:
        """Launch every sampling kernel on an empty step, so that no step waits for the compiler."""
        logits, hidden, _ = outputs
        b = self._buffers
        self.sample(logits)
        logits = self._captured.whole_logits(logits)
        truncated = b.staged[:TRUNCATED_FIELDS].zero_()
        self._sample_truncated(logits, truncated)
        fields = b.staged[: LOGPROB_FIELDS * len(logits)].zero_()
        self._logprobs.queue(0, logits, b.sampled, truncated, fields, b.staged[:0], None)
        self._blank_hidden = None if hidden is None else torch.zeros_like(hidden[:1])
        self.run_prompt_chunk()
        self.edits.run_worst_case(shape, logits)
        self._take_rank_0_tokens(shape.num_rows)

    def run_prompt_chunk(self) -> None:
        """Compute log-probabilities of a chunk of prompt positions, after a worst case."""
        if self._blank_hidden is not None:
            self._logprobs.run_chunk(self._blank_hidden, self._buffers.sampled)
