"""Log-probabilities of a step: the requested rows as integers, the computed rows, and their
computation on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..compile.captured_model import CapturedModel
from ..compile.step_inputs import MIN_SIZE
from ..engine.edit_checks import MAX_LOGPROB_TOKEN_IDS
from ..engine.logprobs import StepLogprobs
from ..engine.plan import StepPlan
from ..engine.request import RequestInfo
from ..kernels.sampling.logprob_rows import (
    LOGPROB_FIELDS,
    MAX_TOP,
    ROW_WORDS,
    likeliest,
    logprob_rows,
)
from .pinned import IntArray

CHUNK_ROWS = 256
"""Prompt positions whose logits exist at the same time."""
_NONE = np.empty((LOGPROB_FIELDS, 0), np.int32)
Likeliest = Mapping[int, tuple[Tensor, Tensor]]
"""By index of a row with more than ``MAX_TOP`` most likely tokens: the results of
:func:`.likeliest`, in host memory."""
_SAMPLED_TOKEN = -1
MAX_ROWS_PER_SAMPLE = 1 + MAX_LOGPROB_TOKEN_IDS


def sampled_fields(requests: Sequence[RequestInfo]) -> IntArray:
    """``[LOGPROB_FIELDS, n]`` for the sampled rows of a plan with these requests; places are
    indices of sampled rows."""
    found = []
    for place, request in enumerate(requests):
        params = request.sampling_params
        if params.logprobs is not None:
            found.append((place, _SAMPLED_TOKEN, params.logprobs))
            found += [(place, token_id, 0) for token_id in params.logprob_token_ids or ()]
    return np.array(found, np.int32).T if found else _NONE


def prompt_fields(plan: StepPlan) -> IntArray:
    """``[LOGPROB_FIELDS, P]`` for a plan, in the order of ``StepLogprobs.prompt``; places are
    tokens of the step."""
    scored = [row for row, info in enumerate(plan.requests) if info.prompt_token_ids is not None]
    if not scored:
        return _NONE
    firsts = np.cumsum([0, *plan.num_tokens])
    parts = [_NONE]
    for row in scored:
        info, start = plan.requests[row], plan.starts[row]
        count = info.num_prompt_rows(start, plan.num_tokens[row])
        if count and info.prompt_token_ids is not None:
            part = np.empty((LOGPROB_FIELDS, count), np.int32)
            part[0] = np.arange(firsts[row], firsts[row] + count)
            part[1] = info.prompt_token_ids[start + 1 : start + 1 + count]
            part[2] = info.sampling_params.prompt_logprobs or 0
            parts.append(part)
    return np.concatenate(parts, axis=1)


def has_prompt_rows(plan: StepPlan) -> bool:
    """Whether log-probabilities of prompt positions are requested of a step."""
    return any(
        info.prompt_token_ids is not None and info.num_prompt_rows(start, num_tokens) > 0
        for info, start, num_tokens, _ in plan.rows()
    )


def wide_rows(fields: IntArray) -> list[tuple[int, int, int]]:
    """(index, place, number of most likely tokens) of the requested rows with more than
    ``MAX_TOP``; ``fields``: from :func:`sampled_fields` or :func:`prompt_fields`."""
    found = np.flatnonzero(fields[2] > MAX_TOP)
    places, num_top = fields[0][found], fields[2][found]
    return list(zip(found.tolist(), places.tolist(), num_top.tolist(), strict=True))


class HostLogprobRows:
    """Implements :class:`.engine.logprobs.LogprobRows`.

    Args:
        words: int32 ``[n, ROW_WORDS]``, which owns its memory.
        likeliest: for rows with more than ``MAX_TOP`` most likely tokens.
    """

    __slots__ = ("_likeliest", "_logprobs", "_ranks", "_words")

    def __init__(self, words: NDArray[Any], likeliest: Likeliest | None = None) -> None:
        self._words, self._likeliest = words, likeliest or {}
        # Whole columns at once: one row at a time would take longer than the step.
        self._logprobs: list[float] = words.view(np.float32)[:, 0].tolist()
        self._ranks: list[int] = words[:, 1].tolist()

    def logprob(self, index: int) -> float:
        return self._logprobs[index]

    def row(self, index: int, num_top: int) -> tuple[float, int, Sequence[int], Sequence[float]]:
        own = self._logprobs[index], self._ranks[index]
        if not num_top:
            return *own, (), ()
        if num_top > MAX_TOP:
            all_ids, logprobs = self._likeliest[index]
            return *own, all_ids.tolist(), logprobs.tolist()
        words, first = self._words[index], 2 + MAX_TOP
        ids = [i for i in words[2 : 2 + num_top].tolist() if i >= 0]  # a vocabulary may have fewer
        return *own, ids, words[first : first + len(ids)].view(np.float32).tolist()


@dataclass(frozen=True, slots=True)
class LogprobInputs:
    """``sampled``, ``prompt``: from :func:`sampled_fields` and :func:`prompt_fields`."""

    sampled: IntArray
    prompt: IntArray


def step_logprobs(
    inputs: LogprobInputs,
    captured: CapturedModel,
    sampled_logits: Callable[[Tensor], Tensor],
    tokens: Tensor,
    hidden: Tensor | None,
) -> StepLogprobs | None:
    """The requested log-probabilities of a step; None if there are none.

    Args:
        sampled_logits: logits ``[n, V]`` of some of the sampled rows, by place.
        tokens: int64 ``[S]``, sampled. hidden: ``[T, H]``, before the LM head.
    """
    if not (inputs.sampled.size or inputs.prompt.size):
        return None
    places, given, num_top = torch.from_numpy(inputs.sampled.astype(np.int64))
    logits = sampled_logits(places)
    own = torch.where(given == _SAMPLED_TOKEN, tokens[places], given)
    sampled = logprob_rows(logits, own, num_top)
    wide = {i: likeliest(logits[i], sampled[i], k) for i, _, k in wide_rows(inputs.sampled)}
    return StepLogprobs(
        HostLogprobRows(sampled.numpy(), wide), _prompt_rows(inputs.prompt, captured, hidden)
    )


def _prompt_rows(
    fields: IntArray, captured: CapturedModel, hidden: Tensor | None
) -> HostLogprobRows:
    if not fields.size:
        return HostLogprobRows(np.empty((0, ROW_WORDS), np.int32))
    if captured.head is None or hidden is None:
        raise RuntimeError("log-probabilities of a prompt need a head, but the graph has none")
    rows, wide = [], {}
    for first in range(0, fields.shape[1], CHUNK_ROWS):
        part = fields[:, first : first + CHUNK_ROWS]
        at, targets, num_top = torch.from_numpy(part.astype(np.int64))
        padded = at if len(at) >= MIN_SIZE else at.repeat(MIN_SIZE)
        logits = captured.whole_logits(captured.head(hidden[padded]))
        rows.append(logprob_rows(logits[: len(at)], targets, num_top))
        for index, _, count in wide_rows(part):
            wide[first + index] = likeliest(logits[index], rows[-1][index], count)
    return HostLogprobRows(torch.cat(rows).numpy(), wide)
