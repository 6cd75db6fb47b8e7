"""Log-probabilities in output rows: JSON that every parser accepts."""

from __future__ import annotations

import json
import math

from pagespec import CompletionOutput, Logprob
from pagespec.cli.answer_lines import _fields, _finite
from pagespec.engine.logprob_output import plain_logprobs


def test_columns_exist_only_with_logprobs() -> None:
    answer = CompletionOutput(0, "a", [7], finish_reason="stop")
    assert not _fields(answer).keys() & {"cumulative_logprob", "logprobs"}
    answer.logprobs = [{7: Logprob(-math.inf, 2, "a"), 3: Logprob(0.0, 1, None)}]
    answer.cumulative_logprob = -math.inf
    prompt = plain_logprobs([None, {2: Logprob(-0.5, 1, "b")}], _finite)
    found = json.loads(json.dumps(_fields(answer) | {"prompt": prompt}, allow_nan=False))
    assert found["cumulative_logprob"] is None
    assert found["logprobs"] == [
        [
            {"token_id": 7, "logprob": None, "rank": 2, "decoded_token": "a"},
            {"token_id": 3, "logprob": 0.0, "rank": 1, "decoded_token": None},
        ]
    ]
    assert found["prompt"] == [
        None,
        [{"token_id": 2, "logprob": -0.5, "rank": 1, "decoded_token": "b"}],
    ]
