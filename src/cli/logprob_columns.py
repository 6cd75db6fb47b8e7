"""Log-probabilities as columns of an output row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.outputs import CompletionOutput, Logprob, RequestOutput


def answer_columns(answer: CompletionOutput) -> dict[str, Any]:
    """What the parameters of a request asked for of its tokens; nothing if they did not."""
    if answer.logprobs is None:
        return {}
    total = _number(answer.cumulative_logprob)
    return {"cumulative_logprob": total, "logprobs": _places(answer.logprobs)}


def prompt_columns(result: RequestOutput) -> dict[str, Any]:
    """The same of its prompt."""
    places = result.prompt_logprobs
    return {} if places is None else {"prompt_logprobs": _places(places)}


def _places(places: Sequence[Mapping[int, Logprob] | None]) -> list[Any]:
    """A list for each token: of itself, then of the likeliest others. JSON has no integer keys."""
    return [
        entries
        and [
            {
                "token_id": token_id,
                "logprob": _number(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in entries.items()
        ]
        for entries in places
    ]


def _number(value: float | None) -> float | None:
    """JSON has no infinity: a token that cannot be sampled has null."""
    return value if value is not None and math.isfinite(value) else None
