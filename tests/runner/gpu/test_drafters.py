"""Captured drafters on the GPU runner, whose kernels are interpreted: they draft what they draft
when they compute whole requests."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagespec import SamplingParams
from pagespec.compile.captured_drafter import CapturedDrafter
from pagespec.compile.captured_model import capture_model
from pagespec.compile.load.drafters import load_drafter, target_aux_layers
from pagespec.compile.load.load import load_model
from pagespec.compile.model.loaded import LoadedDrafter, LoadedModel
from pagespec.compile.probe.probe import probe_model
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.drafting.drafters import ModelDrafter
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from pagespec.runner.step_costs import _plan
from tests.runner import both_runners
from tests.support.captures import graph_cache
from tests.support.draft_files import eagle3_config, eagle3_tensors, save_eagle3, save_with_mtp
from tests.support.drafting import Drafting, Target
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = [
    pytest.mark.skipif("gpu" not in both_runners.RUNNERS, reason="TRITON_INTERPRET is not 1"),
    pytest.mark.usefixtures("small_chunks"),
]

FREE = StepCosts([(1, 1.0), (10_000, 1.0)])
CONFIG = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
NUM_BLOCKS, BUDGET, NUM_OUTPUTS = 40, 16, 7


def models(folder: Path, kind: str, quantization: str | None) -> tuple[LoadedModel, LoadedDrafter]:
    if kind == "mtp":
        save_with_mtp(folder, "glm4_moe")
        loaded = load_model(folder)
        return loaded, load_drafter("mtp", None, loaded, quantization=quantization)
    model = tiny_model("llama")
    config = eagle3_config(model, 96)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    save_eagle3(folder, config, eagle3_tensors(model, 96))
    loaded = load_model(model)
    loaded = replace(loaded, aux_layers=target_aux_layers("eagle3", str(folder), loaded))
    return loaded, load_drafter("eagle3", str(folder), loaded, quantization=quantization)


def make_runner(
    loaded: LoadedModel, drafter: CapturedDrafter | None, *, has_draft_fields: bool = False
) -> Any:
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    settings = {} if drafter is None else {"draft_model": drafter}
    settings |= {"has_draft_fields": True} if has_draft_fields else {}
    return both_runners.make_runner(
        captured,
        "gpu",
        NUM_BLOCKS,
        max_num_seqs=BUDGET,
        max_num_blocks=16,
        max_num_tokens=BUDGET,
        overlap=False,
        **settings,
    )


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        ("mtp", None),
        pytest.param("eagle3", "fp8", marks=pytest.mark.nightly),
        pytest.param("mtp", "fp8", marks=pytest.mark.nightly),
        pytest.param("eagle3", None, marks=pytest.mark.nightly),
    ],
)
def test_drafts_are_those_of_whole_requests(
    tmp_path: Path, kind: str, quantization: str | None
) -> None:
    loaded, drafter = models(tmp_path, kind, quantization)
    target, drafting = Target(loaded), Drafting(drafter)
    outputs = []
    num_compared = 0
    for model in (None, drafting.captured):
        runner = make_runner(loaded, model)
        scheduler = Scheduler(
            BlockManager(NUM_BLOCKS, both_runners.BLOCK_SIZE),
            max_num_seqs=3,
            max_num_batched_tokens=BUDGET,
            drafter=None if model is None else ModelDrafter(CONFIG, FREE),
        )
        engine = Engine(scheduler, runner, check_invariants=True)
        rng = random.Random(1)
        requests = {}
        for name, length in (("a", 3), ("b", 19)):
            ids = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
            params = SamplingParams(temperature=0.0)
            requests[name] = Request(name, ids, params, max_num_tokens=length + NUM_OUTPUTS)
            engine.add(requests[name])
        found: dict[str, Any] = {}
        collect = runner.collect

        def watched(handle: Any, collect: Any = collect, found: Any = found) -> Any:
            result = collect(handle)
            found.update(result.drafts)
            return result

        runner.collect = watched
        while engine.has_work:
            engine.step()
            for name, drafts in found.items():
                ids = list(requests[name].token_ids)
                if requests[name].finish_reason is None:
                    states = target(ids[:-1])
                    hidden = states.hidden if states.aux is None else states.aux
                    assert hidden is not None
                    assert drafts == drafting.greedy(ids[1:], hidden, 0, len(drafts))
                    num_compared += len(drafts)
            found.clear()
        outputs.append([request.output_token_ids for request in requests.values()])
    assert outputs[0] == outputs[1]
    assert num_compared > 10


def test_a_rank_without_the_drafter_computes_the_steps_of_the_rank_with_it(tmp_path: Path) -> None:
    """Two ranks that each have the whole model: the second one gets only staged integers."""
    loaded, drafter = models(tmp_path, "eagle3", None)
    runner = make_runner(loaded, Drafting(drafter).captured)
    other = make_runner(loaded, None, has_draft_fields=True)
    assert (runner.has_drafter, other.has_drafter) == (True, False)
    assert other.max_staged_bytes == runner.max_staged_bytes
    num_drafts = 0

    def dispatch(plan: StepPlan) -> Any:
        nonlocal num_drafts
        arrays = [array.copy() for array in runner.stage(plan)]
        handle, copied = runner.launch(arrays, plan), other.launch(arrays)
        assert torch.equal(handle.token_ids, copied.token_ids)
        assert torch.equal(runner.buffers.sampled[: len(plan)], other.buffers.sampled[: len(plan)])
        assert copied.drafts is None
        num_drafts += sum(plan.wanted_drafts.values())
        return handle

    plan = _plan(6, 3, runner, num_wanted=2)
    arrays = [array.copy() for array in runner.stage(plan)]
    assert other.replay(arrays) > 0
    assert runner.replay(arrays, plan) > 0
    runner.reset()
    runner.dispatch = dispatch
    scheduler = Scheduler(
        BlockManager(NUM_BLOCKS, both_runners.BLOCK_SIZE),
        max_num_seqs=3,
        max_num_batched_tokens=BUDGET,
        drafter=ModelDrafter(CONFIG, FREE),
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    for name, temperature in (("a", 0.0), ("b", 0.8)):
        params = SamplingParams(temperature=temperature, seed=1)
        engine.add(Request(name, [5, 6, 7], params, max_num_tokens=3 + NUM_OUTPUTS))
    while engine.has_work:
        engine.step()
    assert num_drafts > 6
