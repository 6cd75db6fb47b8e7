"""A reference implementation of sampling parameters: plain Python and float64, one row at a time.

It is written from ``docs/sampling_parameters.md`` alone and shares no code with the engine. Its
inputs are those that a user has: the prompt, the output so far, the parameters and the logits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from pagespec import SamplingParams

Row = NDArray[np.float64]


def edited_logits(
    logits: Sequence[float] | NDArray[np.floating],
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    *,
    end_token_ids: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> Row:
    """The logits from which a token is sampled.

    Args:
        end_token_ids: the model's. bad_words: those of ``params`` as token ids.
    """
    row = np.array(logits, np.float64)
    if params.allowed_token_ids is not None:
        for token in range(len(row)):
            if token not in params.allowed_token_ids:
                row[token] = -math.inf
    for word in bad_words:
        *before, last = word
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            row[last] = -math.inf
    if len(output) < params.min_tokens:
        for token in {*end_token_ids, *(params.stop_token_ids or ())}:
            row[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for token in {*prompt, *output}:
        if row[token] > 0:
            row[token] /= params.repetition_penalty
        else:
            row[token] *= params.repetition_penalty
    for token, count in Counter(output).items():
        row[token] -= params.frequency_penalty * count
        row[token] -= params.presence_penalty
    return row


def probabilities(edited: Row, params: SamplingParams) -> Row:
    """The probability of each token, from edited logits. A greedy row has probability 1 at the
    first of the largest logits."""
    if params.temperature == 0:
        chosen = np.zeros(len(edited))
        chosen[int(np.argmax(edited))] = 1.0
        return chosen
    p = _softmax(edited / params.temperature)
    if params.min_p > 0:
        p = np.where(p < params.min_p * p.max(), 0.0, p)
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(p[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        if kept and reached >= params.top_p * total and params.top_p < 1:
            break
        kept.append(token)
        reached += p[token]
    result = np.zeros(len(p))
    result[kept] = p[kept] / sum(p[kept])
    return result


def _softmax(row: Row) -> Row:
    weights = np.exp(row - row.max())
    return weights / weights.sum()
