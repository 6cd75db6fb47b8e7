"""Processed log-probabilities, after edits, temperature and truncation, by both runners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagespec import SamplingParams
from tests.runner.both_runners import BLOCK_SIZE, MAX_NUM_SEQS, RUNNERS
from tests.runner.edited_requests import END_TOKEN_IDS, Asked, LogitsByPosition, serve
from tests.runner.gpu.test_runner import Recomputed
from tests.runner.test_edits import captured
from tests.support.plain_sampling import edited_logits, probabilities

NUM_BLOCKS, NUM_TOP = 60, 4
CASES: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.5},
    {"temperature": 0.0},
    {"temperature": 1.5, "allowed_token_ids": [5, 9, 200]},
    {"temperature": 2.0, "top_k": 7},
    {"temperature": 0.0, "logit_bias": {17: 3.0}, "presence_penalty": 1.0},
]


@pytest.fixture(autouse=True)
def few_rows(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" in RUNNERS:
        monkeypatch.setattr("pagespec.runner.gpu.logprobs._PROCESSED_ROWS", 2)


def make_runner(kind: str, seen: LogitsByPosition) -> Any:
    from pagespec.runner.cpu.runner import ModelRunner

    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "max_num_tokens": 24,
        "max_num_rows": MAX_NUM_SEQS,
        "max_num_blocks": 20,
        "overlap": True,
        "processed_logprobs": True,
        "on_logits": seen,
    }
    if kind == "cpu":
        return ModelRunner(captured(), **settings)
    gpu_runner = pytest.importorskip("pagespec.runner.gpu.runner")
    runner = gpu_runner.GpuRunner(captured(), **settings)
    runner._graphs = Recomputed(runner.run_staged)
    return runner


@pytest.mark.parametrize("kind", RUNNERS)
def test_they_are_of_what_is_sampled_from(kind: str) -> None:
    params = [
        SamplingParams(max_tokens=4, ignore_eos=True, logprobs=NUM_TOP, **case) for case in CASES
    ]
    asked = [Asked([3 + i, 40 + i, 7], case) for i, case in enumerate(params)]
    requests = [case.request(str(i), seed=i) for i, case in enumerate(asked)]
    seen = LogitsByPosition()
    serve(make_runner(kind, seen), requests, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    for case, request in zip(asked, requests, strict=True):
        output = request.output_token_ids
        assert request.logprobs is not None
        for i, (rows, index) in enumerate(request.logprobs.sampled):
            logits = seen.rows[request.request_id, len(case.prompt) + i].double().numpy()
            edited = edited_logits(
                logits, case.prompt, output[:i], case.params, end_token_ids=END_TOKEN_IDS
            )
            if case.params.temperature:
                expected = probabilities(edited, case.params)
            else:
                weights = np.exp(edited - edited.max())
                expected = weights / weights.sum()
            logprob, rank, top_ids, top_logprobs = rows.row(index, NUM_TOP)
            assert logprob == pytest.approx(np.log(expected[output[i]]), abs=1e-4)
            assert (rank == 1) == (expected[output[i]] == expected.max())
            order = sorted(range(len(expected)), key=lambda t: (-expected[t], t))[:NUM_TOP]
            with np.errstate(divide="ignore"):
                wanted = np.log(expected[order])
            np.testing.assert_allclose(top_logprobs, wanted, atol=1e-4)
            finite = int((expected > 0).sum())
            assert top_ids[: min(finite, NUM_TOP)] == order[: min(finite, NUM_TOP)]
