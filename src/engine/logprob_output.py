"""Log-probabilities at the end of a step, given to its requests, and in their outputs, as dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .logprobs import LogprobRows, StepLogprobs
from .outputs import Logprob, RequestOutput, ScoreOutput
from .plan import InFlightStep
from .request import Request
from .sampling_params import SamplingParams

SCORE_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
"""Of a request that is only scored; its one sampled token is dropped."""


def keep_logprobs(step: InFlightStep, found: StepLogprobs) -> None:
    """Give the rows of a step to its requests. Called just before the step is committed: a request
    that has ended by then gets no more tokens."""
    plan = step.plan
    sampled_row = prompt_row = 0
    for request, start, num_tokens, is_sampled in zip(
        step.requests, plan.starts, plan.num_tokens, plan.sampled, strict=True
    ):
        kept = request.logprobs
        if kept is None:
            continue
        is_live = request.finish_reason is None
        count = request.info.num_prompt_rows(start, num_tokens)
        if is_live:
            kept.add_prompt(found.prompt, prompt_row, start, count)
        prompt_row += count
        if is_sampled and request.sampling_params.logprobs is not None:
            if is_live:
                kept.sampled.append((found.sampled, sampled_row))
            sampled_row += 1


def add_logprobs(
    output: RequestOutput, requests: Sequence[Request], decode: Callable[[int], str] | None
) -> None:
    """Fill in what the parameters of finished requests ask for.

    Args:
        output: with its token ids.
        requests: its continuations; the first has the prompt's.
        decode: the text of one token; None leaves the texts out.
    """
    params, reader = requests[0].sampling_params, _Reader(decode)
    if params.logprobs is not None:
        for answer, request in zip(output.outputs, requests, strict=True):
            kept = [] if request.logprobs is None else request.logprobs.sampled
            answer.logprobs = reader.read(answer.token_ids, kept, params.logprobs)
            own = zip(answer.token_ids, answer.logprobs, strict=True)
            answer.cumulative_logprob = sum(entries[token].logprob for token, entries in own)
    output.prompt_logprobs = prompt_entries(requests[0], decode)


def prompt_entries(
    leader: Request, decode: Callable[[int], str] | None
) -> list[dict[int, Logprob] | None] | None:
    """Of the prompt's tokens as far as they are computed; None if the parameters ask for none."""
    num_top = leader.sampling_params.prompt_logprobs
    if num_top is None or leader.logprobs is None:
        return None
    kept = list(leader.logprobs.prompt)  # the engine's thread may append meanwhile
    # All of them, unless the request was aborted in its prompt.
    token_ids = leader.token_ids[1 : len(kept) + 1]
    return [None, *_Reader(decode).read(token_ids, kept, num_top)]


def logprob_entries(
    request: Request, begin: int, end: int, decode: Callable[[int], str] | None
) -> list[dict[int, Logprob]] | None:
    """Of the settled outputs ``begin`` to ``end`` of a request; None if it asks for none."""
    num_top = request.sampling_params.logprobs
    if num_top is None or request.logprobs is None:
        return None
    first = request.num_prompt_tokens
    token_ids = request.token_ids[first + begin : first + end]
    return _Reader(decode).read(token_ids, request.logprobs.sampled[begin:end], num_top)


def score_of(output: RequestOutput, decode: Callable[[int], str] | None) -> ScoreOutput:
    """The score of a finished request with :data:`SCORE_PARAMS`."""
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


class _Reader:
    def __init__(self, decode: Callable[[int], str] | None) -> None:
        self._decode = decode

    def read(
        self, token_ids: Sequence[int], kept: Sequence[tuple[LogprobRows, int]], num_top: int
    ) -> list[dict[int, Logprob]]:
        """Of each token its own entry, first, and those of the ``num_top`` likeliest."""
        found = []
        for token_id, (rows, index) in zip(token_ids, kept, strict=True):
            logprob, rank, top_ids, top_logprobs = rows.row(index, num_top)
            entries = {token_id: Logprob(logprob, rank, self._text(token_id))}
            for place, (top_id, top) in enumerate(zip(top_ids, top_logprobs, strict=True)):
                if top_id != token_id:
                    entries[top_id] = Logprob(top, place + 1, self._text(top_id))
            found.append(entries)
        return found

    def _text(self, token_id: int) -> str | None:
        return None if self._decode is None else self._decode(token_id)
