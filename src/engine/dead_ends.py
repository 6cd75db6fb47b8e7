"""Requests whose own parameters have left no token to sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from .plan import InFlightStep

_FAILURE = "allowed_token_ids, bad_words and min_tokens leave no token to sample"
# What samplers give for a row without a finite logit (kernels/sampling/sampler.py).
_OF_NONE = 0


def dead_ends(step: InFlightStep, token_ids: Sequence[int]) -> dict[str, str]:
    """Why requests of a step cannot go on, by their ids: they were given a token that their edits
    ban. Called just before the step is committed.

    Which sequences of ``bad_words`` come together shows only as tokens are sampled; nothing looks
    at the logits for this.

    Args:
        token_ids: one for each sampled row, in row order.
    """
    if _OF_NONE not in token_ids:
        return {}
    found: dict[str, str] = {}
    sampled = compress(step.requests, step.plan.sampled)
    for request, token_id in zip(sampled, token_ids, strict=True):
        edits = request.info.edits
        if token_id != _OF_NONE or edits is None:
            continue
        if edits.bans(token_id, request.output_token_ids):
            found[request.request_id] = _FAILURE
    return found
