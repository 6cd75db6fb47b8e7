"""Fusion of a matmul with the all-reduce and the norm behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

pytest.importorskip("triton")

from pagespec.compile.fusions.joined_norms import fuse_row_parallel
from pagespec.compile.fx.pass_context import PassContext
from pagespec.kernels.collectives.communicator import LoneRank
from pagespec.kernels.matmul import dispatch as gpu_linear

K, N = 48, 64


class Tripled(LoneRank):
    """Three ranks with equal parts."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial * 3


COMMUNICATOR = Tripled(0, 3)


def graph_of(*, has_bias: bool = False, is_read_elsewhere: bool = False) -> GraphModule:
    graph = Graph()
    names = ("x", "weight", "bias", "residual", "norm_weight")
    x, weight, bias, residual, norm_weight = map(graph.placeholder, names)
    partial = graph.call_function(
        gpu_linear.linear, (x, weight, bias if has_bias else None, gpu_linear.MAX_FEW_ROWS)
    )
    joined = graph.call_function(
        COMMUNICATOR.all_reduce_norm, (partial, residual, norm_weight, 1e-6, "wide")
    )
    graph.output((joined, *[partial] * is_read_elsewhere))
    return GraphModule({}, graph)


def fuse(gm: GraphModule, constants: tuple[str, ...] = ("weight", "bias", "norm_weight")) -> int:
    known = {name: torch.empty(N) for name in constants}
    count = fuse_row_parallel(gm, PassContext(nn.Module(), known, communicator=COMMUNICATOR))
    gm.graph.lint()
    gm.recompile()
    return count


@pytest.mark.parametrize("num_rows", [2, 30])
def test_joins_and_changes_no_bit(num_rows: int) -> None:
    gm, torch_seed = graph_of(), torch.manual_seed(0)
    sizes = (num_rows, K), (N, K), (N,), (num_rows, N), (N,)
    inputs = [torch.randn(size, generator=torch_seed) for size in sizes]
    (expected,) = gm(*inputs)
    assert fuse(gm) == 1
    called = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert [target.__name__ for target in called] == ["linear_norm"]
    (found,) = gm(*inputs)
    for before, after in zip(expected, found, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("form", "constants"),
    [
        ({"has_bias": True}, ("weight", "bias", "norm_weight")),
        ({"is_read_elsewhere": True}, ("weight", "norm_weight")),
        ({}, ("norm_weight",)),
    ],
    ids=["bias", "read elsewhere", "weight is computed"],
)
def test_leaves_others_alone(form: dict[str, Any], constants: tuple[str, ...]) -> None:
    gm = graph_of(**form)
    before = str(gm.graph)
    assert fuse(gm, constants) == 0
    assert str(gm.graph) == before


def test_without_a_communicator_nothing_is_done() -> None:
    assert fuse_row_parallel(graph_of(), PassContext(nn.Module(), {})) == 0
