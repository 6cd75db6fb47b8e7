"""Regions: the right nodes, each distinct piece once, and the same result around them.

The compiler here runs a region as it is, so that the tests are about the cutting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from pagespec.compile import capture as capture_module
from pagespec.compile.capture import CapturedModel, capture_model
from pagespec.compile.load import load_model
from pagespec.compile.probe import probe_model
from pagespec.compile.regions import compile_regions, find_regions
from pagespec.compile.runner import ModelRunner
from tests.compile.driving import drive, make_requests
from tests.compile.test_generation import LogitRecorder, prompts
from tests.models import ARCHITECTURES, tiny_model


class AsItIs:
    """A compiler that only keeps the pieces, and what it was told about their inputs."""

    def __init__(self) -> None:
        self.pieces: list[GraphModule] = []

    def __call__(self, gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.pieces.append(gm)
        assert not any(example is None for example in examples)
        return gm.forward


def captured(arch: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> CapturedModel:
    """In "inductor" mode, but for Inductor; without the calls of CPU kernels, as on a GPU."""
    monkeypatch.setattr(capture_module, "CPU_GRAPH_PASSES", {})
    monkeypatch.setattr(capture_module, "compile_regions", lambda gm: compile_regions(gm, AsItIs()))
    loaded = load_model(tiny_model(arch, **changes))
    return capture_model(loaded, probe_model(loaded), compile="inductor")


def logits_of(captured: CapturedModel) -> dict[tuple[str, int], torch.Tensor]:
    recorder = LogitRecorder()
    runner = ModelRunner(captured, block_size=16, num_blocks=40, on_logits=recorder)
    drive(runner, make_requests(prompts(), 3), block_size=16, num_blocks=40, chunk=10)
    return recorder.logits


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_cut_graph_computes_the_same(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"num_hidden_layers": 2} if arch != "deepseek_v3" else {}
    cut = captured(arch, monkeypatch, **changes)
    whole = capture_model(cut.loaded, cut.specs, compile="graph")
    assert cut.rewrites["regions"] > 0
    found, expected = logits_of(cut), logits_of(whole)
    assert found.keys() == expected.keys()
    for key, logits in expected.items():
        assert torch.equal(found[key], logits)


def test_layers_share_their_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    two = captured("qwen3", monkeypatch, num_hidden_layers=2)
    five = captured("qwen3", monkeypatch, num_hidden_layers=5)
    assert five.rewrites["regions"] > two.rewrites["regions"]
    assert five.num_compiled == two.num_compiled <= 5


def chain(*targets: Callable[..., Any] | str) -> Graph:
    """x, then each target (a function or a method of no arguments) applied to the result before."""
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = value = torch.ones(4, 4)
    for target in targets:
        if isinstance(target, str):
            node, value = graph.call_method(target, (node,)), getattr(value, target)()
        else:
            node, value = graph.call_function(target, (node,)), target(value)
        node.meta["example_value"] = value
    graph.output(node)
    return graph


def weigh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, torch.ones(4, 4))


weigh.__module__ = "pagespec.kernels.of_a_test"


def test_opaque_calls_bound_a_region_and_views_alone_are_none() -> None:
    graph = chain(torch.exp, torch.neg, weigh, "t", "t", weigh, torch.sin)
    regions = find_regions(graph)
    assert [[node.target for node in region.nodes] for region in regions] == [
        [torch.exp, torch.neg],
        [torch.sin],
    ]


def test_equal_pieces_with_other_numbers_are_distinct() -> None:
    def build(power: float) -> GraphModule:
        graph = Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.ones(2, 4)
        nodes = [x]
        for exponent in (2.0, power):
            raised = graph.call_function(torch.pow, (nodes[-1], exponent))
            raised.meta["example_value"] = torch.ones(2, 4)
            weighed = graph.call_function(weigh, (raised,))
            weighed.meta["example_value"] = torch.ones(2, 4)
            nodes.append(weighed)
        graph.output(nodes[-1])
        return GraphModule({}, graph)

    x = torch.rand(2, 4)
    for power, num_distinct in ((2.0, 1), (3.0, 2)):
        gm = build(power)
        expected = gm(x)
        assert compile_regions(gm, AsItIs()) == (2, num_distinct)
        assert torch.equal(gm(x), expected)
