"""Attention quantises its output if an FP8 matmul is its only reader.

Each group of channels must belong to one head.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.fusions.quantized_rows import fuse_attention_quantize
from pagespec.compile.passes import PassContext
from pagespec.kernels.attention import reference
from pagespec.kernels.attention.backend import AttentionBackend
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.fused.e4m3_groups import QuantizedRows
from pagespec.kernels.fused.quantize_rows import quantize_rows
from pagespec.kernels.matmul.quantized import dispatch_fp8
from tests.compile.lowering.test_gpu_quantized import captured_from
from tests.support.captures import generate, use_gpu_passes
from tests.support.quantized_files import write_quantized

OPS = torch.ops.pagespec


def attend(*arguments: Any) -> Tensor:
    return reference.paged_attention(*arguments)


def attend_quantized(*arguments: Any) -> QuantizedRows:
    return quantize_rows(attend(*arguments).flatten(1))


BACKEND = AttentionBackend(
    "triton", "", attend, fused.kv_store, quantizing={attend: attend_quantized}
)


def capture(folder: Path, head_dim: int) -> CapturedModel:
    """Two layers for a GPU, but for attention's operators, which are lowered below."""
    write_quantized(folder, "fp8 blocks", head_dim=head_dim, num_attention_heads=2)
    with pytest.MonkeyPatch.context() as patch:
        use_gpu_passes(patch, has_sweeps=True)
        return captured_from(folder)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> CapturedModel:
    return capture(tmp_path_factory.mktemp("model"), 128)


def lowered(captured: CapturedModel) -> tuple[GraphModule, PassContext]:
    from pagespec.kernels.arguments import AttentionParams, PagedKV

    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    node: Any
    for node in gm.graph.nodes:
        if node.target in (OPS.paged_attention, OPS.paged_attention.default):
            query, *rest = node.args
            node.target = attend
            node.args = (query, PagedKV(*rest[:6]), AttentionParams(*rest[6:]))
    return gm, PassContext(captured.loaded.module, {}, attention=BACKEND)


def targets(gm: GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_joins_each_layer_and_changes_no_bit(captured: CapturedModel) -> None:
    plain, context = lowered(captured)
    gm = GraphModule(plain, copy.deepcopy(plain.graph))
    assert targets(plain).count(dispatch_fp8.linear) == 2
    assert fuse_attention_quantize(gm, context) == 2
    gm.graph.lint()
    gm.recompile()
    found = targets(gm)
    assert found.count(attend_quantized) == found.count(dispatch_fp8.linear_of_rows) == 2
    assert attend not in found
    assert dispatch_fp8.linear not in found
    for graph in (plain, gm):
        graph.recompile()
    expected, joined = generate(captured, plain), generate(captured, gm)
    for a, b in zip(expected, joined, strict=True):
        assert torch.equal(a, b)
    assert torch.cat(expected[:-4]).count_nonzero() > 0


def test_heads_that_share_a_group_keep_the_kernel(tmp_path: Path) -> None:
    gm, context = lowered(capture(tmp_path, 64))
    assert targets(gm).count(attend) == 2
    assert fuse_attention_quantize(gm, context) == 0


def test_only_where_there_is_such_a_call(captured: CapturedModel) -> None:
    gm, context = lowered(captured)
    for attention in (None, AttentionBackend("flash", "", attend, fused.kv_store)):
        context.attention = attention
        assert fuse_attention_quantize(gm, context) == 0


def _second_reader(gm: GraphModule, node: Node) -> None:
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.neg, (node,))


def _second_reader_of_the_rows(gm: GraphModule, node: Node) -> None:
    rows = next(iter(_last_view(node).users)).args[0]
    assert isinstance(rows, Node)
    _second_reader(gm, rows)


def _gate(gm: GraphModule, node: Node) -> None:
    rows = _last_view(node)
    (matmul,) = rows.users
    with gm.graph.inserting_before(matmul):
        gated = gm.graph.call_function(torch.mul, (rows, 2.0))
    gated.meta["example_value"] = rows.meta["example_value"]
    matmul.args = (gated, *matmul.args[1:])


def _another_order(gm: GraphModule, node: Node) -> None:
    (view,) = node.users
    with gm.graph.inserting_after(node):
        turned = gm.graph.call_method("transpose", (node, 0, 1))
    turned.meta["example_value"] = node.meta["example_value"]
    view.args = (turned, *view.args[1:])


def _last_view(node: Node) -> Node:
    while node.target is not dispatch_fp8.linear:
        last, node = node, next(iter(node.users))
    return last


@pytest.mark.parametrize(
    "change", [_second_reader, _second_reader_of_the_rows, _gate, _another_order]
)
def test_leaves_alone_what_is_not_quite_that(
    captured: CapturedModel, change: Callable[[GraphModule, Node], None]
) -> None:
    gm, context = lowered(captured)
    change(gm, next(node for node in gm.graph.nodes if node.target is attend))
    assert fuse_attention_quantize(gm, context) == 1
    gm.graph.lint()


def test_the_matmul_receives_what_its_rows_no_longer_contain(captured: CapturedModel) -> None:
    gm, context = lowered(captured)
    fuse_attention_quantize(gm, context)
    rows = next(node for node in gm.graph.nodes if node.target is attend_quantized)
    assert rows.meta.get("example_value") is None
    (matmul,) = rows.users
    _, dtype, num_dims, *_ = matmul.args
    like = matmul.meta["example_value"]
    assert (dtype, num_dims) == (like.dtype, like.dim())
