"""Requests whose own parameters have left no token to sample."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import InFlightStep
from .request import Request

DEAD_END = "allowed_token_ids, bad_words and min_tokens leave no token to sample"
# What samplers give for a row without a finite logit (kernels/sampling/sampler.py).
_OF_NONE = 0


def dead_ends(step: InFlightStep, token_ids: Sequence[int]) -> dict[str, str]:
    """Why requests of a step cannot go on, by their ids: their first sample is a token that their
    edits ban. Called just before the step is committed; the scheduler sees to further samples.

    Which sequences of ``bad_words`` come together shows only as tokens are sampled; nothing looks
    at the logits for this.

    Args:
        token_ids: the samples of the step, row after row.
    """
    if _OF_NONE not in token_ids:
        return {}
    found: dict[str, str] = {}
    place = 0
    for request, num_samples in zip(step.requests, step.plan.num_samples, strict=True):
        if num_samples and is_dead_end(request, token_ids[place]):
            found[request.request_id] = DEAD_END
        place += num_samples
    return found


def is_dead_end(request: Request, token_id: int) -> bool:
    """Whether a sample behind the settled tokens of ``request`` is one that its edits ban."""
    edits = request.info.edits
    if token_id != _OF_NONE or edits is None:
        return False
    return edits.bans(token_id, request.output_token_ids)
