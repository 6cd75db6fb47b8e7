"""Graphs satisfy the graph specification after every pass, and each rule detects its violation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.fx.check_graph import RULES, Bindings, SpecError, Stage, verify_graph
from pagespec.compile.fx.nodes import example, is_ours
from pagespec.compile.fx.products import library_matmuls
from pagespec.compile.load.load import load_model
from pagespec.compile.passes import PassContext, run_passes
from pagespec.compile.probe.probe import probe_model
from pagespec.kernels.arguments import RopeInputs
from pagespec.kernels.attention import reference
from pagespec.kernels.attention.backend import AttentionBackend
from pagespec.kernels.fused import dispatch as fused
from tests.support.captures import graph_cache, use_gpu_passes
from tests.support.models import ARCHITECTURES, tiny_model
from tests.support.tiny_configs import SPARSE


def fused_rope_attention(inputs: RopeInputs, *_: Any) -> torch.Tensor:
    return inputs.query


fused_rope_attention.__module__ = "pagespec.kernels.of_a_test"
JOINING = AttentionBackend(
    "triton", "", reference.paged_attention, fused.kv_store, fused_rope_attention
)


def bindings(captured: CapturedModel) -> Bindings:
    assert captured.graph is not None
    constants, others = {}, {}
    for node, source in zip(
        captured.graph.graph.find_nodes(op="placeholder"), captured.sources, strict=True
    ):
        (constants if source[0] == "constant" else others)[node.name] = source[1]
    return Bindings(constants, others)


def capture(
    arch: str,
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = torch.bfloat16,
) -> CapturedModel:
    """Capture a model, with a check after every pass."""
    monkeypatch.setenv("PAGESPEC_CHECK_GRAPH", "1")
    if stage == "gpu":
        use_gpu_passes(monkeypatch, has_sweeps=True)
    loaded = load_model(tiny_model(arch).to(dtype))
    # Transparent, the passes for a GPU would try their kernels out.
    is_cpu = stage == "cpu"
    return capture_model(
        loaded,
        probe_model(loaded),
        CaptureOptions(transparent=is_cpu, attention=None if is_cpu else JOINING),
        graph_cache=graph_cache(),
    )


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
@pytest.mark.parametrize("arch", [*ARCHITECTURES, *SPARSE])
def test_graphs_satisfy_the_spec(arch: str, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(arch, stage, monkeypatch)
    assert captured.graph is not None
    verify_graph(captured.graph, stage, bindings(captured))


def _with_attribute(gm: GraphModule, _: PassContext) -> int:
    _module_attribute(gm, Bindings({}, {}))
    return 1


def test_a_broken_rule_names_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = {"first": lambda *_: 0, "planted": _with_attribute, "last": lambda *_: 0}
    for is_checked in (False, True):
        monkeypatch.setenv("PAGESPEC_CHECK_GRAPH", str(int(is_checked)))
        graph = Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.ones(2)
        result = graph.call_function(torch.relu, (x,))
        result.meta["example_value"] = torch.ones(2)
        graph.output((result,))
        gm, context = GraphModule({}, graph), PassContext(torch.nn.Module(), {})
        context.sources["x"] = ("input", "x")
        if is_checked:
            with pytest.raises(SpecError, match=r"after planted: .*nothing is read off a module"):
                run_passes(gm, context, passes)
        else:
            assert run_passes(gm, context, passes) == {"first": 0, "planted": 1, "last": 0}


def _module_attribute(gm: GraphModule, _: Bindings) -> None:
    gm.register_buffer("forgotten", torch.ones(1))
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    with gm.graph.inserting_before(first):
        gm.graph.get_attr("forgotten")


def _unbound(_: GraphModule, bound: Bindings) -> None:
    constants: Any = bound.constants
    constants.pop(next(iter(constants)))


def _other_shape(gm: GraphModule, bound: Bindings) -> None:
    node = next(n for n in gm.graph.nodes if n.name in bound.constants)
    node.meta["example_value"] = torch.empty(1, dtype=node.meta["example_value"].dtype)


def _tensor_argument(gm: GraphModule, _: Bindings) -> None:
    node = _computed(gm)
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.add, (node, torch.ones(1))).meta["example_value"] = example(
            node
        )


def _no_record(gm: GraphModule, _: Bindings) -> None:
    node = next(n for n in gm.graph.nodes if is_ours(n) and any(not is_ours(u) for u in n.users))
    del node.meta["example_value"]


def _attention_op(gm: GraphModule, _: Bindings) -> None:
    _add(gm, torch.ops.pagespec.paged_attention)


def _matmul(gm: GraphModule, _: Bindings) -> None:
    _add(gm, torch.nn.functional.linear)


def _add(gm: GraphModule, target: Callable[..., Any]) -> None:
    node = _computed(gm)
    weight = next(iter(gm.graph.find_nodes(op="placeholder")))
    with gm.graph.inserting_after(node):
        gm.graph.call_function(target, (node, weight))


def _computed(gm: GraphModule) -> Node:
    return next(n for n in gm.graph.nodes if is_ours(n) and example(n) is not None)


PLANTED = {
    "nothing is read off a module": _module_attribute,
    "a placeholder is a constant or a step's input": _unbound,
    "a constant has its own shape and dtype on record": _other_shape,
    "arguments are nodes and plain data": _tensor_argument,
    "what a call that is not ours reads is on record": _no_record,
    "attention, KV store and indexers are lowered": _attention_op,
    "all matmuls are ours": _matmul,
}


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_violation_is_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture("llama", "cpu", monkeypatch)
    assert captured.graph is not None
    bound = bindings(captured)
    PLANTED[text](captured.graph, bound)
    with pytest.raises(SpecError, match=text):
        verify_graph(captured.graph, "cpu", bound)


def test_a_matmul_left_to_the_library_is_found_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture("llama", "gpu", monkeypatch)
    assert captured.graph is not None
    bound = bindings(captured)
    graph = captured.graph.graph
    assert library_matmuls(graph, bound.constants) == {}
    node = _computed(captured.graph)
    weight = next(
        n
        for n in graph.find_nodes(op="placeholder")
        if n.name in bound.constants and bound.constants[n.name].dim() == 2
    )
    # As it is, and what is computed from it: a router's in float32.
    with graph.inserting_after(node):
        linear = graph.call_function(torch.nn.functional.linear, (node, weight))
    text = "all matmuls with constant weights are ours"
    for name in ("float", "clone"):
        with pytest.raises(SpecError, match=text):
            verify_graph(captured.graph, "gpu", bound)
        assert library_matmuls(graph, bound.constants) == {"linear": 1}
        with graph.inserting_before(linear):
            made = graph.call_method(name, (weight,))
        made.meta["example_value"] = example(weight)
        linear.args = (node, made)
    assert {rule.text for rule in RULES} == {*PLANTED, text}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("arch", "left"),
    [
        ("deepseek_v3", {}),
        ("qwen3_moe", {}),
        ("gpt2", {"addmm": 8}),
        pytest.param("llama4_text", {"bmm": 4}, marks=pytest.mark.nightly),
    ],
)
def test_matmuls_that_a_gpu_leaves_to_the_library_are_reported(
    arch: str, left: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exceptions of docs/transparency.md, and no others: of float32 models, too, whose routers
    convert what is float32 already."""
    captured = capture(arch, "gpu", monkeypatch, dtype)
    assert captured.graph is not None
    assert library_matmuls(captured.graph.graph, bindings(captured).constants) == left
