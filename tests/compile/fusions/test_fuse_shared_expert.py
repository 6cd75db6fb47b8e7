"""Shared experts are fused into the call that sums a token's experts; near misses are unchanged."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

pytest.importorskip("triton")
from pagespec import LLM, SamplingParams
from pagespec.compile.fusions.joined_norms import fuse_combine_norm
from pagespec.compile.fx.nodes import calls
from pagespec.kernels.moe import expert_rows
from pagespec.kernels.moe.expert_rows import combine_add_rms_norm
from tests.compile.fusions.test_fuse_few_tokens_of_experts import (
    count,
    first,
    prepared,
    with_kernel_norms,
)
from tests.support.captures import generate, use_gpu_passes
from tests.support.driving import hf_greedy
from tests.support.models import tiny_model

Change = Callable[[GraphModule], None]


@pytest.mark.parametrize(
    ("arch", "num_layers", "has_gate"), [("qwen2_moe", 2, True), ("deepseek_v2", 1, False)]
)
def test_no_bit_changes(
    monkeypatch: pytest.MonkeyPatch, arch: str, num_layers: int, has_gate: bool
) -> None:
    captured, gm, context = prepared(arch, torch.bfloat16)
    expected = generate(captured, with_kernel_norms(gm))
    assert fuse_combine_norm(gm, context) == num_layers
    gm = with_kernel_norms(gm)
    assert count(gm, combine_add_rms_norm) == num_layers
    assert count(gm, expert_rows.combine_experts) == 0
    for node in gm.graph.nodes:
        if node.target is combine_add_rms_norm:
            # The rows of the last matmul of the shared expert, and the logits of its gate.
            assert calls(node.args[8], "linear")
            assert len(node.args) == 9 + has_gate
    assert not any(calls(node, "sigmoid") for node in gm.graph.nodes)
    found = generate(captured, gm)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    # Steps of many tokens.
    monkeypatch.setattr(expert_rows, "MAX_FEW_TOKENS", 0)
    found = generate(captured, gm)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# Its experts are as large as the real ones otherwise, which takes the interpreter minutes.
_SMALL = {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}


@pytest.mark.parametrize(
    ("arch", "num_layers", "settings"),
    [
        ("qwen2_moe", 2, _SMALL),
        ("deepseek_v2", 1, {}),
        pytest.param("deepseek_v3", 1, {}, marks=pytest.mark.nightly),
    ],
)
def test_tokens_are_those_of_hugging_face(
    monkeypatch: pytest.MonkeyPatch, arch: str, num_layers: int, settings: dict[str, int]
) -> None:
    use_gpu_passes(monkeypatch)
    model = tiny_model(arch, **settings)
    llm = LLM(model, device="cpu", max_model_len=512, max_num_seqs=4)
    graph = llm._runner.captured.graph
    assert count(graph, combine_add_rms_norm) == num_layers
    assert count(graph, expert_rows.combine_experts) == 0
    if arch == "qwen2_moe":  # 105 columns of router and shared expert, and padding
        splits = [node.args[1] for node in graph.graph.nodes if calls(node, "split")]
        assert splits.count([48, 48, 8, 1, 7]) == num_layers
    # One step has many tokens, the others have one.
    prompt = [5 + i * 7 % 90 for i in range(70)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == hf_greedy(model, prompt, 8)


def test_a_scaled_sum_keeps_its_kernels() -> None:
    """Granite multiplies the sum by a constant before the residual is added."""
    _, gm, context = prepared("granitemoehybrid", torch.bfloat16)
    num_sums = count(gm, expert_rows.combine_experts)
    assert num_sums > 0
    assert fuse_combine_norm(gm, context) == 0
    assert count(gm, expert_rows.combine_experts) == num_sums


def _parts(gm: GraphModule) -> tuple[Any, Any, Any]:
    """(sum, multiplication, gate) of the first shared expert."""
    gate = next(node for node in gm.graph.nodes if calls(node, "sigmoid"))
    (product,) = gate.users
    (total,) = product.users
    return total, product, gate


def _behind(gm: GraphModule, node: Node, name: str, *args: object) -> Node:
    with gm.graph.inserting_after(node):
        made = gm.graph.call_method(name, (node, *args))
    made.meta = dict(node.meta)
    return made


def _read_total(gm: GraphModule) -> None:
    _behind(gm, _parts(gm)[0], "neg")


def _read_combined(gm: GraphModule) -> None:
    _behind(gm, first(gm, expert_rows.combine_experts), "neg")


def _scale_total(gm: GraphModule) -> None:
    total = _parts(gm)[0]
    scaled = _behind(gm, total, "mul", 0.5)
    total.replace_all_uses_with(scaled, lambda user: user is not scaled)


def _subtract(gm: GraphModule) -> None:
    _parts(gm)[0].target = operator.sub


def _another_dtype(gm: GraphModule) -> None:
    product = _parts(gm)[1]
    product.meta["example_value"] = product.meta["example_value"].half()


def _one_row(gm: GraphModule) -> None:
    product = _parts(gm)[1]
    product.meta["example_value"] = product.meta["example_value"][:1]


@pytest.mark.parametrize(
    "change",
    [
        _read_total,
        _read_combined,
        _scale_total,
        _subtract,
        _another_dtype,
        _one_row,
    ],
)
def test_what_is_not_quite_such_a_sum_stays(change: Change) -> None:
    _, gm, context = prepared("qwen2_moe", torch.float32)
    change(gm)
    # Of the two layers the second is as it was.
    assert fuse_combine_norm(gm, context) == 1
    assert count(gm, expert_rows.combine_experts) == 1
    assert calls(_parts(gm)[1], "mul")


def _write_shared(gm: GraphModule) -> None:
    product = _parts(gm)[1]
    _behind(gm, product.args[1], "neg_")


def _read_gate(gm: GraphModule) -> None:
    _behind(gm, _parts(gm)[2], "neg")


def _read_product(gm: GraphModule) -> None:
    _behind(gm, _parts(gm)[1], "neg")


def _wide_gate(gm: GraphModule) -> None:
    """A factor per element."""
    _, product, gate = _parts(gm)
    gate.args[0].meta["example_value"] = product.meta["example_value"]


def _float_gate(gm: GraphModule) -> None:
    logits = _parts(gm)[2].args[0]
    logits.meta["example_value"] = logits.meta["example_value"].double()


@pytest.mark.parametrize(
    "change", [_write_shared, _read_gate, _read_product, _wide_gate, _float_gate]
)
def test_another_gate_keeps_its_operations(change: Change) -> None:
    """Their result is the term that is added."""
    _, gm, context = prepared("qwen2_moe", torch.float32)
    product = _parts(gm)[1]
    change(gm)
    assert fuse_combine_norm(gm, context) == 2
    assert count(gm, expert_rows.combine_experts) == 0
    assert first(gm, combine_add_rms_norm).args[8:] == (product,)
    assert calls(product.args[0], "sigmoid")
