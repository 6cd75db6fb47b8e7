"""The merge pass fires, moves storage once, and changes no result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map_only

from pagespec.compile.captured_model import CaptureOptions, capture_model
from pagespec.compile.fx.fake_tensors import expressions
from pagespec.compile.fx.nodes import example, is_linear, linear_operands, tensor_of
from pagespec.compile.fx.recorder import recording
from pagespec.compile.load.load import load_model
from pagespec.compile.passes import PassContext
from pagespec.compile.passes.merge_linear import consecutive_views, merge_linear, merge_storage
from pagespec.compile.probe.probe import probe_model
from pagespec.runner.cpu.runner import ModelRunner
from tests.support.captures import change_common_passes, graph_cache, use_passes
from tests.support.driving import drive, make_requests
from tests.support.models import tiny_model

# q, k, v and gate, up a layer; deepseek_v3: q_a and kv_a a layer, gate and up of its dense layer
# and of the shared expert of its other layer.
MERGED = {"qwen2": 9, "gpt_oss": 4, "deepseek_v3": 4, "qwen2_moe": 10}


@pytest.mark.parametrize("arch", MERGED)
def test_merges_and_changes_nothing(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5, 9, 200, 31, 8, 90, 2], [77, 3]]
    tokens, logits = {}, {}
    for merge in (False, True):
        loaded = load_model(tiny_model(arch))
        before = {name: p.detach().clone() for name, p in loaded.module.named_parameters()}
        with monkeypatch.context() as patch:
            if not merge:
                change_common_passes(patch, "merge_linear")
            captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
        seen: list[torch.Tensor] = []
        runner = ModelRunner(
            captured,
            block_size=16,
            num_blocks=20,
            on_logits=lambda plan, row, seen=seen: seen.append(row.clone()),
        )
        requests = make_requests(prompts, 8)
        drive(runner, requests, block_size=16, num_blocks=20, chunk=4)
        tokens[merge] = [r.output_token_ids for r in requests]
        logits[merge] = torch.cat(seen)
        for name, parameter in loaded.module.named_parameters():
            assert torch.equal(parameter, before[name])
        assert captured.rewrites.get("merge_linear", 0) == (MERGED[arch] if merge else 0)
    assert tokens[True] == tokens[False]
    torch.testing.assert_close(logits[True], logits[False], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", MERGED)
def test_records_what_running_every_node_gives(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_passes(monkeypatch, {})
    loaded = load_model(tiny_model(arch))
    # What latent attention is made of are no operators: fake tensors do not run through it.
    captured = capture_model(
        loaded,
        probe_model(loaded),
        CaptureOptions(mla_latent_cache=False),
        graph_cache=graph_cache(),
    )
    assert captured.graph is not None
    num_strided = 0
    with torch.inference_mode(False), torch.no_grad(), enable_python_dispatcher():
        for node in captured.graph.graph.nodes:
            if node.op not in ("call_function", "call_method") or example(node) is None:
                continue
            args, kwargs = tree_map_only(Node, example, (node.args, node.kwargs))
            if node.op == "call_method":
                result = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                result = node.target(*args, **kwargs)
            assert layout(result) == layout(example(node)), node.format_node()
            num_strided += isinstance(result, torch.Tensor) and not result.is_contiguous()
    assert num_strided > 4


def layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # As expressions: to compare symbolic sizes would add a guard.
        return (expressions(value.shape), expressions(value.stride()), value.dtype)
    return tuple(map(layout, value)) if isinstance(value, (tuple, list)) else None


@pytest.mark.parametrize(
    ("shape", "sizes", "halves", "expected"),
    [
        # Gate, up and the shared expert's gate: 17 outputs, and padding.
        ((4, 8), (5, 5, 1), False, [32]),
        # Gate and up alone: the activation joins their matmul, which is not padded.
        ((4, 8), (5, 5), False, [6, 10]),
        # One layer that is both, and one that is not.
        ((4, 8), (10,), True, [6, 10]),
        ((4, 8), (10,), False, [16]),
        # The rows in another shape.
        ((1, 4, 8), (5, 5, 1), False, [6, 16]),
    ],
)
def test_a_router_joins_what_reads_its_rows(
    shape: tuple[int, ...], sizes: tuple[int, ...], halves: bool, expected: list[int]
) -> None:
    """A router with six experts reads a shared expert's rows through a view."""
    module = torch.nn.ParameterList(torch.randn(size, 8) for size in (6, *sizes))
    graph = Graph()
    nodes = [graph.placeholder(name) for name in ("rows", *(f"w{i}" for i in range(len(module))))]
    given = [torch.randn(4, 8), *module]
    for node, tensor in zip(nodes, given, strict=True):
        node.meta["example_value"] = tensor.detach().to("meta")
    rows, *weights = nodes
    view = graph.call_method("reshape", (rows, shape))
    results = [
        graph.call_function(torch.nn.functional.linear, (source, weight))
        for source, weight in zip([view] + [rows] * len(sizes), weights, strict=True)
    ]
    if halves:
        results[-1] = graph.call_method("chunk", (results[-1], 2, -1))
    graph.output(tuple(results))
    expected_results = GraphModule({}, copy.deepcopy(graph))(*given)
    with recording(graph) as recorder:
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                recorder.record(node)
    gm = GraphModule({}, graph)
    context = PassContext(module, {w.name: p for w, p in zip(weights, module, strict=True)})
    assert merge_linear(gm, context) == len(module) - len(expected)
    gm.graph.lint()
    gm.recompile()
    found = [len(tensor_of(linear_operands(node)[1])) for node in gm.graph.nodes if is_linear(node)]
    assert found == expected
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"][1:]
    constants = {name: context.constants[name] for name in names}
    torch.testing.assert_close(gm(given[0], *constants.values()), expected_results)


def test_originals_are_views_and_hold_no_second_copy() -> None:
    loaded = load_model(tiny_model("qwen2"))
    specs = probe_model(loaded)
    num_bytes = _storage_bytes(loaded.module)
    captured = capture_model(loaded, specs)
    assert _storage_bytes(loaded.module) == num_bytes
    attention = loaded.module.model.layers[0].self_attn  # type: ignore[union-attr]
    big = attention.q_proj.weight.untyped_storage()
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        pointer = projection.weight.data_ptr()
        assert big.data_ptr() <= pointer < big.data_ptr() + big.nbytes()
        assert projection.weight.requires_grad
    # A second capture of the same model finds the weights merged and moves nothing.
    pointer = attention.k_proj.weight.data_ptr()
    again = capture_model(loaded, specs)
    assert again.rewrites == captured.rewrites
    assert attention.k_proj.weight.data_ptr() == pointer
    # Tied embeddings stay tied.
    head, embedding = loaded.module.lm_head, loaded.module.get_input_embeddings()
    assert head.weight is embedding.weight  # type: ignore[union-attr]


def test_weight_updates_reach_the_graph() -> None:
    loaded = load_model(tiny_model("llama"))
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    results = []
    for _ in range(2):
        runner = ModelRunner(captured, block_size=16, num_blocks=8)
        requests = make_requests([[4, 8, 15, 16, 23, 42]], 6)
        drive(runner, requests, block_size=16, num_blocks=8, chunk=8)
        results.append(requests[0].output_token_ids)
        with torch.no_grad():
            for layer in loaded.module.model.layers:  # type: ignore[union-attr]
                layer.self_attn.v_proj.weight.mul_(-1.5)
                layer.mlp.up_proj.weight.mul_(0.3)
    assert results[0] != results[1]


def test_merge_storage_in_inference_mode_leaves_trainable_parameters() -> None:
    parameters = [torch.nn.Parameter(torch.randn(n, 4)) for n in (2, 3)]
    with torch.inference_mode():
        whole = merge_storage(parameters)
    assert not whole.is_inference()
    (parameters[0].sum() * 2).backward()
    assert parameters[0].grad is not None
    assert consecutive_views(parameters) is not None
    assert consecutive_views(parameters[::-1]) is None


def _storage_bytes(module: torch.nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in module.parameters()}
    return sum(storage.nbytes() for storage in storages.values())
