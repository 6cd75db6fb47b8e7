"""Rows that have a mask and no edits, on a GPU: sampled from the step's own logits.

The kernels read a row's mask beside its logits, and its parameters where the step has them: two
launches for all such rows, one more if some use top_k, top_p or min_p. While a batch stays as it
is, nothing is sent but masks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..engine.plan import LastTwoBatches, StepPlan
from ..kernels.sampling.draw_functions import MaskedRows, Results
from ..kernels.sampling.gumbel import sample_simple
from ..kernels.sampling.top_k_top_p import TRUNCATED_FIELDS, sample_truncated
from ..structured.matchers import Masks
from .device_buffers import StepBuffers
from .gpu_masks import MaskMemory
from .pinned_ring import IntArray, to_device
from .row_params import truncated_fields


class _Rows(NamedTuple):
    """The constrained rows of a batch.

    Attributes:
        numbers, places: of all of them, as in :class:`.structured.matchers.Masks`.
        edited, edited_places: of those that have edits as well.
        simple: on the device, int32 ``[2, n]``: places and numbers of masks.
        truncated: of those that use top_k, top_p or min_p, int32 ``[TRUNCATED_FIELDS + 1, n]``:
            their fields, and numbers of masks.
    """

    numbers: dict[int, int]
    places: list[int]
    edited: dict[int, int]
    edited_places: list[int]
    simple: Tensor
    truncated: Tensor


class MaskedRowSampler:
    """Samples the constrained rows of a step that edit nothing.

    Args:
        buffers, results: of the runner. memory: of the masks.
    """

    def __init__(self, buffers: StepBuffers, results: Results, memory: MaskMemory) -> None:
        self._buffers, self._results, self._memory = buffers, results, memory
        self._kept = LastTwoBatches[_Rows]()

    def place(self, plan: StepPlan, masks: Masks) -> Masks | None:
        """Find these rows, for :meth:`sample`; returns the masks of rows with edits, or None."""
        rows = self._kept.get(plan.requests)
        if rows is None or (rows.numbers, rows.places) != (masks.numbers, masks.places):
            rows = self._kept.put(plan.requests, self._rows_of(plan, masks))
        self._rows = rows
        if not rows.edited:
            return None
        return masks._replace(numbers=rows.edited, places=rows.edited_places)

    def _rows_of(self, plan: StepPlan, masks: Masks) -> _Rows:
        edited: dict[int, int] = {}
        edited_places, own = [], []
        for (row, number), place in zip(masks.numbers.items(), masks.places, strict=True):
            request = plan.requests[row]
            if request.edits is None:
                own.append((place, number, request.sampling_params))
            else:
                edited[row] = number
                edited_places.append(place)
        fields = np.array([own_row[:2] for own_row in own], np.int32).reshape(-1, 2).T
        truncated = truncated_fields([params for *_, params in own])
        is_simple = np.ones(len(own), bool)
        is_simple[truncated[0]] = False
        truncated = np.concatenate([truncated, fields[1:, truncated[0]]])
        truncated[0] = fields[0, truncated[0]]
        sent = self._send(fields[:, is_simple], truncated)
        return _Rows(masks.numbers, masks.places, edited, edited_places, *sent)

    def _send(self, *arrays: IntArray) -> list[Tensor]:
        """All in one copy."""
        whole = np.concatenate([array.reshape(-1) for array in arrays])
        sent = to_device(whole, self._buffers.staged.device)
        parts = sent.split([a.size for a in arrays])
        return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]

    def sample(self, logits: Tensor) -> None:
        """Sample the rows placed last from the logits ``[S, V]`` of their step, once their masks
        are sent."""
        self._sample(logits, self._rows.simple, self._rows.truncated, self._memory.on_device)

    def _sample(self, logits: Tensor, simple: Tensor, truncated: Tensor, masks: Tensor) -> None:
        b = self._buffers
        own = (b.temperatures, b.seeds, b.sample_positions, b.sampled, self._results)
        if simple.numel():
            sample_simple(logits, *own, masked=MaskedRows(simple[0], simple[1], masks))
        if truncated.numel():
            rows = MaskedRows(truncated[0], truncated[TRUNCATED_FIELDS], masks)
            sample_truncated(logits, truncated[:TRUNCATED_FIELDS].view(-1), *own, rows)

    def run_worst_case(self, logits: Tensor) -> None:
        """Launch every kernel there is, over as many rows as there can be."""
        rows = torch.zeros(2, len(logits), dtype=torch.int32, device=logits.device)
        truncated = rows.new_zeros(TRUNCATED_FIELDS + 1, 1)
        masks = rows.new_full((1, -(-logits.shape[1] // 32)), -1)
        self._sample(logits, rows, truncated, masks)
