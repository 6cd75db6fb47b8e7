"""Packed copies of weights: as many as fit in memory, and only of weights that nothing changes."""

from __future__ import annotations

from pathlib import Path

from pagespec import LLM, SamplingParams
from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from tests.support.captures import graph_cache
from tests.support.models import tiny_model


def packed_names(captured: CapturedModel) -> list[str]:
    assert captured.graph is not None
    nodes = captured.graph.graph.nodes
    return [n.name for n in nodes if n.op == "placeholder" and n.name.startswith("packed_")]


def test_packs_what_there_is_room_for() -> None:
    loaded = load_model(tiny_model("llama"))
    specs, cache = probe_model(loaded), graph_cache()
    counts = [
        len(
            packed_names(
                capture_model(loaded, specs, CaptureOptions(packing_bytes=room), graph_cache=cache)
            )
        )
        for room in (0, 60_000, 1 << 30)
    ]
    # Two layers of four matmuls, and the head.
    assert counts[0] == 0 < counts[1] < counts[2] == 9


def test_only_weights_the_engine_loaded_itself(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    prompts, sampling = [[4, 8, 15], [16, 23, 42, 7]], SamplingParams(temperature=0, max_tokens=6)
    answers, are_packed = [], []
    for source in (model, tmp_path):
        llm = LLM(source, device="cpu", dtype="float32", num_blocks=16)
        answers.append([out.outputs[0].token_ids for out in llm.generate(prompts, sampling)])
        are_packed.append(bool(packed_names(llm._runner.captured)))
    assert are_packed == [False, True]
    assert answers[0] == answers[1]
