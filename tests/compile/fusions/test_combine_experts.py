"""Routers, copies to experts and sums over experts are fused; near misses are unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

pytest.importorskip("triton")
from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.fusions.combine_experts import combine_experts
from pagespec.compile.fusions.fuse_expert_sort import fuse_expert_sort
from pagespec.compile.fusions.fuse_router import fuse_router
from pagespec.compile.fx.nodes import calls
from pagespec.compile.passes import PassContext
from pagespec.kernels.moe import expert_rows
from pagespec.kernels.moe.route import route
from tests.support.captures import capture_plain, first, generate

Change = Callable[[GraphModule], None]
# What calls of ours take the place of.
REPLACED = ("softmax", "topk", "itruediv", "floordiv", "sum")


def fused(
    arch: str, dtype: torch.dtype, change: Change | None = None
) -> tuple[CapturedModel, GraphModule, tuple[int, int]]:
    """The capture, its graph with the passes, and how many routers and sums they found."""
    captured = capture_plain(arch, dtype)
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    if change is not None:
        change(gm)
    context = PassContext(captured.loaded.module, {})
    num_routers = fuse_router(gm, context)
    fuse_expert_sort(gm, context)
    num_sums = combine_experts(gm, context)
    gm.graph.lint()
    gm.recompile()
    return captured, gm, (num_routers, num_sums)


def targets(gm: GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes]


@pytest.mark.parametrize(
    ("arch", "num_layers", "normalisation", "dtype"),
    [
        ("qwen3_moe", 1, "renormalised", torch.float32),
        ("qwen3_moe", 1, "renormalised", torch.bfloat16),
        ("mixtral", 2, "renormalised", torch.bfloat16),
        ("gpt_oss", 2, "chosen", torch.float32),
        ("gpt_oss", 2, "chosen", torch.bfloat16),
        pytest.param("granitemoe", 2, "chosen", torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param("mixtral", 2, "renormalised", torch.float32, marks=pytest.mark.nightly),
        pytest.param("olmoe", 2, "all", torch.float32, marks=pytest.mark.nightly),
        # Of its 60 experts some have equal logits in bfloat16, among which torch takes any.
        pytest.param("qwen2_moe", 2, "all", torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_a_layer_has_one_call_of_each(
    arch: str, num_layers: int, normalisation: str, dtype: torch.dtype
) -> None:
    captured, gm, counts = fused(arch, dtype)
    assert counts == (num_layers, num_layers)
    for function in (route, expert_rows.spread_rows, expert_rows.combine_experts):
        assert targets(gm).count(function) == num_layers
    assert not any(calls(node, *REPLACED) for node in gm.graph.nodes)
    routed = next(node for node in gm.graph.nodes if node.target is route)
    # The logits as the matmul gives them, the weights as the experts take them.
    logits = routed.args[0]
    if arch == "qwen2_moe":  # merged with the shared expert's projections
        logits = logits.args[0].args[0]
    assert calls(logits, "linear")
    expected_dtype = torch.float32 if arch == "mixtral" else dtype
    assert routed.args[1:] == (routed.args[1], normalisation, expected_dtype)
    summed = next(node for node in gm.graph.nodes if node.target is expert_rows.combine_experts)
    assert summed.args[4] == dtype
    assert calls(summed.args[1], "reshape")
    for node in gm.graph.nodes:
        if node.target in (expert_rows.spread_rows, expert_rows.combine_experts):
            assert isinstance(node.meta["example_value"], torch.Tensor)
    assert captured.graph is not None
    expected, found = generate(captured, captured.graph), generate(captured, gm)
    for a, b in zip(expected, found, strict=True):
        # In bfloat16 every rounding but that of the weights is where it was.
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_a_factor_of_one_is_part_of_the_router() -> None:
    """DeepSeek-V2 multiplies the chosen weights by a factor, which usually is 1.0."""
    for factor, between in ((1.0, "getitem"), (2.5, "mul")):
        gm = fused("deepseek_v2", torch.bfloat16, lambda gm, f=factor: _scale(gm, f))[1]
        summed = next(n for n in gm.graph.nodes if n.target is expert_rows.combine_experts)
        assert calls(summed.args[1].args[0], between)


def _scale(gm: GraphModule, factor: float) -> None:
    chosen = first(gm, "topk")
    weights = next(user for user in chosen.users if user.args[1] == 0)
    (scaled,) = weights.users
    scaled.args = (weights, factor)


def test_biases_and_routers_of_another_kind() -> None:
    """Of DeepSeek-V3, whose router has sigmoids, groups and a bias for the choice, the sums alone;
    they change no bit."""
    captured, gm, counts = fused("deepseek_v3", torch.bfloat16)
    assert counts == (0, 1)
    assert captured.graph is not None
    expected, found = generate(captured, captured.graph), generate(captured, gm)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _smallest(gm: GraphModule) -> None:
    node = first(gm, "topk")
    node.kwargs = {**node.kwargs, "largest": False}


def _another_dim(gm: GraphModule) -> None:
    node = first(gm, "softmax")
    node.kwargs = {**node.kwargs, "dim": 0}


def _bfloat16_probabilities(gm: GraphModule) -> None:
    node = first(gm, "softmax")
    node.meta["example_value"] = node.meta["example_value"].to(torch.bfloat16)


def _read_probabilities(gm: GraphModule) -> None:
    node = first(gm, "softmax")
    with gm.graph.inserting_after(node):
        gm.graph.call_method("max", (node,))


@pytest.mark.parametrize(
    "change", [_smallest, _another_dim, _bfloat16_probabilities, _read_probabilities]
)
def test_what_is_not_quite_the_router_stays(change: Change) -> None:
    _, gm, counts = fused("qwen3_moe", torch.float32, change)
    assert counts == (0, 1)
    assert any(calls(node, "topk") for node in gm.graph.nodes)


def test_a_sum_that_is_read_elsewhere_stays() -> None:
    """The weights before the division have another reader, so the sum and the division stay."""

    def read_sum(gm: GraphModule) -> None:
        node = next(n for n in first(gm, "topk").users if n.args[1] == 0)
        total = next(user for user in node.users if calls(user, "sum"))
        with gm.graph.inserting_after(total):
            gm.graph.call_method("neg", (total,))

    captured, gm, counts = fused("qwen3_moe", torch.float32, read_sum)
    assert counts == (1, 1)
    assert any(calls(node, "itruediv") for node in gm.graph.nodes)
    routed = next(node for node in gm.graph.nodes if node.target is route)
    assert routed.args[2] == "all"
    assert captured.graph is not None
    expected, found = generate(captured, captured.graph), generate(captured, gm)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def _sum_over_width(gm: GraphModule) -> None:
    _sum_of_rows(gm).kwargs = {"dim": 2}


def _keep_dim(gm: GraphModule) -> None:
    _sum_of_rows(gm).kwargs = {"dim": 1, "keepdim": True}


def _other_order(gm: GraphModule) -> None:
    """Weights in an order that the sums' indices do not invert."""
    node = _products(gm)
    weights = node.args[1].args[0]
    weights.args = (weights.args[0], first(gm, "floordiv"))


def _read_products(gm: GraphModule) -> None:
    node = _products(gm)
    with gm.graph.inserting_after(node):
        gm.graph.call_method("max", (node,))


def _write_products(gm: GraphModule) -> None:
    node = _products(gm)
    with gm.graph.inserting_after(node):
        gm.graph.call_method("zero_", (node,))


def _products(gm: GraphModule) -> torch.fx.Node:
    return _sum_of_rows(gm).args[0].args[0].args[0]


def _sum_of_rows(gm: GraphModule) -> torch.fx.Node:
    return next(n for n in gm.graph.nodes if calls(n, "sum") and calls(n.args[0], "view"))


@pytest.mark.parametrize(
    "change", [_sum_over_width, _keep_dim, _other_order, _read_products, _write_products]
)
def test_what_is_not_quite_the_sum_stays(change: Change) -> None:
    _, gm, counts = fused("qwen3_moe", torch.float32, change)
    assert counts == (1, 0)
    assert expert_rows.spread_rows not in targets(gm)
