"""Columns of log-probabilities: JSON that every reader takes."""

from __future__ import annotations

import json
import math

from pagespec import CompletionOutput, Logprob, RequestOutput
from pagespec.cli.logprob_columns import logprob_columns


def test_columns_are_there_when_they_were_asked_for() -> None:
    answer = CompletionOutput(0, "a", [7], "stop")
    result = RequestOutput("r", "p", [1, 2], [answer])
    assert logprob_columns(result) == {}
    answer.logprobs = [{7: Logprob(-math.inf, 2, "a"), 3: Logprob(0.0, 1, None)}]
    answer.cumulative_logprob = -math.inf
    result.prompt_logprobs = [None, {2: Logprob(-0.5, 1, "b")}]
    found = logprob_columns(result)
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "cumulative_logprob": None,
        "logprobs": [
            [
                {"token_id": 7, "logprob": None, "rank": 2, "decoded_token": "a"},
                {"token_id": 3, "logprob": 0.0, "rank": 1, "decoded_token": None},
            ]
        ],
        "prompt_logprobs": [
            None,
            [{"token_id": 2, "logprob": -0.5, "rank": 1, "decoded_token": "b"}],
        ],
    }
