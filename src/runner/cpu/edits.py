"""Edited rows on a CPU: their histories and tokens, one sample at a time.

A row with draft tokens has several samples, and the history of each ends with the draft tokens
before it. Its samples are edited in order, up to the first wrong draft token: later ones are
discarded in any case. So ``logits_processors`` are called with the request's own tokens only, as in
a row per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...engine.plan import StepPlan
from ...engine.request import RequestInfo
from ...kernels.sampling.edit_logits import Penalties, edited
from ...kernels.sampling.sampler import SamplingInputs, sample
from ...structured.matchers import Masks
from ..edit_batch import EditBatch, EditPacker, has_processors, num_drafts_before, process


class CpuEdits:
    """Samples the rows of a step whose logits are edited.

    Args:
        keeps_rows: for :meth:`replaced`.
    """

    def __init__(self, keeps_rows: bool = False) -> None:
        self._packer = EditPacker()
        self._rows: dict[int, Tensor] | None = {} if keeps_rows else None
        self.reset()

    def reset(self) -> None:
        """A step failed: clear the histories of all requests."""
        self.histories: dict[str, list[int]] = {}

    def apply(
        self,
        plan: StepPlan,
        input_ids: Tensor,
        sampling: SamplingInputs | None,
        logits: Tensor,
        tokens: Tensor,
        masks: Masks | None = None,
    ) -> tuple[dict[str, str], dict[str, int]]:
        """Replace the tokens of edited rows among the tokens of the step.

        Args:
            input_ids: int64 ``[1, >= tokens of the plan]``, without references to sampled tokens.
            sampling: parameters of the sampled rows.
            logits: ``[S, V]``, not modified. tokens: int64 ``[S]``.
            masks: see :meth:`.edit_batch.EditPacker.pack`.

        Returns:
            Reasons why requests fail, and the samples that failed: see :class:`.StepResult`.
        """
        packer = self._packer
        failures: dict[str, str] = {}
        failed_samples: dict[str, int] = {}
        if self._rows:
            self._rows.clear()
        self.take(plan, input_ids)
        if not (packer.any_edited or masks):
            return failures, failed_samples
        batch = packer.pack(plan, logits.shape[1], range(len(plan)), masks)
        if batch is not None:
            failures.update(packer.failures)
            drafts = plan.drafts() if plan.has_drafts else {}
            for i, request in enumerate(batch.requests):
                row, place = int(batch.fields[1, i]), int(batch.fields[0, i])
                num_drafts = 0
                if row in drafts:
                    num_drafts = num_drafts_before(plan, row, int(batch.fields[3, i]))
                    before = tokens[place - num_drafts : place].tolist()
                    has_failed = request.request_id in failures
                    if has_failed or before != list(drafts[row][:num_drafts]):
                        continue  # a discarded sample
                try:
                    self._sample(batch, i, sampling, logits, tokens, failures)
                except Exception as error:  # ends this request only
                    failures[request.request_id] = f"its logits cannot be edited: {error}"
                if num_drafts and request.request_id in failures:
                    failed_samples[request.request_id] = num_drafts
        return failures, failed_samples

    def replaced(self, logits: Tensor) -> Tensor:
        """The logits ``[S, V]`` of the last step, with the edited logits in edited rows."""
        if not self._rows:
            return logits
        places = torch.tensor(list(self._rows))
        return logits.float().index_copy(0, places, torch.stack(list(self._rows.values())))

    def take(self, plan: StepPlan, input_ids: Tensor) -> None:
        """Find the rows of a plan that may be edited, and keep their histories: ``histories``, the
        known tokens of each request and the draft tokens of its last row, by request id."""
        self._packer.look(plan)
        histories = self.histories
        if not (self._packer.any_history or histories):
            return
        for request_id in plan.released:
            histories.pop(request_id, None)
        for row, token_ids in plan.prefixes.items():
            if _needs_history(plan.requests[row]):
                histories[plan.requests[row].request_id] = list(token_ids)
        begin = 0
        for request, start, num_tokens in zip(
            plan.requests, plan.starts, plan.num_tokens, strict=True
        ):
            if _needs_history(request):
                own = input_ids[0, begin : begin + num_tokens].tolist()
                # Rejected draft tokens of an earlier row are stored from the row's start on.
                histories[request.request_id][start:] = own
            begin += num_tokens

    def _sample(
        self,
        batch: EditBatch,
        i: int,
        sampling: SamplingInputs | None,
        logits: Tensor,
        tokens: Tensor,
        failures: dict[str, str],
    ) -> None:
        request, place = batch.requests[i], int(batch.fields[0, i])
        history = self.histories.get(request.request_id, [])[: int(batch.fields[3, i])]
        row = edited_row(batch, i, logits[place], history)
        if has_processors(request):
            row = process(request, row, history[int(batch.fields[2, i]) :], failures)
        if self._rows is not None:
            self._rows[place] = row
        own = None
        if sampling is not None:
            own = SamplingInputs.from_tensors(*(t[place : place + 1] for t in sampling.tensors()))
        tokens[place : place + 1] = sample(row.unsqueeze(0), own)


def _needs_history(request: RequestInfo) -> bool:
    return request.edits is not None and request.edits.needs_history


def edited_row(batch: EditBatch, i: int, logits: Tensor, history: Sequence[int]) -> Tensor:
    """Row ``i`` of a batch, float32 ``[V]``, from its logits, before ``logits_processors``."""
    fields = batch.fields[:, i]
    num_prompt_tokens = int(fields[2])
    repetition, presence, frequency = fields[4:7].copy().view(np.float32).tolist()
    bias, mask = batch.bias_of(i), batch.mask_of(i)
    return edited(
        logits,
        torch.tensor(history, dtype=torch.int64),
        num_prompt_tokens,
        penalties=Penalties(repetition, presence, frequency),
        bias_ids=torch.from_numpy(bias[0].astype(np.int64)),
        bias=torch.from_numpy(bias[1].copy().view(np.float32)),
        bad_words=batch.words_of(i),
        mask=None if mask is None else torch.from_numpy(mask),
    )
