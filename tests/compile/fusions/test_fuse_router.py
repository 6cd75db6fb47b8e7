"""Routers with a softmax over the chosen logits are fused; near misses are unchanged.

``test_combine_experts.py`` tests routers whose softmax comes before the choice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

pytest.importorskip("triton")
from pagespec import LLM, SamplingParams
from pagespec.compile.fusions.fuse_router import fuse_router
from pagespec.compile.fx.nodes import calls
from pagespec.compile.passes import PassContext
from pagespec.kernels.moe import expert_rows
from pagespec.kernels.moe.expert_rows import combine_add_rms_norm
from pagespec.kernels.moe.route import route
from pagespec.kernels.moe.route_rows import route_rows
from tests.support.captures import capture_plain, first, use_gpu_passes
from tests.support.driving import hf_greedy
from tests.support.models import tiny_model

Change = Callable[[GraphModule], None]


@pytest.mark.parametrize(
    ("arch", "function", "normalisation"),
    [
        ("granitemoehybrid", route_rows, "chosen"),
        # The sorted ids are read by the experts' biases, too: the sort is a call by itself.
        ("gpt_oss", route, "chosen"),
        pytest.param("granitemoe", route_rows, "chosen", marks=pytest.mark.nightly),
        pytest.param("qwen3_next", route_rows, "renormalised", marks=pytest.mark.nightly),
    ],
)
def test_tokens_are_those_of_hugging_face(
    monkeypatch: pytest.MonkeyPatch, arch: str, function: object, normalisation: str
) -> None:
    use_gpu_passes(monkeypatch)
    model = tiny_model(arch)
    llm = LLM(model, device="cpu", max_model_len=512, max_num_seqs=4, state_interval=16)
    nodes = llm._runner.captured.graph.graph.nodes
    routers = [node for node in nodes if node.target is function]
    # The sum over experts, fused with the next norm if nothing is in between.
    sums = (expert_rows.combine_experts, combine_add_rms_norm)
    assert len(routers) == sum(node.target in sums for node in nodes) == 2
    assert all(normalisation in node.args for node in routers)
    assert not any(calls(node, "topk", "softmax") for node in nodes)
    # Qwen3-Next: a slice of the shared expert's merged projections, read in place.
    parts = [node.args[0] for node in routers if calls(node.args[0], "getitem")]
    assert len(parts) == (2 if arch == "qwen3_next" else 0)
    # 69 columns, and padding.
    assert all(calls(part.args[0], "split") for part in parts)
    assert all(part.args[0].args[1] == [32, 32, 4, 1, 11] for part in parts)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == hf_greedy(model, prompt, 8)


def fused(change: Change) -> tuple[GraphModule, int]:
    """A graph with the change and the pass, and how many routers that found."""
    captured = capture_plain("gpt_oss", torch.bfloat16)
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    change(gm)
    count = fuse_router(gm, PassContext(captured.loaded.module, {}))
    gm.graph.lint()
    return gm, count


def _convert(gm: GraphModule, node: Node, dtype: torch.dtype) -> Node:
    """All readers of ``node`` read it in another dtype."""
    with gm.graph.inserting_after(node):
        converted = gm.graph.call_method("to", (node, dtype))
    node.replace_all_uses_with(converted, lambda user: user is not converted)
    converted.meta = {"example_value": node.meta["example_value"].to(dtype)}
    return converted


def _set_dtype(node: Node, dtype: torch.dtype) -> None:
    node.meta = {"example_value": node.meta["example_value"].to(dtype)}


def _wide_softmax(gm: GraphModule) -> None:
    """Like Cohere2-MoE: the softmax in float32, then the model's dtype."""
    node = first(gm, "softmax")
    _convert(gm, node, torch.bfloat16)
    node.kwargs = {**node.kwargs, "dtype": torch.float32}
    _set_dtype(node, torch.float32)


def _wide_logits(gm: GraphModule) -> None:
    """Like Granite: float32 from the logits on, then the model's dtype."""
    _wide_softmax(gm)
    softmax, chosen = first(gm, "softmax"), first(gm, "topk")
    _convert(gm, chosen.args[0], torch.float32)
    _set_dtype(softmax.args[0], torch.float32)


def _widened_after(gm: GraphModule) -> None:
    """Weights rounded to bfloat16, then in float32."""
    _convert(gm, first(gm, "softmax"), torch.float32)


@pytest.mark.parametrize(
    ("change", "is_converted"),
    [(_wide_softmax, False), (_wide_logits, False), (_widened_after, True)],
)
def test_weights_are_rounded_where_torch_rounds_them(change: Change, is_converted: bool) -> None:
    gm, count = fused(change)
    assert count == 2
    node = first(gm, "route")
    assert calls(node.args[0], "linear")
    assert node.args[1:] == (2, "chosen", torch.bfloat16)
    weights = next(user for user in node.users if user.args[1] == 0)
    assert any(calls(user, "to") for user in weights.users) == is_converted


def _narrow_softmax(gm: GraphModule) -> None:
    """The chosen logits are rounded before the softmax."""
    node = first(gm, "softmax")
    node.kwargs = {**node.kwargs, "dtype": torch.float16}
    _set_dtype(node, torch.float16)


def _narrow_logits(gm: GraphModule) -> None:
    """The logits are rounded before the comparison; the fused call would need the rounded ones."""
    node = first(gm, "topk").args[0]
    converted = _convert(gm, node, torch.bfloat16)
    _set_dtype(node, torch.float32)
    assert converted.users


def _read_chosen(gm: GraphModule) -> None:
    node = first(gm, "softmax").args[0]
    with gm.graph.inserting_after(node):
        gm.graph.call_method("neg", (node,))


def _write_chosen(gm: GraphModule) -> None:
    node = first(gm, "topk")
    values = first(gm, "softmax").args[0]
    with gm.graph.inserting_after(values):
        scaled = gm.graph.call_method("mul_", (values, 2.0))
    scaled.meta = dict(values.meta)
    first(gm, "softmax").replace_input_with(values, scaled)
    assert node.users


def _write_logits(gm: GraphModule) -> None:
    node = first(gm, "topk")
    with gm.graph.inserting_after(node):
        gm.graph.call_method("zero_", (node.args[0],))


def _another_dim(gm: GraphModule) -> None:
    node = first(gm, "softmax")
    node.kwargs = {**node.kwargs, "dim": 0}


@pytest.mark.parametrize(
    "change",
    [_narrow_softmax, _narrow_logits, _read_chosen, _write_chosen, _write_logits, _another_dim],
)
def test_what_is_not_quite_the_router_stays(change: Change) -> None:
    gm, count = fused(change)
    assert count == 1  # that of the other layer
    assert sum(calls(node, "topk") for node in gm.graph.nodes) == 1
    assert sum(node.target is route for node in gm.graph.nodes) == 1
