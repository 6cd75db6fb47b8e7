"""Log-probabilities of a step on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..compile.captured_model import CapturedModel
from ..compile.step_inputs import MIN_SIZE
from ..engine.logprobs import StepLogprobs
from ..kernels.sampling.logprob_rows import ROW_WORDS, logprob_rows
from .logprob_fields import HostLogprobRows, IntArray

CHUNK_ROWS = 256
"""Prompt positions whose logits there are at a time."""


@dataclass(frozen=True, slots=True)
class LogprobInputs:
    """``sampled``, ``prompt``: what :mod:`.logprob_fields` makes of a plan."""

    sampled: IntArray
    prompt: IntArray

    @property
    def is_empty(self) -> bool:
        return not self.sampled.size and not self.prompt.size


def step_logprobs(
    inputs: LogprobInputs,
    captured: CapturedModel,
    sampled_logits: Callable[[Tensor], Tensor],
    tokens: Tensor,
    hidden: Tensor | None,
) -> StepLogprobs | None:
    """The log-probabilities that a step is asked for; None if it is not.

    Args:
        sampled_logits: logits ``[n, V]`` of some of the sampled rows, by place.
        tokens: int64 ``[S]``, sampled. hidden: ``[T, H]``, in front of the head.
    """
    if inputs.is_empty:
        return None
    places, _, num_top = map(torch.from_numpy, inputs.sampled.astype(np.int64))
    sampled = logprob_rows(sampled_logits(places), tokens[places], num_top)
    prompt = torch.empty(0, ROW_WORDS, dtype=torch.int32)
    if inputs.prompt.size:
        prompt = _prompt_rows(inputs.prompt, captured, hidden)
    return StepLogprobs(HostLogprobRows(sampled.numpy()), HostLogprobRows(prompt.numpy()))


def _prompt_rows(fields: IntArray, captured: CapturedModel, hidden: Tensor | None) -> Tensor:
    if captured.head is None or hidden is None:
        raise RuntimeError("log-probabilities of a prompt, and no head to compute them with")
    rows = []
    for part in torch.from_numpy(fields.astype(np.int64)).split(CHUNK_ROWS, dim=1):
        at, targets, num_top = part
        padded = at if len(at) >= MIN_SIZE else at.repeat(MIN_SIZE)
        logits = captured.whole_logits(captured.head(hidden[padded]))
        rows.append(logprob_rows(logits[: len(at)], targets, num_top))
    return torch.cat(rows)
