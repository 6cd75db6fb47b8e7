"""The GPU runner with state slots, on a CPU as in :mod:`.test_runner`.

State tables are staged, stored with the block tables and unpacked for the step.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pagespec import InvalidInputError, SamplingParams
from pagespec.compile.captured_model import CapturedModel, capture_model
from pagespec.compile.kv_cache import bytes_per_slot
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.config import EngineConfig
from pagespec.engine.request import Request
from pagespec.runner.kv_budget import state_slots_in
from tests.support.captures import graph_cache
from tests.support.driving import hf_greedy
from tests.support.models import VOCAB_SIZE, tiny_model

from .test_runner import BLOCK_SIZE, MAX_NUM_SEQS, Recomputed, make_engine, make_runner

pytest.importorskip("triton")
gpu_runner = pytest.importorskip("pagespec.runner.gpu.runner")
pytestmark = pytest.mark.usefixtures("passed_events")

INTERVAL = 8


def captured_model(arch: str, **overrides: Any) -> tuple[Any, CapturedModel]:
    model = tiny_model(arch, **overrides)
    loaded = load_model(model, max_model_len=512)
    return model, capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("arch", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.nightly)])
def test_tokens_are_those_of_hugging_face(arch: str, overlap: bool) -> None:
    """With preemption, prefix hits and chunks, and with too few state slots."""
    model, captured = captured_model(arch)
    num_blocks, num_slots = 18, MAX_NUM_SEQS + 3
    runner = make_runner(
        captured, num_blocks, num_state_slots=num_slots, state_interval=INTERVAL, overlap=overlap
    )
    for tensor in runner.states.tensors:
        tensor.fill_(float("nan"))
    runner._graphs = graphs = Recomputed(runner.run_staged)
    blocks = BlockManager(
        num_blocks, BLOCK_SIZE, num_state_slots=num_slots, state_interval=INTERVAL
    )
    engine = make_engine(runner, blocks)
    rng = random.Random(4)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(20)]
    requests = []
    for round_ in range(2):
        for i, length in enumerate((1, 30, 7, 18, 2, 25, 11)):
            own = [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]
            prompt = (shared if i % 2 else []) + own
            request = Request(
                f"r{round_}.{i}",
                prompt,
                SamplingParams(max_tokens=8 + 3 * (i % 3), temperature=0.0),
                max_num_tokens=len(prompt) + 8 + 3 * (i % 3),
                seed=i,
            )
            requests.append(request)
            engine.add(request)
    while engine.has_work:
        engine.step()
    for request in requests:
        produced = request.token_ids[request.num_prompt_tokens :]
        expected = hf_greedy(model, request.token_ids[: request.num_prompt_tokens], len(produced))
        assert produced == expected
    assert {shape.is_decode for shape in graphs.replayed} == {True, False}
    assert any(r.num_preemptions for r in requests)
    assert any(r.num_cached_tokens for r in requests)


def test_a_model_without_attention_needs_no_block_copies() -> None:
    _, captured = captured_model("mamba2", num_hidden_layers=1)
    runner = gpu_runner.GpuRunner(
        captured,
        block_size=BLOCK_SIZE,
        num_blocks=4,
        max_num_tokens=8,
        max_num_rows=2,
        max_num_blocks=4,
        num_state_slots=3,
        state_interval=INTERVAL,
    )
    assert runner.kv_caches == []
    runner._copier.copy(torch.tensor([0, 1], dtype=torch.int32))


def test_slots_are_what_half_of_the_memory_holds() -> None:
    _, captured = captured_model("mamba2", num_hidden_layers=1)
    size = bytes_per_slot(captured.loaded.recurrent, captured.loaded.device)
    config = EngineConfig(max_num_seqs=4)
    assert state_slots_in(100 * size, config, captured) == 9
    assert state_slots_in(13 * size, config, captured) == 6
    assert state_slots_in(6 * size, config, captured) == 5
    with pytest.raises(InvalidInputError) as refused:
        state_slots_in(5 * size, config, captured)
    assert refused.value.field == "max_num_seqs"
    with pytest.raises(InvalidInputError) as refused:
        state_slots_in(-1, EngineConfig(max_num_seqs=4, num_state_slots=7), captured)
    assert refused.value.field == "num_state_slots"
