"""Log-probabilities by the GPU runner, on a CPU: interpreted kernels, events that pass at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pagespec.compile.captured_model import capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.request import Request
from pagespec.engine.sampling_params import SamplingParams
from tests.runner.gpu.test_runner import Recomputed, make_engine, make_runner
from tests.support.captures import graph_cache
from tests.support.driving import hf_logits
from tests.support.models import VOCAB_SIZE, tiny_model

pytest.importorskip("triton")
gpu_runner = pytest.importorskip("pagespec.runner.gpu.runner")
pytestmark = pytest.mark.usefixtures("passed_events")

BLOCK_SIZE, MAX_NUM_SEQS, NUM_TOP = 4, 5, 3
GIVEN_IDS = [9, 2, 70]


def _words(
    request: Request, name: str, num_top: int = NUM_TOP
) -> list[tuple[float, int, list[int], list[float]]]:
    return [rows.row(i, num_top) for rows, i in getattr(request.logprobs, name)]


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_sampled_and_prompt_tokens_over_graphs_chunks_and_preemption(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagespec.runner.gpu.logprobs.CHUNK_ROWS", 7)
    monkeypatch.setattr("pagespec.runner.gpu.logprobs._MAX_SAMPLED_ROWS", 3)
    model = tiny_model("llama", num_hidden_layers=1)
    loaded = load_model(model)
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    runner = make_runner(captured, 18, overlap=overlap)
    runner._graphs = Recomputed(runner.run_staged)
    engine = make_engine(runner, BlockManager(18, BLOCK_SIZE, enable_prefix_caching=False))
    rng = random.Random(4)

    def request(name: str, prompt: list[int], num_tokens: int, **asked: Any) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, **asked)
        limit = len(prompt) + num_tokens
        made = Request(name, prompt, params, max_num_tokens=limit, seed=1)
        engine.add(made)
        return made

    requests = []
    for i, length in enumerate((1, 30, 7, 18, 2, 25, 11)):
        prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]
        both = {"logprobs": 3, "prompt_logprobs": 3}
        wide = {"logprobs": VOCAB_SIZE, "prompt_logprobs": 25}  # more than MAX_TOP
        given = {"logprobs": 0, "logprob_token_ids": GIVEN_IDS}
        asked: dict[str, Any] = [{"logprobs": NUM_TOP}, both, {}, wide, given][i % 5]
        requests.append(request(f"r{i}", prompt, 8 + i % 3, **asked))
    while engine.has_work:
        engine.step()
    assert any(r.num_preemptions for r in requests)
    scored = [request(f"s{i}", r.token_ids, 1, prompt_logprobs=3) for i, r in enumerate(requests)]
    while engine.has_work:
        engine.step()
    for r, again in zip(requests, scored, strict=True):
        expected = hf_logits(model, r.token_ids).log_softmax(-1)
        whole = _words(again, "prompt")
        assert len(whole) == len(r.token_ids) - 1
        for position, (logprob, rank, top, top_logprobs) in enumerate(whole):
            row = expected[position]
            assert abs(logprob - float(row[r.token_ids[position + 1]])) < 1e-5
            assert torch.allclose(torch.tensor(top_logprobs), row.topk(3).values, atol=1e-5)
            assert top == row.topk(3).indices.tolist()
            assert (rank == 1) == (top[0] == r.token_ids[position + 1])
        params, first = r.sampling_params, r.num_prompt_tokens - 1
        if params.logprobs:
            assert _words(r, "sampled") == whole[first:]
        if params.prompt_logprobs is not None:
            assert _words(r, "prompt") == whole[:first]
        assert (r.logprobs is None) == (params.logprobs is None)
        if params.logprobs == VOCAB_SIZE:
            _check_wide(r, expected)
        if params.logprob_token_ids:
            assert [row[:2] for row in _words(r, "sampled", 0)] == [
                row[:2] for row in whole[first:]
            ]
            _check_given(r, expected[first:])


def _check_given(request: Request, expected: torch.Tensor) -> None:
    """The rows behind each sampled token's own."""
    assert request.logprobs is not None
    for (rows, place), row in zip(request.logprobs.sampled, expected, strict=False):
        for number, token_id in enumerate(GIVEN_IDS, 1):
            logprob, rank, *_ = rows.row(place + number, 0)
            assert abs(logprob - float(row[token_id])) < 1e-5
            assert rank == 1 + int((row > row[token_id]).sum())


def _check_wide(request: Request, expected: torch.Tensor) -> None:
    """All tokens in order, with the floats that their own rows have."""
    first = request.num_prompt_tokens - 1
    for name, num_top, begin in (("sampled", VOCAB_SIZE, first), ("prompt", 25, 0)):
        rows = _words(request, name, num_top)
        assert rows
        for position, (logprob, rank, top, top_logprobs) in enumerate(rows, begin):
            assert len(top) == num_top
            own = request.token_ids[position + 1]
            assert own not in top or (top[rank - 1], top_logprobs[rank - 1]) == (own, logprob)
            found = torch.tensor(top_logprobs)
            assert torch.allclose(found, expected[position].topk(num_top).values, atol=1e-5)
