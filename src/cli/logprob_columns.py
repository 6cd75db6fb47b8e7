"""Log-probabilities as columns of an output row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.outputs import Logprob, RequestOutput


def logprob_columns(result: RequestOutput) -> dict[str, Any]:
    """What the parameters of a request asked for; nothing if they did not."""
    columns: dict[str, Any] = {}
    answer = result.outputs[0]
    if answer.logprobs is not None:
        columns["cumulative_logprob"] = _number(answer.cumulative_logprob)
        columns["logprobs"] = _places(answer.logprobs)
    if result.prompt_logprobs is not None:
        columns["prompt_logprobs"] = _places(result.prompt_logprobs)
    return columns


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
