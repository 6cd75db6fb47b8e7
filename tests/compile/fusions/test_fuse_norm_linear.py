"""A norm is fused into the matmul that is its only reader."""

from __future__ import annotations

import importlib.util
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from pagespec.compile.captured_model import CaptureOptions, capture_model
from pagespec.compile.fx.pass_context import PassContext
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.kernels.fused import dispatch as fused
from tests.support.captures import graph_cache, use_gpu_passes
from tests.support.models import tiny_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
K = 64


def graph_of(has_gate: bool, *, biased: bool = False, num_readers: int = 1) -> GraphModule:
    """out, hidden + 1 and, with more readers, the norm: of x, residual, two weights and a bias."""
    from pagespec.kernels.matmul import dispatch as gpu_linear

    graph = Graph()
    names = ("x", "residual", "norm_weight", "weight", "bias")
    x, residual, norm_weight, weight, bias = map(graph.placeholder, names)
    norm = graph.call_function(fused.add_rms_norm, (x, residual, norm_weight, 1e-6, "rounded"))
    normed = graph.call_function(operator.getitem, (norm, 0))
    hidden = graph.call_function(operator.getitem, (norm, 1))
    more = graph.call_function(operator.add, (hidden, 1))  # before the matmul
    call = gpu_linear.linear_silu_mul if has_gate else gpu_linear.linear
    out = graph.call_function(call, (normed, weight, bias if biased else None, 0))
    out.meta["example_value"] = "what Dynamo recorded"
    graph.output((out, more, *[normed] * (num_readers - 1)))
    return GraphModule({}, graph)


def operands(has_gate: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    rows = 2 * K if has_gate else K
    return [torch.randn(s) for s in ((1, 3, K), (1, 3, K), (K,), (rows, K), (rows,))]


@pytest.fixture
def weights_asked_about(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Like a GPU that has the fused launch for all weights; records the queries."""
    from pagespec.kernels.matmul import dispatch as gpu_linear

    asked: list[Any] = []
    monkeypatch.setattr(gpu_linear, "has_joined_norm", lambda *args: asked.append(args) or True)
    return asked


@pytest.mark.parametrize("has_gate", [False, True])
def test_joins_and_changes_no_bit(has_gate: bool, weights_asked_about: list[Any]) -> None:
    from pagespec.compile.fusions.joined_norms import fuse_norm_linear
    from pagespec.kernels.matmul import dispatch as gpu_linear

    gm, arguments = graph_of(has_gate), operands(has_gate)
    expected = gm(*arguments)
    norm_weight, weight = arguments[2:4]
    context = PassContext(nn.Module(), {"weight": weight, "norm_weight": norm_weight})
    assert fuse_norm_linear(gm, context) == 1
    gm.graph.lint()
    gm.recompile()
    called = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert [node.target for node in called].count(gpu_linear.norm_linear) == 1
    assert not {fused.add_rms_norm, gpu_linear.linear} & {node.target for node in called}
    outputs = gm.graph.output_node().args[0]
    assert outputs[0].meta["example_value"] == "what Dynamo recorded"
    for before, after in zip(expected, gm(*arguments), strict=True):
        assert torch.equal(before, after)
    assert weights_asked_about == [(weight, has_gate)]


@pytest.mark.parametrize(
    ("change", "constants"),
    [
        ({"biased": True}, ("weight", "norm_weight", "bias")),
        ({"num_readers": 2}, ("weight", "norm_weight")),
        ({}, ("norm_weight",)),
        ({}, ("weight",)),
    ],
    ids=["bias", "two readers", "weight is computed", "norm's weight is computed"],
)
def test_leaves_others_alone(
    change: dict[str, Any], constants: tuple[str, ...], weights_asked_about: list[Any]
) -> None:
    from pagespec.compile.fusions.joined_norms import fuse_norm_linear

    gm = graph_of(False, **change)
    before = str(gm.graph)
    tensors = {name: torch.randn(K, K) for name in constants}
    assert fuse_norm_linear(gm, PassContext(nn.Module(), tensors)) == 0
    assert str(gm.graph) == before
    assert not weights_asked_about


def test_only_cards_with_the_kernel_join() -> None:
    """A CPU lacks the kernel and gets the two calls."""
    from pagespec.compile.fusions.joined_norms import fuse_norm_linear

    gm = graph_of(True)
    weight = torch.randn(2 * K, K, dtype=torch.bfloat16)
    context = PassContext(nn.Module(), {"weight": weight, "norm_weight": torch.randn(K)})
    assert fuse_norm_linear(gm, context) == 0


@pytest.mark.parametrize(("arch", "num_joined"), [("llama", 3), ("qwen3", 3), ("gemma3_text", 3)])
def test_finds_the_norms_of_models(
    arch: str, num_joined: int, weights_asked_about: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two layers: all norms except the first and the last, which has other readers than the
    head."""
    loaded = load_model(tiny_model(arch, num_hidden_layers=2).to(torch.bfloat16))
    use_gpu_passes(monkeypatch, has_sweeps=True)
    captured = capture_model(
        loaded, probe_model(loaded), CaptureOptions(transparent=False), graph_cache=graph_cache()
    )
    assert captured.rewrites["fuse_norm_linear"] == num_joined == len(weights_asked_about)
