"""Fusion of an all-reduce with the norm behind it, and near misses."""

from __future__ import annotations

import importlib.util
import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.fusions.joined_norms import fuse_all_reduce_norm
from pagespec.compile.fx.check_graph import verify_graph
from pagespec.compile.fx.pass_context import PassContext
from pagespec.compile.load.load import load_model
from pagespec.compile.load.tensor_parallel import shard_model
from pagespec.compile.model.loaded import Shard
from pagespec.compile.probe.probe import probe_model
from pagespec.kernels.collectives.communicator import LoneRank, communicator_scope
from pagespec.kernels.fused import dispatch as fused
from tests.compile.fx.test_spec import JOINING, bindings
from tests.support.captures import use_gpu_passes
from tests.support.models import tiny_model

K = 64


class Tripled(LoneRank):
    """Three ranks with equal parts."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial * 3


COMMUNICATOR = Tripled(0, 3)


def graph_of(
    *,
    has_residual: bool = True,
    sum_is_first: bool = True,
    viewed: tuple[int, ...] = (),
    is_read_elsewhere: bool = False,
    residual_is_sum: bool = False,
    other: Any = None,
) -> GraphModule:
    """The norm of a sum over the ranks, and additional results."""
    graph = Graph()
    partial, residual, weight = map(graph.placeholder, ("partial", "residual", "weight"))
    partial.meta["example_value"] = torch.empty(4, K)
    total = graph.call_function(other or COMMUNICATOR.all_reduce, (partial,))
    total.meta["example_value"] = torch.empty(4, K)
    x = total
    if viewed:
        x = graph.call_method("view", (total, *viewed))
        x.meta["example_value"] = torch.empty(*viewed)
    results: list[Node]
    if has_residual:
        pair = (x, x) if residual_is_sum else (x, residual) if sum_is_first else (residual, x)
        call = graph.call_function(fused.add_rms_norm, (*pair, weight, 1e-6, "wide"))
        results = [graph.call_function(operator.getitem, (call, i)) for i in range(2)]
    else:
        results = [graph.call_function(fused.rms_norm, (x, weight, 1e-6, "wide"))]
    for result in results:
        result.meta["example_value"] = "what Dynamo recorded"
    graph.output((*results, *[total] * is_read_elsewhere))
    return GraphModule({}, graph)


def fuse(gm: GraphModule, has_constant: bool = True) -> int:
    constants = {"weight": torch.empty(K)} if has_constant else {}
    count = fuse_all_reduce_norm(gm, PassContext(nn.Module(), constants, communicator=COMMUNICATOR))
    gm.graph.lint()
    gm.recompile()
    return count


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"sum_is_first": False},
        {"has_residual": False},
        {"viewed": (2, 2, K)},
        {"viewed": (2, 2, K), "has_residual": False},
    ],
    ids=str,
)
def test_joins_and_changes_no_bit(form: dict[str, Any]) -> None:
    gm = graph_of(**form)
    torch.manual_seed(0)
    partial, weight = torch.randn(4, K), torch.randn(K)
    residual = torch.randn(*form.get("viewed", (4, K)))
    expected = gm(partial, residual, weight)
    assert fuse(gm) == 1
    called = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert called.count(COMMUNICATOR.all_reduce_norm) == 1
    assert not {fused.add_rms_norm, fused.rms_norm, COMMUNICATOR.all_reduce} & set(called)
    for result in gm.graph.output_node().args[0]:
        assert result.meta["example_value"] == "what Dynamo recorded"
    for before, after in zip(expected, gm(partial, residual, weight), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    "form",
    [
        {"is_read_elsewhere": True},
        {"is_read_elsewhere": True, "viewed": (2, 2, K)},
        {"viewed": (8, K // 2)},
        {"residual_is_sum": True},
        {"other": torch.neg},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_leaves_others_alone(form: dict[str, Any]) -> None:
    gm = graph_of(**form)
    before = str(gm.graph)
    assert fuse(gm) == 0
    assert str(gm.graph) == before


def test_a_computed_weight_is_not_read_early() -> None:
    assert fuse(graph_of(), has_constant=False) == 0


def captured_shard(arch: str, monkeypatch: pytest.MonkeyPatch) -> CapturedModel:
    """Two layers of rank 0 of 2, with the passes of a GPU."""
    model = tiny_model(arch, num_hidden_layers=2).to(torch.bfloat16)
    loaded, shard = load_model(model), Shard(0, 2)
    loaded = replace(loaded, shard=shard, vocab_sizes=shard_model(model, shard).sizes)
    communicator = LoneRank(0, 2)
    use_gpu_passes(monkeypatch, has_sweeps=True)
    with communicator_scope(communicator):
        specs = probe_model(loaded)
        return capture_model(
            loaded,
            specs,
            CaptureOptions(transparent=False, attention=JOINING),
            communicator=communicator,
        )


# Sums that a norm does not read: of experts that are shared, of LayerNorm.
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="passes of a GPU need Triton"
)
@pytest.mark.parametrize(
    ("arch", "num_joined", "num_pushed", "num_left"),
    [("llama", 4, 4, 0), ("gemma2", 4, 4, 0), ("qwen3_moe", 4, 2, 0), ("gpt_neox", 0, 0, 4)],
)
def test_finds_the_norms_of_models(
    arch: str, num_joined: int, num_pushed: int, num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = captured_shard(arch, monkeypatch)
    assert captured.rewrites["fuse_all_reduce_norm"] == num_joined
    assert captured.rewrites["fuse_row_parallel"] == num_pushed
    assert captured.graph is not None
    nodes = captured.graph.graph.nodes
    left = [node for node in nodes if node.target == captured.communicator.all_reduce]
    assert len(left) == num_left
    verify_graph(captured.graph, "gpu", bindings(captured))
