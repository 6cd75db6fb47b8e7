"""The GPU runner's packing, staging and feeding, on a CPU.

Its Triton kernels run under the interpreter, events pass at once, and each replay of a captured
decode step computes it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagespec.compile.captured_model import CapturedModel, capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.compile.step_inputs import INPUT_NAMES
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.sampling_params import SamplingParams
from pagespec.engine.scheduler import Scheduler
from pagespec.kernels.sampling.sampler import SamplingInputs, sample
from pagespec.runner.layout import StepShape
from tests.support.captures import graph_cache
from tests.support.driving import hf_greedy
from tests.support.models import VOCAB_SIZE, tiny_model

pytest.importorskip("triton")
gpu_runner = pytest.importorskip("pagespec.runner.gpu.runner")
pytestmark = pytest.mark.usefixtures("passed_events")

BLOCK_SIZE, MAX_NUM_SEQS = 4, 5


def make_runner(captured: CapturedModel, num_blocks: int, **settings: Any) -> Any:
    return gpu_runner.GpuRunner(
        captured,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_tokens=24,
        max_num_rows=MAX_NUM_SEQS,
        max_num_blocks=20,
        **settings,
    )


def make_engine(runner: Any, blocks: BlockManager) -> Engine:
    scheduler = Scheduler(
        blocks,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=24,
        pipeline_depth=runner.pipeline_depth,
    )
    return Engine(scheduler, runner, check_invariants=True)


class Recomputed:
    """Replaces captured graphs.

    Args:
        sizes: the tokens and rows of mixed steps.
    """

    def __init__(
        self, run: Callable[[StepShape], torch.Tensor], sizes: tuple[int, int] = (24, MAX_NUM_SEQS)
    ) -> None:
        self._run, self._sizes = run, sizes
        runner: Any = getattr(run, "__self__", None)  # both forms occur where there are two
        self._has_long = runner and runner.drafting is None and runner._forward_long is not None
        self.replayed: list[StepShape] = []

    def shape_of(self, num_tokens: int, num_rows: int, is_decode: bool) -> StepShape | None:
        if is_decode:
            return next((StepShape.decode(b) for b in (2, 4) if num_rows <= b), None)
        if num_tokens <= num_rows and num_rows % 2:
            return StepShape.verify(num_rows + 1)
        fits = num_rows > 1  # both ways occur: replayed and not
        shape = StepShape.mixed(*self._sizes) if fits else None
        return shape._replace(form="long") if shape and self._has_long and num_tokens % 2 else shape

    def replay(self, shape: StepShape) -> torch.Tensor:
        self.replayed.append(shape)
        return self._run(shape)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("num_blocks", "caching"),
    [(18, True), pytest.param(200, False, marks=pytest.mark.nightly)],
)
def test_tokens_are_those_of_hugging_face(
    overlap: bool, num_blocks: int, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    loaded = load_model(model)
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    runner = make_runner(captured, num_blocks, overlap=overlap)
    for caches in runner.kv_caches:
        for cache in caches:
            cache.fill_(float("nan"))
    runner._graphs = graphs = Recomputed(runner.run_staged)
    engine = make_engine(
        runner, BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=caching)
    )
    rng = random.Random(4)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(12)]
    requests = []
    for i, length in enumerate((1, 30, 7, 18, 2, 25, 11)):
        prompt = (shared if i % 2 else []) + [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]
        # The last one samples, with a truncation that leaves one token.
        params = {"temperature": 1.0, "top_k": 1} if i == 6 else {"temperature": 0.0}
        num_output_tokens = 8 + 3 * (i % 3)
        request = Request(
            f"r{i}",
            prompt,
            SamplingParams(max_tokens=num_output_tokens, **params),
            max_num_tokens=len(prompt) + num_output_tokens,
            seed=i,
        )
        siblings = [request.sibling(f"r{i}.{j}", j, None) for j in range(2 if i in (0, 3) else 0)]
        requests += [request, *siblings]
        engine.add(request, siblings=siblings)
    copies, copy = [], runner._copier.copy
    runner._copier.copy = lambda told: (copies.extend(told), copy(told))
    while engine.has_work:
        engine.step()
    assert copies
    expected = [hf_greedy(model, r.token_ids[: r.num_prompt_tokens], 14) for r in requests]
    for request, tokens in zip(requests, expected, strict=True):
        produced = request.token_ids[request.num_prompt_tokens :]
        assert produced == tokens[: len(produced)]
        assert len(produced) == request.max_num_tokens - request.num_prompt_tokens
    assert {shape.is_decode for shape in graphs.replayed} == {True, False}
    if num_blocks == 18:
        assert any(r.num_preemptions for r in requests)
        assert any(r.num_cached_tokens for r in requests)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_every_row_gets_the_token_the_torch_sampler_draws(overlap: bool) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    loaded = load_model(model)
    expected: dict[str, list[int]] = {}

    def see(plan: StepPlan, logits: torch.Tensor) -> None:
        rows = [(request, start + n) for request, start, n, is_sampled in plan.rows() if is_sampled]
        if not rows:
            return
        params = [request.sampling_params for request, _ in rows]
        inputs = SamplingInputs.from_lists(
            temperature=[p.temperature for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            seeds=[request.seed for request, _ in rows],
            positions=[position for _, position in rows],
        )
        for (request, _), token in zip(rows, sample(logits, inputs).tolist(), strict=True):
            expected.setdefault(request.request_id, []).append(token)

    runner = make_runner(
        capture_model(loaded, probe_model(loaded), graph_cache=graph_cache()),
        60,
        overlap=overlap,
        on_logits=see,
    )
    runner._graphs = graphs = Recomputed(runner.run_staged)
    engine = make_engine(runner, BlockManager(60, BLOCK_SIZE))
    rng = random.Random(7)
    requests = []
    # Greedy and plain rows stand before and between those that truncate, so that places count.
    kinds: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"top_p": 0.7},
        {"temperature": 0.9},
        {"temperature": 3.0, "top_k": 5},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 4.0, "min_p": 0.3},
        {"temperature": 0.0, "top_k": 3},
    ]
    for i, kind in enumerate(kinds):
        prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(3 + 5 * (i % 3))]
        params = SamplingParams(max_tokens=5 + i % 3, **kind)  # type: ignore[arg-type]
        limit = len(prompt) + 5 + i % 3
        requests.append(
            Request(f"r{i}", prompt, params, max_num_tokens=limit, seed=(-1) ** i * (i << 40))
        )
        engine.add(requests[-1])
    while engine.has_work:
        engine.step()
    produced = {r.request_id: r.token_ids[r.num_prompt_tokens :] for r in requests}
    # A step that was planned ahead may go beyond the end of a request; what it draws is dropped.
    for name, tokens in produced.items():
        assert tokens == expected[name][: len(tokens)]
    assert {shape.is_decode for shape in graphs.replayed} == {True, False}


def test_an_empty_step_finds_nothing_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are being built are not launched, including the one that unpacks the inputs."""
    loaded = load_model(tiny_model("llama", num_hidden_layers=1))
    runner = make_runner(capture_model(loaded, probe_model(loaded), graph_cache=graph_cache()), 2)
    seen = []

    def run(shape: StepShape) -> None:
        b = runner.buffers
        inputs = b.inputs(shape)
        for tensor in (getattr(inputs, name) for name in INPUT_NAMES):
            if tensor.data_ptr() != b.derived["logits_to_keep"].data_ptr():
                assert not tensor.any()
                tensor.fill_(9)  # as of a larger step
        seen.append(shape)

    runner.run_staged = run
    shapes = [StepShape.mixed(8, 2), StepShape.decode(4), StepShape.mixed(8, 2)]
    for shape in shapes:
        runner.run_blank(shape)
    assert seen == shapes
