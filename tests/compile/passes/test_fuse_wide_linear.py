"""Routers that multiply in float32 become one call that takes 16-bit numbers, and nothing else
does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from pagespec.compile.fx.nodes import dtype_of, is_linear
from pagespec.compile.passes import PassContext
from pagespec.compile.passes.fuse_wide_linear import fuse_wide_linear
from pagespec.kernels.linear.wide_linear import wide_linear
from tests.support.captures import capture_plain, generate

Change = Callable[[GraphModule, PassContext], None]


def fused(arch: str, dtype: torch.dtype, change: Change | None = None) -> int:
    """How many matmuls, behind a change of the graph; without one bits are compared."""
    captured = capture_plain(arch, dtype)
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    sources = zip(names, captured.sources, strict=True)
    constants = {name: source[1] for name, source in sources if source[0] == "constant"}
    context = PassContext(captured.loaded.module, constants)
    if change is not None:
        change(gm, context)
    count = fuse_wide_linear(gm, context)
    gm.graph.lint()
    gm.recompile()
    assert [node.target for node in gm.graph.nodes].count(wide_linear) == count
    if change is None:
        for before, after in zip(
            generate(captured, captured.graph), generate(captured, gm), strict=True
        ):
            assert torch.equal(before, after)
    return count


@pytest.mark.parametrize(
    ("arch", "dtype", "count"),
    [
        ("deepseek_v2", torch.bfloat16, 1),
        ("deepseek_v3", torch.float16, 1),
        ("deepseek_v2", torch.float32, 0),  # nothing to widen
        ("qwen3_moe", torch.bfloat16, 0),  # multiplies in bfloat16
    ],
)
def test_finds_the_routers_and_changes_no_bit(arch: str, dtype: torch.dtype, count: int) -> None:
    assert fused(arch, dtype) == count


def _router(gm: GraphModule) -> Node:
    linears = filter(is_linear, gm.graph.nodes)
    return next(node for node in linears if dtype_of(node) == torch.float32)


def _rows_written_in_place(gm: GraphModule, _: PassContext) -> None:
    node = _router(gm)
    with gm.graph.inserting_before(node):
        gm.graph.call_method("mul_", (node.args[0], 2.0))


def _weight_of_the_step(gm: GraphModule, context: PassContext) -> None:
    del context.constants[_router(gm).args[1].args[0].name]


def _quantised(gm: GraphModule, context: PassContext) -> None:
    weight = context.constants[_router(gm).args[1].args[0].name]
    context.quantized[id(weight)] = None


def _bias(gm: GraphModule, _: PassContext) -> None:
    node = _router(gm)
    node.args = (*node.args[:2], node.args[1])


@pytest.mark.parametrize(
    "change",
    [_rows_written_in_place, _weight_of_the_step, _quantised, _bias],
    ids=lambda change: change.__name__,
)
def test_what_is_not_quite_that_stays(change: Change) -> None:
    assert fused("deepseek_v2", torch.bfloat16, change) == 0
