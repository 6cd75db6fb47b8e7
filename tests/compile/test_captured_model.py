"""Generation without a scheduler against Hugging Face: tokens and logits of every tiny
architecture.
"""

from __future__ import annotations

import dataclasses
import random
import shutil

import pytest
import torch
from torch import Tensor

from pagespec.compile.captured_model import CaptureOptions, capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.engine.plan import StepPlan
from pagespec.runner.cpu.runner import ModelRunner
from tests.support.captures import graph_cache
from tests.support.driving import drive, hf_greedy, hf_logits, make_requests
from tests.support.models import ARCHITECTURES, VOCAB_SIZE, tiny_model

NUM_TOKENS = 14
PROMPT_LENGTHS = (45, 1, 30, 7)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in PROMPT_LENGTHS]


class LogitRecorder:
    """Records the logits of each sampled row by (request, position)."""

    def __init__(self) -> None:
        self.logits: dict[tuple[str, int], Tensor] = {}

    def __call__(self, plan: StepPlan, logits: Tensor) -> None:
        sampled = [row for row in plan.rows() if row[3]]
        for (request, start, n, _), row_logits in zip(sampled, logits, strict=True):
            self.logits[request.request_id, start + n - 1] = row_logits.clone()


def worst_error(recorder: LogitRecorder, model: torch.nn.Module, requests: list) -> float:
    """Largest difference from Hugging Face's logits, relative to the largest logit."""
    worst = 0.0
    for request in requests:
        expected = hf_logits(model, request.token_ids)
        for (request_id, position), logits in recorder.logits.items():
            if request_id == request.request_id:
                error = (logits - expected[position]).abs().max() / expected[position].abs().max()
                worst = max(worst, float(error))
    return worst


def test_experts_may_get_no_token() -> None:
    """jetmoe splits rows by expert and multiplies each part, some of them empty."""
    model = tiny_model("jetmoe")
    given: list[list[int]] = []
    for name, part in model.named_modules():
        if name.endswith("router"):
            part.register_forward_hook(lambda _module, _inputs, output: given.append(output[3]))
    expected = [hf_greedy(model, prompt, NUM_TOKENS) for prompt in prompts()]
    assert any(0 in sizes for sizes in given), "every expert got tokens in every step"
    loaded = load_model(tiny_model("jetmoe"))
    captured = capture_model(loaded, probe_model(loaded))
    for block_size, chunk, num_blocks in ((16, 10, 40), (1, 1, 300)):
        recorder = LogitRecorder()
        runner = ModelRunner(
            captured, block_size=block_size, num_blocks=num_blocks, on_logits=recorder
        )
        requests = make_requests(prompts(), NUM_TOKENS)
        drive(runner, requests, block_size=block_size, num_blocks=num_blocks, chunk=chunk)
        assert [r.output_token_ids for r in requests] == expected
        assert worst_error(recorder, model, requests) < 1e-4


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tokens_and_logits_equal_hugging_face(arch: str) -> None:
    model = tiny_model(arch)
    expected = [hf_greedy(model, prompt, NUM_TOKENS) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) > 1
    loaded = load_model(model)
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    for block_size, chunk, num_blocks in ((16, 10, 40), (1, 64, 300), (256, 3, 4)):
        recorder = LogitRecorder()
        runner = ModelRunner(
            captured, block_size=block_size, num_blocks=num_blocks, on_logits=recorder
        )
        for caches in runner.kv_caches:
            for cache in caches:
                cache.fill_(float("nan"))
        requests = make_requests(prompts(), NUM_TOKENS)
        drive(runner, requests, block_size=block_size, num_blocks=num_blocks, chunk=chunk)
        assert [r.output_token_ids for r in requests] == expected
        assert worst_error(recorder, model, requests) < 1e-4


@pytest.mark.parametrize("arch", ["mistral", "gemma2", "gpt_oss"])
def test_a_wrong_window_is_noticed(arch: str) -> None:
    loaded = load_model(tiny_model(arch))
    specs = [
        dataclasses.replace(spec, window=spec.window and spec.window - 1)
        for spec in probe_model(loaded)
    ]
    recorder = LogitRecorder()
    runner = ModelRunner(
        capture_model(loaded, specs), block_size=16, num_blocks=40, on_logits=recorder
    )
    requests = make_requests(prompts(), NUM_TOKENS)
    drive(runner, requests, block_size=16, num_blocks=40, chunk=10)
    assert worst_error(recorder, loaded.module, requests) > 1e-3


@pytest.mark.parametrize(
    ("arch", "field", "value"), [("gemma2", "softcap", 0.0), ("gpt_oss", "has_sinks", False)]
)
def test_a_missing_softcap_or_sink_is_noticed(arch: str, field: str, value: object) -> None:
    loaded = load_model(tiny_model(arch))
    specs = [dataclasses.replace(spec, **{field: value}) for spec in probe_model(loaded)]
    recorder = LogitRecorder()
    runner = ModelRunner(
        capture_model(loaded, specs), block_size=16, num_blocks=40, on_logits=recorder
    )
    requests = make_requests(prompts(), NUM_TOKENS)
    drive(runner, requests, block_size=16, num_blocks=40, chunk=10)
    assert worst_error(recorder, loaded.module, requests) > 1e-3


@pytest.mark.parametrize("arch", ["llama", "gpt_oss"])
def test_eager_mode(arch: str) -> None:
    model = tiny_model(arch)
    expected = [hf_greedy(model, prompt, 5) for prompt in prompts()]
    loaded = load_model(model)
    captured = capture_model(loaded, probe_model(loaded), CaptureOptions(compile="eager"))
    runner = ModelRunner(captured, block_size=16, num_blocks=40)
    requests = make_requests(prompts(), 5)
    drive(runner, requests, block_size=16, num_blocks=40, chunk=10)
    assert [r.output_token_ids for r in requests] == expected
    assert captured.num_captures == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_mode() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    expected = [hf_greedy(model, prompt, 5) for prompt in prompts()]
    loaded = load_model(model)
    captured = capture_model(loaded, probe_model(loaded), CaptureOptions(compile="inductor"))
    for block_size, num_blocks in ((16, 40), (8, 90)):
        runner = ModelRunner(captured, block_size=block_size, num_blocks=num_blocks)
        requests = make_requests(prompts(), 5)
        drive(runner, requests, block_size=block_size, num_blocks=num_blocks, chunk=10)
        assert [r.output_token_ids for r in requests] == expected
    assert captured.num_captures == 1
