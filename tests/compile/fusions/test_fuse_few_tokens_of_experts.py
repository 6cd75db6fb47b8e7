"""Operations around experts are fused into one launch for few tokens; near misses are unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

pytest.importorskip("triton")
from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.fusions.combine_experts import combine_experts
from pagespec.compile.fusions.fuse_expert_sort import fuse_expert_sort
from pagespec.compile.fusions.fuse_norm import fuse_norm
from pagespec.compile.fusions.fuse_route_rows import fuse_route_rows
from pagespec.compile.fusions.fuse_router import fuse_router
from pagespec.compile.fusions.joined_norms import fuse_combine_norm
from pagespec.compile.fx.nodes import calls_function
from pagespec.compile.passes import PassContext
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.fused import rms_norm
from pagespec.kernels.moe import expert_rows
from pagespec.kernels.moe.expert_rows import combine_add_rms_norm
from pagespec.kernels.moe.route import route
from pagespec.kernels.moe.route_rows import route_rows
from pagespec.kernels.moe.sort_by_expert import sort_by_expert
from tests.support.captures import capture_plain, generate

Change = Callable[[GraphModule], None]


def prepared(arch: str, dtype: torch.dtype) -> tuple[CapturedModel, GraphModule, PassContext]:
    """A capture, and its graph after the earlier passes."""
    captured = capture_plain(arch, dtype)
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    sources = dict(zip(names, captured.sources, strict=True))
    context = PassContext(captured.loaded.module, {}, sources=sources)
    for graph_pass in (fuse_norm, fuse_router, fuse_expert_sort, combine_experts):
        graph_pass(gm, context)
    return captured, gm, context


def with_kernel_norms(gm: GraphModule) -> GraphModule:
    """A copy whose norms have the kernel's mean, of which the one in the joined kernel is a copy,
    in place of torch's."""
    swapped = GraphModule(gm, copy.deepcopy(gm.graph))
    for node in swapped.graph.nodes:
        if node.target is fused.add_rms_norm:
            node.target = rms_norm.add_rms_norm
    swapped.graph.lint()
    swapped.recompile()
    return swapped


def count(gm: GraphModule, function: object) -> int:
    return sum(node.target is function for node in gm.graph.nodes)


def first(gm: GraphModule, function: object) -> Node:
    return next(node for node in gm.graph.nodes if calls_function(node, function))


@pytest.mark.parametrize(
    ("arch", "num_layers", "dtype"),
    [
        ("qwen3_moe", 1, torch.bfloat16),
        ("mixtral", 2, torch.bfloat16),
        # Its experts read a view of the rows that comes behind the router.
        ("deepseek_v2", 1, torch.bfloat16),
        pytest.param("qwen3_moe", 1, torch.float32, marks=pytest.mark.nightly),
        pytest.param("olmoe", 2, torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_no_bit_changes(arch: str, num_layers: int, dtype: torch.dtype) -> None:
    captured, gm, context = prepared(arch, dtype)
    expected = generate(captured, with_kernel_norms(gm))
    assert fuse_route_rows(gm, context) == num_layers
    assert fuse_combine_norm(gm, context) == num_layers
    assert count(gm, route_rows) == count(gm, combine_add_rms_norm) == num_layers
    for function in (route, sort_by_expert, expert_rows.spread_rows, expert_rows.combine_experts):
        assert count(gm, function) == 0
    # What says how many tokens are real came along.
    (starts,) = first(gm, route_rows).args[5:]
    assert context.sources[starts.name] == ("input", "query_starts")
    found = generate(captured, with_kernel_norms(gm))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_padding_goes_to_no_expert() -> None:
    """The sorts need the end of the step; without it they treat all tokens as real."""
    captured, gm, context = prepared("mixtral", torch.bfloat16)
    sort = first(gm, sort_by_expert)
    assert sort.args[2] == 2
    assert context.sources[sort.args[3].name] == ("input", "query_starts")
    assert captured.graph is not None
    plain = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    for graph_pass in (fuse_router, fuse_expert_sort, combine_experts):
        graph_pass(plain, PassContext(captured.loaded.module, {}))
    assert len(first(plain, sort_by_expert).args) == 2
    for each in (gm, plain):
        each.graph.lint()
        each.recompile()
    expected, found = generate(captured, plain), generate(captured, gm)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _read(function: object, number: int) -> Change:
    """The result with this index gets a reader that no fused call supports."""

    def change(gm: GraphModule) -> None:
        node = first(gm, function)
        part = next((user for user in node.users if user.args[1] == number), None)
        if part is None:
            with gm.graph.inserting_after(node):
                part = gm.graph.call_function(lambda x, i: x[i], (node, number))
        with gm.graph.inserting_after(part):
            gm.graph.call_method("neg", (part,))

    return change


def _another_top_k(gm: GraphModule) -> None:
    node = first(gm, route)
    node.args = (node.args[0], 1, *node.args[2:])


def _late_tokens(gm: GraphModule) -> None:
    node = first(gm, expert_rows.spread_rows)
    tokens = node.args[0]
    with gm.graph.inserting_before(node):
        later = gm.graph.call_method("neg", (tokens,))
    later.meta = dict(tokens.meta)
    node.replace_input_with(tokens, later)


def _late_view(gm: GraphModule) -> None:
    _late_tokens(gm)
    node = first(gm, expert_rows.spread_rows)
    tokens = node.args[0]
    with gm.graph.inserting_before(node):
        view = gm.graph.call_method("view", (tokens, -1, 48))
    view.meta = dict(tokens.meta)
    node.replace_input_with(tokens, view)


def _written_tokens(gm: GraphModule) -> None:
    node = first(gm, expert_rows.spread_rows)
    with gm.graph.inserting_before(node):
        gm.graph.call_method("neg_", (node.args[0],))


@pytest.mark.parametrize(
    "change",
    [
        _read(route, 1),
        _read(sort_by_expert, 1),
        _another_top_k,
        _late_tokens,
        _late_view,
        _written_tokens,
    ],
)
def test_what_is_not_quite_the_chain_to_experts_stays(change: Change) -> None:
    _, gm, context = prepared("qwen3_moe", torch.float32)
    change(gm)
    assert fuse_route_rows(gm, context) == 0
    assert count(gm, route) == count(gm, expert_rows.spread_rows) == 1


def _read_sum(gm: GraphModule) -> None:
    node = first(gm, expert_rows.combine_experts)
    with gm.graph.inserting_after(node):
        gm.graph.call_method("neg", (node,))


def _another_dtype(gm: GraphModule) -> None:
    node = first(gm, expert_rows.combine_experts)
    node.args = (*node.args[:4], torch.float16)


@pytest.mark.parametrize("change", [_read_sum, _another_dtype])
def test_what_is_not_quite_the_chain_back_stays(change: Change) -> None:
    _, gm, context = prepared("qwen3_moe", torch.float32)
    change(gm)
    assert fuse_combine_norm(gm, context) == 0
    assert count(gm, expert_rows.combine_experts) == 1
