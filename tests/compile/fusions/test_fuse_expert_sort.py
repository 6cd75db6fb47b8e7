"""The sort of a mixture's rows is fused without a changed bit; near misses are unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

pytest.importorskip("triton")
from pagespec.compile.captured_model import CaptureOptions, capture_model
from pagespec.compile.fusions.fuse_expert_sort import fuse_expert_sort
from pagespec.compile.fx.nodes import calls
from pagespec.compile.load.load import load_model
from pagespec.compile.passes import PassContext
from pagespec.compile.probe.probe import probe_model
from pagespec.kernels.moe.grouped_mm import grouped_mm
from pagespec.kernels.moe.sort_by_expert import sort_by_expert
from tests.support.captures import capture_plain, first, generate, use_gpu_passes
from tests.support.models import tiny_model


def fused(change: Callable[[GraphModule], None] | None = None) -> tuple[GraphModule, int]:
    captured = capture_plain("qwen3_moe", torch.float32)
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    if change is not None:
        change(gm)
    count = fuse_expert_sort(gm, PassContext(captured.loaded.module, {}))
    gm.graph.lint()
    gm.recompile()
    return gm, count


def test_one_call_sorts_and_no_bit_changes() -> None:
    captured = capture_plain("qwen3_moe", torch.float32)
    assert captured.graph is not None
    gm, count = fused()
    assert count == 1
    assert sum(node.target is sort_by_expert for node in gm.graph.nodes) == 1
    left = ("sort", "histc", "cumsum", "empty_like", "masked_fill", "masked_fill_", "setitem")
    left += ("arange", "ge", "clamp_")
    assert not any(calls(node, *left) for node in gm.graph.nodes)
    for node in gm.graph.nodes:
        if calls(node, "getitem") and node.args[0].target is sort_by_expert:
            assert isinstance(node.meta["example_value"], torch.Tensor)
    expected, found = generate(captured, captured.graph), generate(captured, gm)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _descending(gm: GraphModule) -> None:
    first(gm, "sort").kwargs = {"descending": True}


def _other_bounds(gm: GraphModule) -> None:
    node = first(gm, "histc")
    node.kwargs = {**node.kwargs, "max": node.kwargs["bins"]}


def _another_sum(gm: GraphModule) -> None:
    node = first(gm, "cumsum")
    node.kwargs = {**node.kwargs, "dtype": torch.int64}


@pytest.mark.parametrize("change", [_descending, _other_bounds, _another_sum])
def test_what_is_not_quite_the_sort_stays(change: Callable[[GraphModule], None]) -> None:
    gm, count = fused(change)
    assert count == 0
    assert any(calls(node, "sort") for node in gm.graph.nodes)


def test_a_mask_of_other_rows_stays() -> None:
    graph = capture_plain("qwen3_moe", torch.float32).graph
    assert graph is not None
    if not any(calls(node, "ge") for node in graph.graph.nodes):
        pytest.skip("this transformers masks no rows")

    def fewer(gm: GraphModule) -> None:
        node = first(gm, "ge")
        node.args = (node.args[0], node.args[1] - 1)

    gm, count = fused(fewer)
    assert count == 1
    assert any(calls(node, "masked_fill") for node in gm.graph.nodes)


def test_matmuls_of_experts_are_ours_and_take_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all GPU passes; the kernels are interpreted."""
    use_gpu_passes(monkeypatch)
    loaded = load_model(tiny_model("qwen3_moe", num_hidden_layers=1))
    captured = capture_model(loaded, probe_model(loaded), CaptureOptions(transparent=False))
    assert captured.rewrites["fuse_expert_sort"] == 1
    assert captured.graph is not None
    calls_of = [node for node in captured.graph.graph.nodes if node.target is grouped_mm]
    assert [node.kwargs for node in calls_of] == [
        {"has_gate": True, "has_old_offs": False},
        {"has_gate": False, "has_old_offs": True},
    ]
    plain = capture_plain("qwen3_moe", torch.float32)
    assert plain.graph is not None
    expected, found = generate(plain, plain.graph), generate(captured, captured.graph)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
