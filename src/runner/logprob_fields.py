"""What a step's rows ask of log-probabilities, as integers; and the rows that came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.plan import StepPlan
from ..engine.request import RequestInfo
from ..kernels.sampling.logprob_rows import LOGPROB_FIELDS, MAX_TOP

IntArray = NDArray[np.int32]

_NONE = np.empty((LOGPROB_FIELDS, 0), np.int32)
_SAMPLED_TOKEN = -1


def sampled_fields(requests: Sequence[RequestInfo]) -> IntArray:
    """``[LOGPROB_FIELDS, n]`` of the sampled rows of a plan, whose requests these are; the places
    are those among them."""
    found = [
        (place, _SAMPLED_TOKEN, request.sampling_params.logprobs)
        for place, request in enumerate(requests)
        if request.sampling_params.logprobs is not None
    ]
    return np.array(found, np.int32).T if found else _NONE


def prompt_fields(plan: StepPlan) -> IntArray:
    """``[LOGPROB_FIELDS, P]`` of a plan, in the order of ``StepLogprobs.prompt``; the places are
    tokens of the step."""
    asking = [row for row, info in enumerate(plan.requests) if info.prompt_token_ids is not None]
    if not asking:
        return _NONE
    firsts = np.cumsum([0, *plan.num_tokens])
    parts = [_NONE]
    for row in asking:
        info, start = plan.requests[row], plan.starts[row]
        count = info.num_prompt_rows(start, plan.num_tokens[row])
        if count and info.prompt_token_ids is not None:
            part = np.empty((LOGPROB_FIELDS, count), np.int32)
            part[0] = np.arange(firsts[row], firsts[row] + count)
            part[1] = info.prompt_token_ids[start + 1 : start + 1 + count]
            part[2] = info.sampling_params.prompt_logprobs or 0
            parts.append(part)
    return np.concatenate(parts, axis=1)


class HostLogprobRows:
    """Meets :class:`.engine.logprobs.LogprobRows`.

    Args:
        words: int32 ``[n, ROW_WORDS]``, of its own memory.
    """

    __slots__ = ("_logprobs", "_ranks", "_words")

    def __init__(self, words: NDArray[Any]) -> None:
        self._words = words
        # Whole columns at once: row by row this would take longer than the step.
        self._logprobs: list[float] = words.view(np.float32)[:, 0].tolist()
        self._ranks: list[int] = words[:, 1].tolist()

    def logprob(self, index: int) -> float:
        return self._logprobs[index]

    def row(self, index: int, num_top: int) -> tuple[float, int, Sequence[int], Sequence[float]]:
        own = self._logprobs[index], self._ranks[index]
        if not num_top:
            return *own, (), ()
        words, first = self._words[index], 2 + MAX_TOP
        ids = [i for i in words[2 : 2 + num_top].tolist() if i >= 0]  # a vocabulary may have fewer
        return *own, ids, words[first : first + len(ids)].view(np.float32).tolist()
