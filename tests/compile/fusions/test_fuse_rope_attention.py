"""Norm, rotation, cache write and attention are fused if nothing reads the caches in between."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.fusions.fuse_rope_store import fuse_rope_attention, fuse_rope_store
from pagespec.compile.passes import PassContext
from pagespec.kernels.arguments import AttentionParams, PagedKV, RopeInputs
from pagespec.kernels.attention import reference
from pagespec.kernels.attention.backend import AttentionBackend
from pagespec.kernels.fused import dispatch as fused
from tests.support.captures import capture_plain, generate

OPS = torch.ops.pagespec


def turned(
    inputs: RopeInputs, slots: torch.Tensor, kv: PagedKV, params: AttentionParams
) -> torch.Tensor:
    """The fused call in torch's operations."""
    query = fused.norm_rope_store(inputs, kv.k_cache, kv.v_cache, slots)
    return reference.paged_attention(query, kv, params)


JOINING = AttentionBackend("triton", "", reference.paged_attention, fused.kv_store, turned)


@pytest.fixture(scope="module")
def qwen3() -> CapturedModel:
    return capture_plain("qwen3", torch.bfloat16)


@pytest.fixture(scope="module")
def gemma() -> CapturedModel:
    """Two layers, of which one has a window."""
    return capture_plain("gemma3_text", torch.float32)


def graph_of(captured: CapturedModel) -> tuple[GraphModule, PassContext]:
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    context = PassContext(captured.loaded.module, {}, attention=JOINING)
    fuse_rope_store(gm, context)
    return gm, context


def attentions(gm: GraphModule) -> list[Node]:
    ops = (OPS.paged_attention, OPS.paged_attention.default)
    return [node for node in gm.graph.nodes if node.target in ops]


@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_joins_each_layer_and_changes_no_bit(name: str, request: pytest.FixtureRequest) -> None:
    captured = request.getfixturevalue(name)
    plain = captured.graph
    gm, context = graph_of(captured)
    before = [example.meta["example_value"] for example in attentions(gm)]
    assert fuse_rope_attention(gm, context) == len(captured.specs) == len(before)
    gm.graph.lint()
    gm.recompile()
    called = [node for node in gm.graph.nodes if node.op == "call_function"]
    joined = [node for node in called if node.target is turned]
    assert [node.meta["example_value"] for node in joined] == before
    assert not attentions(gm)
    assert fused.norm_rope_store not in {node.target for node in called}
    windows = [node.args[3].window for node in joined]
    assert windows == [spec.window for spec in captured.specs]
    expected, found = generate(captured, plain), generate(captured, gm)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    assert torch.cat(expected[: -2 * len(captured.specs)]).count_nonzero() > 0


def test_only_where_there_is_such_a_call(qwen3: CapturedModel) -> None:
    gm, context = graph_of(qwen3)
    for attention in (None, AttentionBackend("flash", "", JOINING.attend, JOINING.store)):
        context.attention = attention
        assert fuse_rope_attention(gm, context) == 0
    assert len(attentions(gm)) == 1


def _another_attention_between(gm: GraphModule, node: Node) -> None:
    """As in a layer that attends over the previous layer's keys."""
    other = next(n for n in gm.graph.nodes if n.target is fused.norm_rope_store).args[0][0]
    with gm.graph.inserting_before(node):
        gm.graph.call_function(OPS.paged_attention, (other, *node.args[1:]))


def _keys_of_another_layer(gm: GraphModule, node: Node) -> None:
    caches = attentions(gm)[1].args[1:3]
    assert caches != node.args[1:3]
    node.args = (node.args[0], *caches, *node.args[3:])


def _queries_read_twice(gm: GraphModule, node: Node) -> None:
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.neg, (node.args[0],))


def _operands_written(gm: GraphModule, _: Node) -> None:
    for node in attentions(gm):
        rope = node.args[0]
        assert isinstance(rope, Node)
        with gm.graph.inserting_before(node):
            gm.graph.call_method("mul_", (rope.args[0].cos, 2.0))


@pytest.mark.parametrize(
    ("change", "num_joined"),
    [
        (_another_attention_between, 1),
        (_keys_of_another_layer, 1),
        (_queries_read_twice, 1),
        (_operands_written, 0),
    ],
)
def test_leaves_alone_what_is_not_quite_that(
    gemma: CapturedModel, change: Callable[[GraphModule, Node], None], num_joined: int
) -> None:
    gm, context = graph_of(gemma)
    change(gm, attentions(gm)[0])
    assert fuse_rope_attention(gm, context) == num_joined
    gm.graph.lint()
