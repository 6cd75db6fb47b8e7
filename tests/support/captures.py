"""Capture the graphs of tiny models, once per test run, and apply passes to copies of them."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from pagespec import build
from pagespec.compile import captured_model as capture_module
from pagespec.compile.capture.graph_cache import GraphCache
from pagespec.compile.captured_model import CapturedModel, capture_model
from pagespec.compile.fusions.fuse_activation import fuse_activation
from pagespec.compile.fusions.fuse_norm import fuse_norm
from pagespec.compile.fusions.fuse_rope_store import fuse_rope_store
from pagespec.compile.fx.nodes import calls
from pagespec.compile.load.load import load_model
from pagespec.compile.model.loaded import LoadedModel
from pagespec.compile.passes import PassContext, gpu_passes
from pagespec.compile.probe.probe import probe_model
from pagespec.runner.cpu.runner import ModelRunner
from tests.support.driving import drive, make_requests
from tests.support.models import tiny_model

PASSES = {"rope": fuse_rope_store, "norm": fuse_norm, "activation": fuse_activation}
# Names the folder of graphs that the processes of a test run share; set by tests/conftest.py, which
# does without this module's imports.
_SHARED_GRAPHS = "PAGESPEC_TEST_GRAPHS"
# One layer is enough if all layers are alike and other models cover the code between two layers.
OVERRIDES = {
    "qwen3": {"num_hidden_layers": 1},
    "qwen2": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 1},
    "phi3": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "gpt_neox": {"num_hidden_layers": 1},
    "qwen3_moe": {"num_hidden_layers": 1},
}


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def graph_cache() -> GraphCache:
    """For tests of the code after tracing: a model, or an equal one, is traced once per test run,
    by the first process that needs it. Tracing is most of the time of a capture."""
    return GraphCache(Path(os.environ.get(_SHARED_GRAPHS) or _own_folder().name))


def capture_once(monkeypatch: pytest.MonkeyPatch) -> list[CapturedModel]:
    """Make engines of one module with the same settings share a graph, each with its own caches.
    Capturing takes seconds and does not depend on the schedule.

    Returns:
        All models that are captured from now on.
    """
    known: dict[Any, CapturedModel] = {}
    found: list[CapturedModel] = []
    capture = build.capture_model

    def captured(loaded: LoadedModel, specs: Any, *options: Any, **settings: Any) -> CapturedModel:
        key = (loaded.module, options, tuple(sorted(settings.items())))
        if key not in known:
            settings["graph_cache"] = graph_cache()
            known[key] = capture(loaded, specs, *options, **settings)
            found.append(known[key])
        return known[key]

    monkeypatch.setattr(build, "capture_model", captured)
    return found


class NoSweeps:
    """Replaces matmul plans, which are measured on a GPU: the library computes all matmuls."""

    def __init__(self, *_: Any) -> None: ...

    def prepare(self, matmuls: Any) -> None: ...

    def max_custom_rows(self, *_: Any) -> int:
        return 0


def use_passes(patch: pytest.MonkeyPatch, passes: Mapping[str, Any]) -> None:
    """Captures on a CPU run these passes after the common ones, instead of the CPU's passes."""
    patch.setattr(capture_module, "cpu_passes", lambda _: passes)


def change_common_passes(patch: pytest.MonkeyPatch, *without: str, **more: Any) -> None:
    """Captures leave out some of the common passes and run additional ones after them."""
    kept = {k: v for k, v in capture_module.COMMON_PASSES.items() if k not in without}
    patch.setattr(capture_module, "COMMON_PASSES", kept | more)


def use_gpu_passes(patch: pytest.MonkeyPatch, *, has_sweeps: bool = False) -> None:
    """Captures on a CPU run the passes of a GPU, whose kernels are interpreted."""
    use_passes(patch, gpu_passes())
    if not has_sweeps:
        from pagespec.compile.lowering import lower_gpu  # imports Triton

        patch.setattr(lower_gpu, "LinearPlans", NoSweeps)


def capture_plain(arch: str, dtype: torch.dtype) -> CapturedModel:
    """A model captured with only the passes that every device runs."""
    loaded = load_model(tiny_model(arch, **OVERRIDES.get(arch, {})).to(dtype))
    with pytest.MonkeyPatch.context() as patch:
        use_passes(patch, {})
        return capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())


def fuse(
    captured: CapturedModel, change: Callable[[GraphModule], None] | None = None
) -> tuple[GraphModule, dict[str, int]]:
    """A changed and then fused copy of the graph, and the number of rewrites per pass."""
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    if change is not None:
        change(gm)
    context = PassContext(captured.loaded.module, {})
    counts = {name: graph_pass(gm, context) for name, graph_pass in PASSES.items()}
    gm.graph.lint()
    gm.recompile()
    return gm, counts


def generate(captured: CapturedModel, gm: GraphModule) -> list[torch.Tensor]:
    """The logits of every step, and the final contents of the caches."""
    captured = replace(captured, graph=gm)
    seen: list[torch.Tensor] = []
    runner = ModelRunner(
        captured,
        block_size=8,
        num_blocks=12,
        on_logits=lambda plan, logits: seen.append(logits.clone()),
    )
    requests = make_requests([[5, 9, 200, 31, 8, 90, 2, 40, 41], [77, 3, 5]], 5)
    drive(runner, requests, block_size=8, num_blocks=12, chunk=4)
    # The last block is the null block, in which many tokens may write one slot.
    return [*seen, *(cache[:-1].clone() for pair in runner.kv_caches for cache in pair)]


def first(gm: GraphModule, *names: str) -> Node:
    return next(node for node in gm.graph.nodes if calls(node, *names))
