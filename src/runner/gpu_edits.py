"""Edited rows on a GPU: copied in chunks, edited and sampled by eager kernels behind the graph.

Rows that have a mask and no edits are not copied: :mod:`.gpu_masked_rows` samples them.

The tokens so far of each row that needs them are on the device, a row for each row of the block
table store: the ids that a step computes are copied there from its own inputs, so that tokens in
flight are there, too, and only what another request computed (a prefix hit) is sent. Nothing here
waits for the device but Python functions, which read the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine.plan import StepPlan
from ..kernels.sampling.draw_functions import Results
from ..kernels.sampling.edit_kernels import (
    EDIT_FIELDS,
    ChunkSizes,
    StagedEdits,
    edit_rows,
    keep_history,
    store_tokens,
    take_parameters,
)
from ..kernels.sampling.gumbel import sample_simple
from ..kernels.sampling.top_k_top_p import TRUNCATED_FIELDS, sample_truncated
from ..structured.matchers import Masks
from .device_buffers import StepBuffers
from .edit_batch import EditBatch, EditPacker
from .gpu_logprobs import processed_rows
from .gpu_masked_rows import MaskedRowSampler
from .gpu_masks import MaskMemory
from .layout import StepShape
from .logits_processors import has_processors, process
from .pinned_ring import IntArray, to_device
from .row_params import truncated_fields

CHUNK = 32
"""Rows edited at a time: 8 bytes a token of the vocabulary each, for logits and counts."""
_ALIGNMENT = 4  # integers; kernels are compiled anew for addresses that are not of 16 bytes


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Edited rows ``[first, end)``.

    Attributes:
        truncated: those that use top_k, top_p or min_p; see ``TRUNCATED_FIELDS``.
        has_simple: whether there are others. has_processors: whether any has Python functions.
    """

    first: int
    end: int
    sizes: ChunkSizes
    truncated: IntArray
    has_simple: bool
    has_processors: bool


class GpuEdits:
    """Histories, work space and launches for edited rows.

    Args:
        buffers: of the runner's steps. results: of the runner.
        max_model_len: most tokens of a request, or a little more.
        processed_logprobs: keep the log-probabilities of what edited rows are sampled from.

    Attributes:
        masks: of constrained rows.
        logprobs: of the last step, in chunks: places int32 ``[n]`` among the sampled rows, and
            their rows as of :func:`.processed_rows`.
    """

    def __init__(
        self,
        buffers: StepBuffers,
        results: Results,
        max_model_len: int,
        processed_logprobs: bool = False,
    ) -> None:
        self._has_logprobs = processed_logprobs
        self.logprobs: list[tuple[Tensor, Tensor]] = []
        device, num_rows = buffers.staged.device, len(buffers.table_store)
        self._buffers, self._results = buffers, results
        self._packer = EditPacker()
        self.masks = MaskMemory(device)
        self._masked_rows = MaskedRowSampler(buffers, results, self.masks)
        self._no_masks = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self.history = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self._parameters = (
            torch.zeros(num_rows, dtype=torch.float32, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def look(self, plan: StepPlan) -> bool:
        """Whether rows of a plan may be edited. Asked before anything else is done for it."""
        self.logprobs.clear()
        self._packer.look(plan)
        return self._packer.any_edited

    def keep_history(self, plan: StepPlan, shape: StepShape, history_rows: Sequence[int]) -> None:
        """Take in the tokens of the step that runs, once its inputs are unpacked."""
        if not self._packer.any_history:
            return
        rows = [row for row, ids in plan.prefixes.items() if ids]
        if rows:
            ids = np.concatenate([np.array(plan.prefixes[row], np.int32) for row in rows])
            sent, at = self._send(ids), 0
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
    ) -> dict[str, str]:
        """Sample the edited rows of a step from its logits ``[S, V]``, which stay as they are.

        Args:
            masks: see :meth:`.edit_batch.EditPacker.pack`.

        Returns:
            Why requests cannot go on, by their ids.
        """
        batch = None
        failures: dict[str, str] = {}
        edited = masks
        # Log-probabilities of what a row is sampled from are of a copy of it.
        if masks is not None and not self._has_logprobs:
            edited = self._masked_rows.place(plan, masks)
        if self._packer.any_edited or edited is not None:
            batch = self._packer.pack(plan, logits.shape[1], history_rows, edited)
        if masks is not None:
            self.masks.send(masks.numbers.values())
            if not self._has_logprobs:
                self._masked_rows.sample(logits)
        if batch is not None:
            failures.update(self._packer.failures)
            self._sample(batch, _chunks(batch), logits, failures)
        return failures

    def _sample(
        self,
        batch: EditBatch,
        chunks: Sequence[_Chunk],
        logits: Tensor,
        failures: dict[str, str],
    ) -> None:
        edits, truncated = self._stage(batch, chunks)
        b = self._buffers
        of_step = (b.temperatures, b.seeds, b.sample_positions)
        take_parameters(edits.fields, of_step, self._parameters)
        size = min(CHUNK, len(self._tokens)), logits.shape[1]
        space = torch.empty(size, dtype=torch.float32, device=logits.device)
        counts = torch.empty(size, dtype=torch.int32, device=logits.device)
        for chunk, fields in zip(chunks, truncated, strict=True):
            rows = space[: chunk.end - chunk.first]
            edit_rows(logits, edits, self.history, counts, rows, chunk.first, chunk.sizes)
            if chunk.has_processors:
                self._process(batch, chunk, rows, failures)
            own = [t[chunk.first : chunk.end] for t in (*self._parameters, self._tokens)]
            temperatures, seeds, positions, tokens = own
            if chunk.has_simple:
                sample_simple(rows, temperatures, seeds, positions, tokens)
            if len(fields):
                sample_truncated(rows, fields, temperatures, seeds, positions, tokens)
            if self._has_logprobs:
                words = processed_rows(rows, fields, temperatures, tokens)
                self.logprobs.append((edits.fields[0, chunk.first : chunk.end], words))
        store_tokens(edits.fields, self._tokens, b.sampled, self._results)

    def _process(
        self, batch: EditBatch, chunk: _Chunk, rows: Tensor, failures: dict[str, str]
    ) -> None:
        """Run the Python functions of these rows, one by one, on the host."""
        for i in range(chunk.first, chunk.end):
            request = batch.requests[i]
            if not has_processors(request):
                continue
            _, history_row, num_prompt, num_tokens = batch.fields[:4, i].tolist()
            output = self.history[history_row, num_prompt:num_tokens].tolist()
            row = rows[i - chunk.first]
            row.copy_(process(request, row.cpu(), output, failures))

    def _stage(
        self, batch: EditBatch, chunks: Sequence[_Chunk]
    ) -> tuple[StagedEdits, list[Tensor]]:
        """All arrays in one copy."""
        arrays = [
            *(batch.fields, batch.bias, batch.words, batch.word_ids, batch.masks),
            *(chunk.truncated for chunk in chunks),
        ]
        starts = np.cumsum([0, *(-(-a.size // _ALIGNMENT) * _ALIGNMENT for a in arrays)])
        whole = np.zeros(starts[-1], np.int32)
        for array, start in zip(arrays, starts.tolist(), strict=False):
            whole[start : start + array.size] = array.reshape(-1)
        sent = self._send(whole)
        parts = [
            sent[start : start + array.size].view(array.shape)
            for array, start in zip(arrays, starts.tolist(), strict=False)
        ]
        constrained = self.masks.on_device if len(batch.constrained) else self._no_masks
        edits = StagedEdits._make([*parts[:5], constrained])
        return edits, [part.view(-1) for part in parts[5:]]

    def _send(self, array: IntArray) -> Tensor:
        return to_device(array, self._buffers.staged.device)

    def run_worst_case(self, shape: StepShape, logits: Tensor) -> None:
        """Launch every kernel there is over as many rows as there can be."""
        self._keep_inputs(shape, shape.num_tokens)
        num_rows = min(len(self._tokens), CHUNK)
        fields = np.zeros((EDIT_FIELDS, num_rows), np.int32)
        fields[4] = np.float32(2).view(np.int32)  # a repetition penalty
        fields[9] = fields[11] = 1  # a bias, and a bad word
        masks = np.zeros((1, -(-logits.shape[1] // 32)), np.int32)
        words, word_ids = np.array([0, 2], np.int32), np.zeros(2, np.int32)
        batch = EditBatch((), fields, np.zeros((2, 1), np.int32), words, word_ids, masks)
        sizes = ChunkSizes(self.history.shape[1], 1, 1, 2)
        truncated = np.zeros((TRUNCATED_FIELDS, 1), np.int32)
        if not self._has_logprobs:
            self._masked_rows.run_worst_case(logits)
        self._sample(batch, [_Chunk(0, num_rows, sizes, truncated, True, False)], logits, {})


def _chunks(batch: EditBatch) -> list[_Chunk]:
    num_tokens = np.where(_has_penalties(batch.fields), batch.fields[3], 0)
    num_biases = batch.fields[9] - batch.fields[8]
    num_words = batch.fields[11] - batch.fields[10]
    num_word_tokens = int(np.diff(batch.words).max(initial=0))
    chunks = []
    for first in range(0, len(batch), CHUNK):
        requests = batch.requests[first : first + CHUNK]
        part = slice(first, first + len(requests))
        sizes = ChunkSizes(
            int(num_tokens[part].max()),
            int(num_biases[part].max()),
            int(num_words[part].max()),
            num_word_tokens,
        )
        truncated = truncated_fields([request.sampling_params for request in requests])
        chunks.append(
            _Chunk(
                first,
                part.stop,
                sizes,
                truncated,
                truncated.shape[1] < len(requests),
                any(r.edits is not None and r.edits.processors for r in requests),
            )
        )
    return chunks


def _has_penalties(fields: IntArray) -> NDArray[np.bool_]:
    # Bits, of which those of 0 are 0.
    return (fields[4] != np.float32(1).view(np.int32)) | (fields[5] != 0) | (fields[6] != 0)
