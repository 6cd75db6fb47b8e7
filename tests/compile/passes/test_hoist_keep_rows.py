"""The form of a graph for long steps computes kept tokens with the same bits, and nothing else of
the last layer; near misses stay in the first form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.fx.nodes import example
from pagespec.compile.fx.recorder import recording
from pagespec.compile.load.load import load_model
from pagespec.compile.load.tensor_parallel import shard_model
from pagespec.compile.model.loaded import Shard
from pagespec.compile.passes.hoist_keep_rows import hoist_keep_rows
from pagespec.compile.passes.split_head import keep_rows
from pagespec.compile.probe.probe import probe_model
from pagespec.kernels.arguments import AttentionParams, PagedKV, RopeInputs
from pagespec.kernels.attention import cpu_invariant
from pagespec.kernels.attention.backend import AttentionBackend
from pagespec.kernels.attention.kept_rows import kept_rows
from pagespec.kernels.collectives.communicator import LoneRank, communicator_scope
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.matmul.cpu.invariant import linear
from pagespec.runner.cpu.runner import ModelRunner
from tests.support.captures import graph_cache, use_gpu_passes
from tests.support.driving import drive, make_requests
from tests.support.models import tiny_model

BLOCK_SIZE, NUM_BLOCKS = 8, 60
PROMPTS = [
    [(i * 7 + 3) % 300 + 5 for i in range(70)],
    [77, 3, 5],
    [(i * 5 + 1) % 300 + 4 for i in range(45)],
]


def captured_on_cpu(arch: str, **settings: Any) -> CapturedModel:
    loaded = load_model(tiny_model(arch, **settings))
    return capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())


def results(captured: CapturedModel, *, long_tokens: int) -> tuple[list[Tensor], int]:
    """Logits of all steps and the contents of all caches, and the number of long steps."""
    seen: list[Tensor] = []
    num_long = 0
    runner = ModelRunner(
        captured,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        long_tokens=long_tokens,
        on_logits=lambda plan, logits: seen.append(logits.clone()),
    )
    pack = runner._pack

    def counted(plan: Any) -> Any:
        nonlocal num_long
        packed = pack(plan)
        num_long += packed.is_long
        return packed

    runner._pack = counted  # type: ignore[method-assign]
    requests = make_requests(PROMPTS, 3)
    drive(runner, requests, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk=24)
    # The last block is the null block, in which many tokens may write one slot.
    return [*seen, *(cache[:-1] for pair in runner.kv_caches for cache in pair)], num_long


ARCHS = {
    "qwen3": {"num_hidden_layers": 1},
    "gemma2": {"layer_types": ["full_attention", "sliding_attention"]},
    "gpt2": {"n_layer": 1},
    "deepseek_v3": {"num_hidden_layers": 1},
}
BY_NIGHT = ("gpt2", "deepseek_v3")


@pytest.mark.parametrize(
    "arch",
    [pytest.param(a, marks=pytest.mark.nightly if a in BY_NIGHT else ()) for a in ARCHS],
)
def test_kept_tokens_have_the_same_bits(arch: str) -> None:
    captured = captured_on_cpu(arch, **ARCHS[arch])
    (whole, none), (long, some) = (
        results(captured, long_tokens=long_tokens) for long_tokens in (10_000, 2)
    )
    assert none == 0
    assert some >= 3, "chunks without samples, and a step of prompts and decode rows"
    assert all(map(torch.equal, whole, long))


def test_only_keys_and_values_are_computed_of_all_tokens() -> None:
    captured = captured_on_cpu("qwen3", num_hidden_layers=1)
    assert captured.graph is not None
    function: Any = captured.long_function()
    assert captured.long_function() is function
    nodes = list(function.__self__.graph.nodes)
    places = [place for place, node in enumerate(nodes) if node.target is linear]
    assert len(places) == sum(node.target is linear for node in captured.graph.graph.nodes)
    targets = [node.target for node in nodes]
    first, attention = map(targets.index, (kept_rows, cpu_invariant.attend))
    # o, gate and up, down, and the head.
    assert sum(place > attention for place in places) == 4
    assert first < attention
    assert keep_rows not in targets


def test_sums_over_ranks_are_of_kept_tokens() -> None:
    model = tiny_model("llama", num_attention_heads=4, num_hidden_layers=1)
    shard_model(model, Shard(0, 2))
    communicator = LoneRank(0, 2)  # its sums have the right shapes
    with communicator_scope(communicator):
        loaded = load_model(model)
        specs = probe_model(loaded)
    captured = capture_model(loaded, specs, communicator=communicator)
    (whole, _), (long, some) = (results(captured, long_tokens=n) for n in (10_000, 2))
    assert some >= 3
    assert all(map(torch.equal, whole, long))
    function: Any = captured.long_function()
    targets = [node.target for node in function.__self__.graph.nodes]
    attention = targets.index(cpu_invariant.attend)
    assert targets.index(kept_rows) < attention
    assert targets[attention:].count(communicator.all_reduce) == 2


# A graph with the fused calls of a GPU -----------------------------------------------------------


def attend(query: Tensor, kv: PagedKV, params: AttentionParams, *_: Any) -> Tensor:
    return cpu_invariant.paged_attention(query, kv, params)


def rope_attend(inputs: RopeInputs, slots: Tensor, kv: PagedKV, params: AttentionParams) -> Tensor:
    return attend(fused.norm_rope_store(inputs, kv.k_cache, kv.v_cache, slots), kv, params)


def test_the_calls_of_a_gpu_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    use_gpu_passes(monkeypatch)
    backend = AttentionBackend("reference", "a test", attend, fused.kv_store, rope_attend)
    loaded = load_model(tiny_model("qwen3_moe", num_hidden_layers=1))
    options = CaptureOptions(attention=backend)
    captured = capture_model(loaded, probe_model(loaded), options, graph_cache=graph_cache())
    (whole, _), (long, some) = (results(captured, long_tokens=n) for n in (10_000, 2))
    assert some >= 3
    # torch's matmuls on a CPU depend on the number of rows.
    for one, other in zip(whole, long, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    function: Any = captured.long_function()
    targets = [node.target for node in function.__self__.graph.nodes]
    assert rope_attend not in targets
    assert targets.index(fused.norm_rope_store) < targets.index(attend)


# Near misses -------------------------------------------------------------------------------------


def _flipped(graph: Any, hidden: Node) -> Node:
    return graph.call_method("flip", (hidden, 1))


def _softmax_over_tokens(graph: Any, hidden: Node) -> Node:
    return graph.call_method("softmax", (hidden, 1))


def _scrambled(graph: Any, hidden: Node) -> Node:
    num_tokens = str(cast("Tensor", example(hidden)).shape[1])
    size = next(node for node in graph.nodes if str(example(node)) == num_tokens)
    parts = graph.call_method("reshape", (hidden, 2, size, -1))
    return graph.call_method("reshape", (parts, 1, size, -1))


def _written(graph: Any, hidden: Node) -> Node:
    return graph.call_method("mul_", (hidden, 2.0))


def _shifted(graph: Any, hidden: Node) -> Node:
    return graph.call_function(torch.roll, (hidden, 1, 1))


NEAR_MISSES = [_flipped, _softmax_over_tokens, _scrambled, _written, _shifted]


@pytest.mark.parametrize("change", NEAR_MISSES, ids=lambda change: change.__name__)
def test_near_misses_have_no_second_form(change: Callable[[Any, Node], Node]) -> None:
    captured = captured_on_cpu("qwen3", num_hidden_layers=1)
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    (cut,) = (node for node in gm.graph.nodes if node.target is keep_rows)
    hidden: Any = cut.args[0]
    with recording(gm.graph) as results_of, gm.graph.inserting_before(cut):
        before = set(gm.graph.nodes)
        last = change(gm.graph, hidden)
        for node in [node for node in gm.graph.nodes if node not in before]:
            results_of.record(node)
    cut.args = (last, cut.args[1])
    assert hoist_keep_rows(gm, captured.sources, None) is None
    assert replace(captured, graph=captured.graph).long_function() is not None
