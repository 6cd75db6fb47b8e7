"""Moves log-probabilities from settled steps to requests, and from requests to outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .logprob_lists import Logprob, LogprobList, LogprobPositions, PromptLogprobs, SampleLogprobs
from .logprobs import StepLogprobs
from .outputs import RequestOutput, ScoreOutput
from .plan import InFlightStep
from .request import Request
from .sampling_params import SamplingParams

SCORE_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
"""Parameters of a request that is only scored; its one sampled token is discarded."""


def keep_logprobs(step: InFlightStep, found: StepLogprobs, token_ids: Sequence[int]) -> None:
    """Copy the rows of a step to its requests. Called just before the step is committed: a request
    that has ended by then gets no more tokens. For a row with draft tokens, the rows of accepted
    samples are kept; :func:`trim_logprobs` drops those after the end of the request.

    Args:
        token_ids: the samples of the step, concatenated in row order.
    """
    plan = step.plan
    sampled_row = prompt_row = 0
    accepted = plan.accepted(token_ids) if plan.has_drafts else None
    for row, (request, start, num_tokens, num_samples) in enumerate(step.rows()):
        kept = request.logprobs
        if kept is None:
            continue
        is_live = request.finish_reason is None
        count = request.info.num_prompt_rows(start, num_tokens)
        if is_live:
            kept.add_prompt(found.prompt, prompt_row, start, count)
        prompt_row += count
        if num_samples and request.sampling_params.logprobs is not None:
            num_taken = num_samples if accepted is None else len(accepted[row])
            num_rows = 1 + len(request.sampling_params.logprob_token_ids or ())
            if is_live:
                for place in range(sampled_row, sampled_row + num_taken * num_rows, num_rows):
                    kept.add_sampled(found.sampled, place)
            sampled_row += num_samples * num_rows


def trim_logprobs(step: InFlightStep) -> None:
    """Drop the rows of samples that were not appended. Called after a step with draft tokens was
    committed."""
    for request, num_samples in zip(step.requests, step.plan.num_samples, strict=True):
        if num_samples > 1 and request.logprobs is not None:
            request.logprobs.trim_sampled(len(request.token_ids) - request.num_prompt_tokens)


def add_logprobs(
    output: RequestOutput, requests: Sequence[Request], decode: Callable[[int], str] | None
) -> None:
    """Set the log-probabilities that the parameters of finished requests select.

    Args:
        output: with its token ids.
        requests: its continuations; the first has the rows of the prompt.
        decode: decodes one token; None: entries have no text.
    """
    params = requests[0].sampling_params
    if params.logprobs is not None:
        for answer, request in zip(output.outputs, requests, strict=True):
            answer.logprobs = logprob_entries(request, 0, len(answer.token_ids), decode)
            kept = request.logprobs
            answer.cumulative_logprob = 0.0 if kept is None else kept.cumulative
    output.prompt_logprobs = prompt_entries(requests[0], decode)


def prompt_entries(leader: Request, decode: Callable[[int], str] | None) -> PromptLogprobs | None:
    """Entries of the prompt tokens computed so far; None without ``prompt_logprobs``."""
    num_top = leader.sampling_params.prompt_logprobs
    if num_top is None or leader.logprobs is None:
        return None
    kept = leader.logprobs.prompt
    # All tokens, unless the request is still in its prompt or was aborted there.
    token_ids = leader.token_ids[1 : len(kept) + 1]
    found = LogprobPositions(token_ids, kept, num_top, decode, has_first=True)
    return found.flat() if leader.sampling_params.flat_logprobs else LogprobList(found)


def logprob_entries(
    request: Request, begin: int, end: int, decode: Callable[[int], str] | None
) -> SampleLogprobs | None:
    """Entries of the settled outputs ``begin`` to ``end``; None without ``logprobs``."""
    num_top = request.sampling_params.logprobs
    if num_top is None or request.logprobs is None:
        return None
    first = request.num_prompt_tokens
    token_ids = request.token_ids[first + begin : first + end]
    kept = request.logprobs.sampled
    given = request.sampling_params.logprob_token_ids or ()
    found = LogprobPositions(token_ids, kept, num_top, decode, begin=begin, given_ids=given)
    return found.flat() if request.sampling_params.flat_logprobs else LogprobList(found)


def plain_logprobs(
    places: Sequence[Mapping[int, Logprob] | None],
    number: Callable[[float], float | None] = float,
) -> list[list[dict[str, Any]] | None]:
    """Log-probabilities as plain lists, for JSON and Arrow: per token its own entry, then those of
    the most likely other tokens; None for a token without a row.

    Args:
        number: converts a log-probability.
    """
    return [
        None
        if not entries  # in flat lists, the first token of a prompt has an empty dict
        else [
            {
                "token_id": token_id,
                "logprob": number(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in entries.items()
        ]
        for entries in places
    ]


def score_of(output: RequestOutput, decode: Callable[[int], str] | None) -> ScoreOutput:
    """The score from a finished request with :data:`SCORE_PARAMS`."""
    token_ids = output.prompt_token_ids
    entries = output.prompt_logprobs or [None] * len(token_ids)
    own = [
        None if found is None else found[token]
        for token, found in zip(token_ids, entries, strict=True)
    ]
    return ScoreOutput(
        prompt=output.prompt,
        prompt_token_ids=token_ids,
        tokens=None if decode is None else [decode(token) for token in token_ids],
        logprobs=[None if entry is None else entry.logprob for entry in own],
        ranks=[None if entry is None else entry.rank for entry in own],
    )
