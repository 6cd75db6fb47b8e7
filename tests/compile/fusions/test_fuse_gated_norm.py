"""Fusion of a norm with the gate behind it, and near misses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from pagespec.compile.fusions.fuse_gated_norm import fuse_gated_norm
from pagespec.compile.fusions.fuse_norm import fuse_norm
from pagespec.compile.passes import PassContext
from pagespec.kernels.fused import dispatch as fused
from tests.support.captures import capture_plain, first


def fuse(
    arch: str, dtype: torch.dtype, change: Callable[[GraphModule], None] = lambda _: None
) -> GraphModule:
    captured = capture_plain(arch, dtype)
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    context = PassContext(captured.loaded.module, {})
    fuse_norm(gm, context)
    change(gm)
    fuse_gated_norm(gm, context)
    gm.graph.lint()
    gm.recompile()
    return gm


def called(gm: GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", ["qwen3_next", "qwen3_5_text", "olmo_hybrid"])
def test_gated_norms_are_one_call(arch: str, dtype: torch.dtype) -> None:
    gm = fuse(arch, dtype)
    targets = called(gm)
    num_recurrences = sum("delta_rule" in str(target) for target in targets)
    assert targets.count(fused.gated_rms_norm) == num_recurrences > 0
    node = next(node for node in gm.graph.nodes if node.target is fused.gated_rms_norm)
    assert node.meta["example_value"].dtype == dtype
    if arch != "olmo_hybrid":  # heads of the merged projection are read where they are
        assert node.args[1].meta["example_value"].dim() == 4


def _other_activation(gm: GraphModule) -> None:
    first(gm, "silu").target = torch.nn.functional.relu


def _sum(gm: GraphModule) -> None:
    product = next(iter(first(gm, "silu").users))
    product.target = torch.add


def _read_elsewhere(gm: GraphModule) -> None:
    node = first(gm, "silu")
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.neg, (node,))


def _rounded_silu(gm: GraphModule) -> None:
    """The silu in bfloat16: its result is rounded before the multiplication."""
    node = first(gm, "silu")
    gate = node.args[0].args[0]
    node.args = (gate,)
    node.meta["example_value"] = gate.meta["example_value"]


@pytest.mark.parametrize("change", [_other_activation, _sum, _read_elsewhere, _rounded_silu])
def test_near_misses_are_left(change: Callable[[GraphModule], None]) -> None:
    assert fused.gated_rms_norm not in called(fuse("qwen3_5_text", torch.bfloat16, change))
