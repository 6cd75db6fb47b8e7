"""Rows of a step that eager kernels sample again on a GPU, after the graph.

A row with a mask and no edits is sampled from the step's own logits: the kernels also read its
mask. While a batch does not change, only masks are sent. Other edited rows are copied in chunks,
edited, and sampled from the copies. Both take parameters from the step, and replace its tokens.

The tokens so far of each row that needs them are on the device, with one row per row of the block
table store. The ids that a step computes are copied there from its own inputs, so that tokens in
flight are included. Only tokens that another request computed (a prefix hit) are sent. Nothing here
waits for the device except Python functions, which read the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.plan import LastTwoBatches, StepPlan
from ...engine.sampling_params import SamplingParams
from ...kernels.sampling.draw_functions import Results, Rows
from ...kernels.sampling.edit_kernels import (
    EDIT_FIELDS,
    ChunkSizes,
    StagedEdits,
    edit_rows,
    keep_history,
)
from ...kernels.sampling.gumbel import sample_simple
from ...kernels.sampling.top_k_top_p import TRUNCATED_FIELDS, sample_truncated
from ...structured.matchers import Masks
from ..edit_batch import EditBatch, EditPacker, has_processors, process
from ..layout import StepShape
from ..pinned import IntArray, MaskMemory, parts_to_device, to_device
from ..row_params import truncated_fields
from .device_buffers import StepBuffers
from .logprobs import GpuLogprobs

CHUNK = 32
"""Rows edited at a time: 8 bytes per token of the vocabulary each, for logits and counts."""


def _truncated(places: IntArray, numbers: IntArray, params: Sequence[SamplingParams]) -> IntArray:
    """int32 ``[TRUNCATED_FIELDS + 1, n]`` for the rows that use top_k, top_p or min_p: their
    fields, then the indices of their masks or copies."""
    fields = truncated_fields(params)
    at = fields[0].copy()
    fields[0] = places[at]
    return np.concatenate([fields, numbers[at][None]])


class _MaskedRows(NamedTuple):
    """The constrained rows of a batch: ``numbers`` and ``rows`` of all of them, see
    :class:`.structured.matchers.Masks`; those that also have ``edits``; and of the others, on the
    device, places and numbers of the ``simple`` ones, ``[2, n]``, and the ``truncated`` ones in the
    form of :func:`_truncated`."""

    numbers: dict[int, int]
    rows: list[int]
    edits: tuple[dict[int, int], list[int]]
    simple: Tensor
    truncated: Tensor


class GpuEdits:
    """Histories, work space and launches for rows with edits or masks.

    Args:
        buffers: of the runner's steps. results: of the runner.
        max_model_len: most tokens per request, or slightly more.
        logprobs: if given, receives the distributions that rows are sampled from. Then rows with
            masks are copied, too.

    Attributes:
        masks: of constrained rows.
    """

    def __init__(
        self,
        buffers: StepBuffers,
        results: Results,
        max_model_len: int,
        logprobs: GpuLogprobs | None = None,
    ) -> None:
        self._buffers, self._results, self._logprobs = buffers, results, logprobs
        self._device = buffers.staged.device
        self._packer = EditPacker()
        self._masked_rows = LastTwoBatches[_MaskedRows]()
        self.masks = MaskMemory(self._device)
        self._no_masks = torch.zeros(1, 1, dtype=torch.int32, device=self._device)
        self._sources = torch.arange(CHUNK, dtype=torch.int32, device=self._device)
        size = len(buffers.table_store), max_model_len
        self.history = torch.zeros(size, dtype=torch.int32, device=self._device)

    def look(self, plan: StepPlan) -> bool:
        """Whether rows of a plan may be edited. Called before any other method for the plan."""
        self._packer.look(plan)
        return self._packer.any_edited

    def keep_history(self, plan: StepPlan, shape: StepShape, history_rows: Sequence[int]) -> None:
        """Append the tokens of the current step to the histories, after its inputs are unpacked."""
        if not self._packer.any_history:
            return
        b = self._buffers
        rows = [row for row, ids in plan.prefixes.items() if ids]
        if rows:
            ids = np.concatenate([np.array(plan.prefixes[row], np.int32) for row in rows])
            sent, at = to_device(ids, b.staged.device), 0
            for row in rows:
                length = len(plan.prefixes[row])
                self.history[history_rows[row], :length].copy_(sent[at : at + length])
                at += length
        self._keep_inputs(shape, plan.total_num_tokens)

    def _keep_inputs(self, shape: StepShape, num_tokens: int) -> None:
        b = self._buffers
        packed = b.packed(shape)
        keep_history(
            b.derived["input_ids"],
            packed["table_rows" if shape.is_decode else "token_rows"][:num_tokens],
            packed["positions"],
            self.history,
        )

    def sample(
        self,
        plan: StepPlan,
        logits: Tensor,
        history_rows: Sequence[int],
        masks: Masks | None = None,
    ) -> tuple[dict[str, str], dict[str, int]]:
        """Sample the edited rows of a step from its logits ``[S, V]``, which are not modified.

        Args:
            masks: see :meth:`.edit_batch.EditPacker.pack`.

        Returns:
            Reasons why requests fail, and the samples that failed: see :class:`.StepResult`.
        """
        batch = masked = None
        failures: dict[str, str] = {}
        failed_samples: dict[str, int] = {}
        edited = masks
        if masks is not None and self._logprobs is None:
            masked = self._masked_rows_of(plan, masks)
            numbers, rows = masked.edits
            edited = masks._replace(numbers=numbers, rows=rows) if numbers else None
        if self._packer.any_edited or edited is not None:
            batch = self._packer.pack(plan, logits.shape[1], history_rows, edited)
        if masks is not None:
            self.masks.send(masks.numbers.values())
        if masked is not None:
            self._draw_masked(logits, masked.simple, masked.truncated, self.masks.on_device)
        if batch is not None:
            failures.update(self._packer.failures)
            ahead = _DraftsBefore(plan) if plan.has_drafts and _any_processors(batch) else None
            chunks = _chunks(batch, 1 if ahead else CHUNK)
            self._sample_copies(batch, chunks, logits, failures, ahead)
            failed_samples = {} if ahead is None else ahead.failed_samples
        return failures, failed_samples

    def _masked_rows_of(self, plan: StepPlan, masks: Masks) -> _MaskedRows:
        known = self._masked_rows.get(plan.requests)
        if known is not None and known[:2] == (masks.numbers, masks.rows):
            return known
        edited: dict[int, int] = {}
        edited_rows, own = [], []
        for (place, number), row in zip(masks.numbers.items(), masks.rows, strict=True):
            request = plan.requests[row]
            if request.edits is None:
                own.append((place, number, request.sampling_params))
            else:
                edited[place] = number
                edited_rows.append(row)
        places, numbers, params = zip(*own, strict=True) if own else ((), (), ())
        fields = np.array([places, numbers], np.int32)
        cut = _truncated(fields[0], fields[1], params)
        is_simple = ~np.isin(fields[0], cut[0])
        simple, truncated = parts_to_device([fields[:, is_simple], cut], self._device)
        rows = _MaskedRows(masks.numbers, masks.rows, (edited, edited_rows), simple, truncated)
        return self._masked_rows.put(plan.requests, rows)

    def _draw_masked(
        self, logits: Tensor, simple: Tensor, truncated: Tensor, masks: Tensor
    ) -> None:
        """Sample rows from the masked logits of the step. Arguments: see :class:`_MaskedRows`."""
        if simple.numel():
            self._draw(logits, Rows(simple[0], None, simple[1], masks))
        if truncated.numel():
            rows = Rows(truncated[0], None, truncated[TRUNCATED_FIELDS], masks)
            self._draw(logits, rows, truncated)

    def _draw(self, logits: Tensor, rows: Rows, truncated: Tensor | None = None) -> None:
        own = (*self._buffers.draws, self._results)
        if truncated is None:
            sample_simple(logits, *own, rows=rows)
        else:
            sample_truncated(logits, truncated[:TRUNCATED_FIELDS].view(-1), *own, rows)

    def _sample_copies(
        self,
        batch: EditBatch,
        chunks: Sequence[_Chunk],
        logits: Tensor,
        failures: dict[str, str],
        ahead: _DraftsBefore | None = None,
    ) -> None:
        arrays = [batch.fields, batch.bias, batch.words, batch.word_ids, batch.masks]
        arrays += (chunk.truncated for chunk in chunks)
        parts = parts_to_device(arrays, self._device)
        constrained = self.masks.on_device if len(batch.constrained) else self._no_masks
        edits = StagedEdits._make([*parts[:5], constrained])
        b = self._buffers
        size = min(CHUNK, b.num_rows), logits.shape[1]
        space = torch.empty(size, dtype=torch.float32, device=self._device)
        counts = torch.empty(size, dtype=torch.int32, device=self._device)
        for (first, end, sizes, _, has_simple), truncated in zip(chunks, parts[5:], strict=True):
            rows, places = space[: end - first], edits.fields[0, first:end]
            edit_rows(logits, edits, self.history, counts, rows, first, sizes)
            self._process(batch, first, rows, failures, ahead)
            if has_simple:  # then all of them: the others are sampled again
                self._draw(rows, Rows(places, self._sources[: end - first]))
            if truncated.numel():
                sources = truncated[TRUNCATED_FIELDS]
                self._draw(rows, Rows(truncated[0], sources), truncated)
            if self._logprobs is not None:
                cuts = truncated[:TRUNCATED_FIELDS].view(-1)
                self._logprobs.add_edited(rows, places, cuts, b.sampled)

    def _process(
        self,
        batch: EditBatch,
        first: int,
        rows: Tensor,
        failures: dict[str, str],
        ahead: _DraftsBefore | None,
    ) -> None:
        """Run the Python functions of rows ``first ..`` of a batch, one by one, on the host.

        Args:
            ahead: of a step with draft tokens. Samples that are discarded in any case are left out,
                so functions are called with the request's own tokens only.
        """
        for i, request in enumerate(batch.requests[first : first + len(rows)]):
            if not has_processors(request):
                continue
            place, history_row, num_prompt, num_tokens = batch.fields[:4, first + i].tolist()
            drafts = () if ahead is None else ahead.of(place)
            if drafts:
                before = self._buffers.sampled[place - len(drafts) : place].tolist()
                if request.request_id in failures or before != list(drafts):
                    continue
            output = self.history[history_row, num_prompt:num_tokens].tolist()
            row = rows[i]
            row.copy_(process(request, row.cpu(), output, failures))
            if ahead is not None and drafts and request.request_id in failures:
                ahead.failed_samples[request.request_id] = len(drafts)

    def run_worst_case(self, shape: StepShape, logits: Tensor) -> None:
        """Launch every kernel, over the largest number of rows."""
        self._keep_inputs(shape, shape.num_tokens)
        num_rows, num_words = min(self._buffers.num_rows, CHUNK), -(-logits.shape[1] // 32)
        fields = np.zeros((EDIT_FIELDS, num_rows), np.int32)
        fields[4] = np.float32(2).view(np.int32)  # a repetition penalty
        fields[9] = fields[11] = 1  # a bias, and a bad word
        bias, masks = np.zeros((2, 1), np.int32), np.zeros((1, num_words), np.int32)
        words, word_ids = np.array([0, 2], np.int32), np.zeros(2, np.int32)
        batch = EditBatch((), fields, bias, words, word_ids, masks)
        sizes = ChunkSizes(self.history.shape[1], 1, 1, 2)
        truncated = np.zeros((TRUNCATED_FIELDS + 1, 1), np.int32)
        if self._logprobs is None:
            simple = np.zeros((2, len(logits)), np.int32)
            on_device = parts_to_device([simple, truncated, ~masks], self._device)
            self._draw_masked(logits, *on_device)
        self._sample_copies(batch, [_Chunk(0, num_rows, sizes, truncated, True)], logits, {})


class _DraftsBefore:
    """The draft tokens before each sample of a plan in its row.

    Attributes:
        failed_samples: see :class:`.StepResult`; filled in while samples are edited.
    """

    def __init__(self, plan: StepPlan) -> None:
        self._before: dict[int, tuple[int, ...]] = {}
        self.failed_samples: dict[str, int] = {}
        places = [0, *accumulate(plan.num_samples)]
        for row, drafts in plan.drafts().items():
            for i in range(1, len(drafts) + 1):
                self._before[places[row] + i] = drafts[:i]

    def of(self, place: int) -> tuple[int, ...]:
        """Those before the sample with this index in the step."""
        return self._before.get(place, ())


def _any_processors(batch: EditBatch) -> bool:
    return any(map(has_processors, batch.requests))


class _Chunk(NamedTuple):
    """Edited rows ``[first, end)``: the largest number of each edit per row, the result of
    :func:`_truncated` for them, and whether there are others."""

    first: int
    end: int
    sizes: ChunkSizes
    truncated: IntArray
    has_simple: bool


def _chunks(batch: EditBatch, size: int) -> list[_Chunk]:
    """Parts of ``size`` rows."""
    num_tokens = np.where(_has_penalties(batch.fields), batch.fields[3], 0)
    num_biases = batch.fields[9] - batch.fields[8]
    num_words = batch.fields[11] - batch.fields[10]
    num_word_tokens = int(np.diff(batch.words).max(initial=0))
    params = [request.sampling_params for request in batch.requests]
    sources = np.arange(CHUNK, dtype=np.int32)
    chunks = []
    for first in range(0, len(batch), size):
        part = slice(first, first + size)
        most = (int(counts[part].max()) for counts in (num_tokens, num_biases, num_words))
        sizes = ChunkSizes._make([*most, num_word_tokens])
        end = min(part.stop, len(batch))
        truncated = _truncated(batch.fields[0, part], sources, params[part])
        chunks.append(_Chunk(first, end, sizes, truncated, truncated.shape[1] < end - first))
    return chunks


def _has_penalties(fields: IntArray) -> NDArray[np.bool_]:
    # Compares bits: those of 0 are 0.
    return (fields[4] != np.float32(1).view(np.int32)) | (fields[5] != 0) | (fields[6] != 0)
