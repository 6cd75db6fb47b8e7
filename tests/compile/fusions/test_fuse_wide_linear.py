"""A float32 matmul of 16-bit rows and weight (a router's) is fused; near misses are unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

pytest.importorskip("triton")
from pagespec import LLM, SamplingParams
from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.fusions.fuse_router import fuse_wide_linear
from pagespec.compile.fx.nodes import calls, calls_function, dtype_of
from pagespec.compile.passes import PassContext, gpu_passes
from pagespec.kernels.matmul.wide_matmul import wide_linear
from pagespec.kernels.moe import expert_rows
from pagespec.kernels.moe.expert_rows import combine_add_rms_norm
from pagespec.kernels.moe.route_rows import route_rows
from tests.support.captures import capture_plain, generate, use_gpu_passes, use_passes
from tests.support.models import tiny_model

Change = Callable[[GraphModule, PassContext], None]


@pytest.mark.parametrize(
    ("arch", "spread"),
    [
        ("deepseek_v2", route_rows),
        # Their routers choose by sigmoids, which stay torch's.
        ("deepseek_v3", expert_rows.spread_rows),
        pytest.param("glm4_moe_lite", expert_rows.spread_rows, marks=pytest.mark.nightly),
        pytest.param("kimi_linear", expert_rows.spread_rows, marks=pytest.mark.nightly),
    ],
)
def test_all_around_experts_is_found_beside_it(
    monkeypatch: pytest.MonkeyPatch, arch: str, spread: object
) -> None:
    use_gpu_passes(monkeypatch)
    model = tiny_model(arch).to(torch.bfloat16)

    def engine() -> LLM:
        return LLM(model, device="cpu", max_model_len=512, max_num_seqs=4, state_interval=16)

    llm = engine()
    nodes = llm._runner.captured.graph.graph.nodes
    called = [node.target for node in nodes]
    assert [called.count(f) for f in (wide_linear, spread, combine_add_rms_norm)] == [1, 1, 1]
    (call,) = (node for node in nodes if node.target is wide_linear)
    assert [dtype_of(node) for node in call.args] == [torch.bfloat16] * 2
    # Nothing is left of the conversions.
    assert not any(calls(node, "type") for node in nodes)
    with monkeypatch.context() as patch:
        without = {k: v for k, v in gpu_passes().items() if k != "fuse_wide_linear"}
        use_passes(patch, without)
        plain = engine()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[5, 6, 7, 8, 9]]
    found, expected = (
        [out.outputs[0].token_ids for out in each.generate(prompts, params, use_tqdm=False)]
        for each in (llm, plain)
    )
    assert found == expected


def prepared() -> tuple[CapturedModel, GraphModule, PassContext]:
    """A capture, a copy of its graph, and the values of the graph's placeholders."""
    captured = capture_plain("deepseek_v2", torch.bfloat16)
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    places = dict(zip(names, captured.sources, strict=True))
    constants = {name: s[1] for name, s in places.items() if s[0] == "constant"}
    return captured, gm, PassContext(captured.loaded.module, constants)


def router(gm: GraphModule) -> Any:
    """The linear layer of a router; its arguments are the conversions."""
    return next(
        node
        for node in gm.graph.nodes
        if calls(node, "linear") and all(calls(each, "type") for each in node.args[:2])
    )


def test_no_bit_changes_on_a_cpu() -> None:
    captured, gm, context = prepared()
    expected = generate(captured, gm)
    rows = router(gm).args[0].args[0]
    assert fuse_wide_linear(gm, context) == 1
    gm.graph.lint()
    gm.recompile()
    (call,) = (node for node in gm.graph.nodes if calls_function(node, wide_linear))
    assert call.args[0] is rows
    assert dtype_of(call) == torch.float32
    found = generate(captured, gm)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_conversion_that_another_reads_stays() -> None:
    _, gm, context = prepared()
    wide_rows = router(gm).args[0]
    with gm.graph.inserting_after(wide_rows):
        gm.graph.call_method("neg", (wide_rows,))
    assert fuse_wide_linear(gm, context) == 1
    assert sum(calls(node, "type") for node in gm.graph.nodes) == 1


def _set(node: Node, dtype: torch.dtype) -> None:
    node.meta = {"example_value": node.meta["example_value"].to(dtype)}


def _with_bias(gm: GraphModule, _: PassContext) -> None:
    node = router(gm)
    node.args = (*node.args[:2], node.args[1])


def _wide_weight(gm: GraphModule, context: PassContext) -> None:
    """The weight is float32 already."""
    node = router(gm)
    weight = node.args[1].args[0]
    context.constants[weight.name] = context.constants[weight.name].float()
    _set(weight, torch.float32)
    node.args = (node.args[0], weight)


def _wide_rows(gm: GraphModule, _: PassContext) -> None:
    node = router(gm)
    rows = node.args[0].args[0]
    _set(rows, torch.float32)
    node.args = (rows, node.args[1])


def _another_dtype(gm: GraphModule, _: PassContext) -> None:
    _set(router(gm).args[0].args[0], torch.float16)


def _not_wide(gm: GraphModule, _: PassContext) -> None:
    node = router(gm)
    for each in node.args:
        _set(each, torch.float16)


def _no_constant(gm: GraphModule, context: PassContext) -> None:
    del context.constants[router(gm).args[1].args[0].name]


def _odd_rows(gm: GraphModule, context: PassContext) -> None:
    """Rows that are not whole units of 16 bytes."""
    name = router(gm).args[1].args[0].name
    context.constants[name] = context.constants[name][:, :-4].contiguous()


def _strided(gm: GraphModule, context: PassContext) -> None:
    name = router(gm).args[1].args[0].name
    context.constants[name] = context.constants[name].mT.contiguous().mT


def _quantised(gm: GraphModule, context: PassContext) -> None:
    name = router(gm).args[1].args[0].name
    context.quantized[id(context.constants[name])] = None


def _written(which: int, is_wide: bool) -> Change:
    def change(gm: GraphModule, _: PassContext) -> None:
        node = router(gm)
        wide = node.args[which]
        target = wide if is_wide else wide.args[0]
        with gm.graph.inserting_before(node):
            gm.graph.call_method("mul_", (target, 2.0))

    return change


@pytest.mark.parametrize(
    "change",
    [
        _with_bias,
        _wide_weight,
        _wide_rows,
        _another_dtype,
        _not_wide,
        _no_constant,
        _odd_rows,
        _strided,
        _quantised,
        *(_written(which, is_wide) for which in (0, 1) for is_wide in (False, True)),
    ],
)
def test_what_is_not_quite_that_stays(change: Change) -> None:
    _, gm, context = prepared()
    change(gm, context)
    assert fuse_wide_linear(gm, context) == 0
    assert not any(calls_function(node, wide_linear) for node in gm.graph.nodes)
