"""Log-probabilities of a step on a GPU: queued after the step, and copied to host memory.

Prompt positions go through the LM head in chunks with a fixed number of rows. This bounds the
logits that exist at a time, and the same kernels run whatever the prompts' lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...compile.captured_model import CapturedModel
from ...engine.logprobs import StepLogprobs
from ...kernels.sampling.logprob_rows import LOGPROB_FIELDS, MAX_TOP, ROW_WORDS, likeliest
from ...kernels.sampling.logprobs import write_logprobs
from ...kernels.sampling.top_k_top_p import processed_scores
from ..logprob_rows import (
    CHUNK_ROWS,
    MAX_ROWS_PER_SAMPLE,
    HostLogprobRows,
    Likeliest,
    wide_rows,
)
from ..pinned import IntArray

_PROCESSED_ROWS = 64
_MAX_SAMPLED_ROWS = 1024
"""Rows of samples that are computed at a time, which bounds the memory for their groups."""


def pad_positions(fields: IntArray) -> IntArray:
    """``[LOGPROB_FIELDS, P]`` padded to whole chunks, with rows that request token 0 of position
    0."""
    num_missing = -fields.shape[1] % CHUNK_ROWS
    return np.pad(fields, ((0, 0), (0, num_missing))) if num_missing else fields


def max_logprob_rows(max_num_tokens: int, max_num_rows: int) -> int:
    """The most rows that a step returns, including whole chunks of prompt positions."""
    num_prompt_rows = -(-max_num_tokens // CHUNK_ROWS) * CHUNK_ROWS
    return max_num_rows * MAX_ROWS_PER_SAMPLE + num_prompt_rows


@dataclass(slots=True, eq=False)
class WideRows:
    """The rows of a step with more than ``MAX_TOP`` most likely tokens.

    Attributes:
        sampled: (index, place, count) as from :func:`wide_rows`. prompt: the same.
        of_sampled, of_prompt: their most likely tokens, filled once the step has been computed.
    """

    sampled: list[tuple[int, int, int]]
    prompt: list[tuple[int, int, int]]
    of_sampled: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    of_prompt: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, sampled_fields: IntArray, prompt_fields: IntArray) -> WideRows | None:
        """Those of the fields that are sent, flat; None if there are none."""
        if not (sampled_fields.size or prompt_fields.size):
            return None
        sampled = wide_rows(sampled_fields.reshape(LOGPROB_FIELDS, -1))
        prompt = wide_rows(prompt_fields.reshape(LOGPROB_FIELDS, -1))
        return cls(sampled, prompt) if sampled or prompt else None


class GpuLogprobs:
    """Computes rows and stores them in pinned host memory.

    Args:
        num_steps: number of steps whose rows are kept; equals the size of the ring of results.
        max_num_rows: most rows per step, from :func:`max_logprob_rows`.
        temperatures: of the sampled rows, for the distributions that they are sampled from; None
            for the model's own.
    """

    def __init__(
        self,
        captured: CapturedModel,
        num_steps: int,
        max_num_rows: int,
        temperatures: Tensor | None = None,
    ) -> None:
        self._captured = captured
        self._temperatures = temperatures
        device = captured.loaded.device
        self._host = torch.zeros(
            num_steps,
            max_num_rows,
            ROW_WORDS,
            dtype=torch.int32,
            pin_memory=torch.cuda.is_available(),
        )
        self._places = torch.arange(CHUNK_ROWS, dtype=torch.int32, device=device)
        self._edited: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """A step begins: discard the edited rows of the preceding step."""
        self._edited.clear()

    def add_edited(
        self, logits: Tensor, places: Tensor, truncated: Tensor, sampled: Tensor
    ) -> None:
        """Queue the rows of edited copies ``[n, V]``, which replace the step's own.

        Args:
            places: int32 ``[n]``, their rows in the step. truncated, sampled: see :meth:`queue`.
        """
        rows = torch.empty(len(places), ROW_WORDS, dtype=torch.int32, device=logits.device)
        num_top = torch.full_like(places, MAX_TOP)
        sources = self._places[: len(places)]
        self._write_processed(logits, places, num_top, truncated, sampled, rows, sources)
        self._edited.append((places, rows))

    def queue(
        self,
        step: int,
        logits: Tensor,
        sampled: Tensor,
        truncated: Tensor,
        sampled_fields: Tensor,
        prompt_fields: Tensor,
        hidden: Tensor | None,
        wide: WideRows | None = None,
    ) -> Tensor:
        """Queue a step's rows. Returns where the host finds them, int32 ``[n + P, ROW_WORDS]``.

        Args:
            step: index in the ring.
            logits: ``[S, V]`` of the sampled rows. sampled: int64 ``[>= S]``, their tokens.
            truncated: fields of the rows that use top_k, top_p or min_p, see
                :func:`.sample_truncated`.
            sampled_fields: int32 ``[LOGPROB_FIELDS * n]``, see :mod:`...engine.logprobs`.
            prompt_fields: int32 ``[LOGPROB_FIELDS * P]``, whole chunks; places are rows of ``hidden
                [T, H]``, the hidden states before the LM head.
            wide: on rank 0, rows with more than ``MAX_TOP`` most likely tokens. Their copies to the
                host are queued too.
        """
        fields = sampled_fields.view(LOGPROB_FIELDS, -1)
        positions = prompt_fields.view(LOGPROB_FIELDS, -1)
        num_sampled, num_rows = fields.shape[1], fields.shape[1] + positions.shape[1]
        rows = torch.empty(num_rows, ROW_WORDS, dtype=torch.int32, device=logits.device)
        if num_sampled and self._temperatures is None:
            for first in range(0, num_sampled, _MAX_SAMPLED_ROWS):
                part = fields[:, first : first + _MAX_SAMPLED_ROWS]
                write_logprobs(logits, part, sampled, rows[first : first + part.shape[1]])
            if wide is not None:
                for index, place, count in wide.sampled:
                    wide.of_sampled[index] = _queue_likeliest(logits[place], rows[index], count)
        elif num_sampled:
            for first in range(0, num_sampled, _PROCESSED_ROWS):
                part = fields[:, first : first + _PROCESSED_ROWS]
                own = rows[first : first + part.shape[1]]
                self._write_processed(logits, part[0], part[2], truncated, sampled, own)
            for places, words in self._edited:
                is_edited = fields[0].unsqueeze(1) == places
                own_words = words[is_edited.int().argmax(1)]
                is_any = is_edited.any(1, keepdim=True)
                rows[:num_sampled] = torch.where(is_any, own_words, rows[:num_sampled])
        if positions.shape[1]:
            if hidden is None:
                raise RuntimeError(
                    "log-probabilities of a prompt need hidden states, but the graph has none"
                )
            for first in range(0, positions.shape[1], CHUNK_ROWS):
                chunk = positions[:, first : first + CHUNK_ROWS]
                begin = num_sampled + first
                own = rows[begin : begin + CHUNK_ROWS]
                scored = self._write_chunk(hidden, chunk, sampled, own)
                if wide is None:
                    continue
                for index, _, count in wide.prompt:
                    if first <= index < first + CHUNK_ROWS:
                        at = index - first
                        wide.of_prompt[index] = _queue_likeliest(scored[at], own[at], count)
        found = self._host[step, :num_rows]
        found.copy_(rows, non_blocking=True)
        return found

    def _write_processed(
        self,
        logits: Tensor,
        places: Tensor,
        num_top: Tensor,
        truncated: Tensor,
        sampled: Tensor,
        rows: Tensor,
        sources: Tensor | None = None,
    ) -> None:
        """The rows of the distributions that some rows are sampled from. Arguments: see
        :func:`.processed_scores` and :func:`.write_logprobs`."""
        assert self._temperatures is not None
        scores = processed_scores(logits, places, truncated, self._temperatures, sources)
        fields = torch.stack([self._places[: len(places)], sampled[places].int(), num_top])
        write_logprobs(scores, fields, sampled, rows)

    def _write_chunk(self, hidden: Tensor, chunk: Tensor, sampled: Tensor, rows: Tensor) -> Tensor:
        """Compute the rows of a chunk; returns its logits."""
        captured = self._captured
        if captured.head is None:
            raise RuntimeError("log-probabilities of a prompt need a head, but the graph has none")
        logits = captured.whole_logits(captured.head(hidden.index_select(0, chunk[0])))
        fields = torch.stack([self._places, chunk[1], chunk[2]])
        write_logprobs(logits, fields, sampled, rows)
        return logits

    def run_chunk(self, hidden: Tensor, sampled: Tensor) -> None:
        """Compute an empty chunk, so that its kernels are loaded and its memory is counted."""
        if self._captured.head is not None:
            blank = torch.zeros(LOGPROB_FIELDS, CHUNK_ROWS, dtype=torch.int32, device=hidden.device)
            rows = torch.empty(CHUNK_ROWS, ROW_WORDS, dtype=torch.int32, device=hidden.device)
            logits = self._write_chunk(hidden, blank, sampled, rows)
            if self._temperatures is not None:
                num_rows = min(_PROCESSED_ROWS, len(self._temperatures))
                places, own = self._places[:num_rows], rows[:num_rows]
                self._write_processed(logits, places, places, blank[0, :0], sampled, own)


def _queue_likeliest(logits: Tensor, words: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Queue :func:`.likeliest` and its copies to pinned memory. One row at a time, so that the
    memory for sorting is that of one row."""
    ids, logprobs = likeliest(logits, words, count)
    return ids.to("cpu", non_blocking=True), logprobs.to("cpu", non_blocking=True)


def read_logprobs(words: Tensor, num_sampled: int, wide: WideRows | None = None) -> StepLogprobs:
    """The rows of a computed step, copied from the ring and from pinned memory."""
    own = words.numpy().copy()
    if wide is None:
        return StepLogprobs(HostLogprobRows(own[:num_sampled]), HostLogprobRows(own[num_sampled:]))
    return StepLogprobs(
        HostLogprobRows(own[:num_sampled], _unpinned(wide.of_sampled)),
        HostLogprobRows(own[num_sampled:], _unpinned(wide.of_prompt)),
    )


def _unpinned(found: Likeliest) -> Likeliest:
    return {index: (ids.clone(), logprobs.clone()) for index, (ids, logprobs) in found.items()}
