"""Rows that edit their logits, through both runners; the GPU runner's kernels are interpreted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pagespec import SamplingParams
from pagespec.compile.captured_model import CapturedModel, capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.engine.plan import StepResult
from tests.runner import both_runners
from tests.runner.both_runners import BLOCK_SIZE, RUNNERS
from tests.runner.edited_requests import (
    Asked,
    LogitsByPosition,
    check_tokens,
    mixed_cases,
    serve,
)
from tests.support.captures import graph_cache
from tests.support.models import tiny_model

pytestmark = pytest.mark.usefixtures("small_chunks")


@cache
def captured() -> CapturedModel:
    loaded = load_model(tiny_model("llama", num_hidden_layers=1))
    return capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())


def make_runner(kind: str, num_blocks: int, overlap: bool, on_logits: Any) -> Any:
    return both_runners.make_runner(
        captured(), kind, num_blocks, max_num_blocks=20, overlap=overlap, on_logits=on_logits
    )


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize(
    ("num_blocks", "seed"), [(16, 0), pytest.param(200, 1, marks=pytest.mark.nightly)]
)
def test_every_token_is_one_of_the_edited_row(
    kind: str, overlap: bool, num_blocks: int, seed: int
) -> None:
    asked = mixed_cases(seed, num_tokens=5 if kind == "gpu" else 9)
    requests = [case.request(str(i), seed=i) for i, case in enumerate(asked)]
    seen = LogitsByPosition()
    runner = make_runner(kind, num_blocks, overlap, seen)
    serve(runner, requests, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    assert check_tokens(asked, requests, seen) > 10
    assert any(request.num_cached_tokens for request in requests)
    if num_blocks == 16:
        assert any(request.num_preemptions for request in requests)
    stopped = requests[8].output_token_ids
    assert len(stopped) == 5, "a stop token is likely, and banned for four tokens"


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_token_does_not_depend_on_the_schedule(kind: str) -> None:
    """Compares requests alone, without overlap or cache, with requests together, with overlap,
    cache and preemption."""
    asked = mixed_cases(2, num_tokens=5)
    asked = asked[::2] if kind == "gpu" else asked
    alone = []
    for i, case in enumerate(asked):
        request = case.request(str(i), seed=i)
        runner = make_runner(kind, 200, False, None)
        alone += serve(runner, [request], num_blocks=200, block_size=BLOCK_SIZE, caching=False)
    requests = [case.request(str(i), seed=i) for i, case in enumerate(asked)]
    num_blocks = 15
    runner = make_runner(kind, num_blocks, True, None)
    assert serve(runner, requests, num_blocks=num_blocks, block_size=BLOCK_SIZE) == alone
    assert any(request.num_preemptions for request in requests)
    assert any(request.num_cached_tokens for request in requests)


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_python_functions_edit_rows_too(kind: str, overlap: bool) -> None:
    outputs: list[list[int]] = []

    def count_up(output: list[int], row: torch.Tensor) -> torch.Tensor:
        outputs.append(output)
        return row.index_fill(0, torch.tensor([100 + len(output)]), 1e4)

    def double(output: list[int], row: torch.Tensor) -> torch.Tensor:
        assert row.dtype == torch.float32
        return row * 2

    plain = Asked([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    params = SamplingParams(
        temperature=0.8, max_tokens=5, ignore_eos=True, logits_processors=[count_up, double]
    )
    requests = [plain.request("a"), Asked([9, 8], params).request("b"), plain.request("c")]
    runner = make_runner(kind, 50, overlap, None)
    first, counted, last = serve(runner, requests, num_blocks=50, block_size=BLOCK_SIZE)
    assert counted == [100, 101, 102, 103, 104]
    assert outputs[:5] == [counted[:i] for i in range(5)]
    assert first == last


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_function_that_raises_is_reported_for_its_request_alone(kind: str, overlap: bool) -> None:
    def third(output: list[int], row: torch.Tensor) -> torch.Tensor:
        if len(output) >= 2:
            raise KeyError("third")
        return row

    params = SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True, logits_processors=[third]
    )
    plain = Asked([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    requests = [plain.request("a"), Asked([9, 8], params).request("b"), plain.request("c")]
    runner = make_runner(kind, 50, overlap, None)
    reported: list[dict[str, str]] = []
    collect = runner.collect

    def reporting(handle: Any) -> StepResult:
        result: StepResult = collect(handle)
        reported.append(dict(result.failures))
        return result

    runner.collect = reporting
    first, ended, last = serve(runner, requests, num_blocks=50, block_size=BLOCK_SIZE)
    assert first == last
    assert len(ended) == 2
    assert reported[:3] == [{}, {}, {"b": "logits_processors: KeyError: 'third'"}]
    assert reported[-1] == {}


@pytest.mark.parametrize("kind", RUNNERS)
def test_steps_without_edits_launch_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(kind, 50, True, None)
    edits = runner._edits if kind == "cpu" else runner._sampler.edits
    for name in ("sample", "_sample", "_keep_history", "_keep_inputs", "_send"):
        monkeypatch.setattr(type(edits), name, None, raising=False)
    plain = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    requests = [Asked([5, 6, i], plain).request(str(i)) for i in range(3)]
    serve(runner, requests, num_blocks=50, block_size=BLOCK_SIZE)
    assert edits._packer._lists == {}
