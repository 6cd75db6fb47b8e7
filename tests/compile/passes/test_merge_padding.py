"""Merged weights are padded with rows of zeros until a row of results is whole 16-byte units.

The padding changes no result and stays in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from pagespec.compile.captured_model import capture_model
from pagespec.compile.fx.nodes import calls, is_linear, tensor_of
from pagespec.compile.fx.recorder import recording
from pagespec.compile.load.load import load_model
from pagespec.compile.passes import PassContext
from pagespec.compile.passes.merge_linear import consecutive_views, merge_linear, merge_storage
from pagespec.compile.probe.probe import probe_model
from pagespec.compile.weights import is_stand_in, stand_in
from pagespec.kernels.matmul.quantized.quantized_weight import Int8Weight
from tests.support.captures import graph_cache
from tests.support.models import tiny_model

IN = 8


def layers(sizes: Sequence[int], dtype: torch.dtype, has_bias: bool) -> nn.ModuleList:
    made = nn.ModuleList(nn.Linear(IN, size, bias=has_bias) for size in sizes)
    return made.to(dtype)


def captured(module: nn.ModuleList) -> tuple[GraphModule, PassContext]:
    """A graph of layers that read the same rows, before the pass."""
    graph = Graph()
    rows = graph.placeholder("rows")
    dtype = next(module.parameters()).dtype
    rows.meta["example_value"] = torch.empty(5, IN, dtype=dtype, device="meta")
    constants: dict[str, Tensor] = {}
    operands: list[list[Node]] = []
    for i, layer in enumerate(module):
        operands.append([rows])
        for name, parameter in layer.named_parameters():
            node = graph.placeholder(f"{name}_{i}")
            node.meta["example_value"] = parameter.detach().to("meta")
            constants[node.name] = parameter
            operands[-1].append(node)
    graph.output(tuple(graph.call_function(F.linear, tuple(given)) for given in operands))
    with recording(graph) as recorder:
        for node in graph.nodes:
            if is_linear(node):
                recorder.record(node)
    return GraphModule({}, graph), PassContext(module, constants)


def merged(module: nn.ModuleList) -> tuple[GraphModule, PassContext]:
    gm, context = captured(module)
    assert merge_linear(gm, context) == len(module) - 1
    gm.graph.lint()
    gm.recompile()
    return gm, context


def run(gm: GraphModule, context: PassContext, rows: Tensor) -> Any:
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"][1:]
    return gm(rows, *(context.constants[name] for name in names))


def split_sizes(gm: GraphModule) -> list[int]:
    (split,) = (node for node in gm.graph.nodes if calls(node, "split"))
    assert tensor_of(split.args[0]).shape[-1] == sum(split.args[1])  # type: ignore[union-attr]
    return split.args[1]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("sizes", "dtype", "padding"),
    [
        # A router, two projections of a shared expert, and its gate.
        ((6, 5, 5, 1), torch.float32, 15),
        ((6, 5, 5, 1), torch.bfloat16, 15),
        ((8, 24, 24, 1), torch.bfloat16, 7),
        # Whole units of 16 bytes of one dtype, and not of the other.
        ((4, 3, 5), torch.float32, 0),
        ((4, 3, 5), torch.bfloat16, 4),
        ((16, 4, 4), torch.bfloat16, 0),
        # Gate and up by themselves.
        ((5, 5), torch.bfloat16, 0),
        ((5, 6), torch.bfloat16, 5),
    ],
)
def test_results_are_those_of_the_layers(
    sizes: tuple[int, ...], dtype: torch.dtype, padding: int, has_bias: bool
) -> None:
    module = layers(sizes, dtype, has_bias)
    rows = torch.randn(5, IN).to(dtype)
    expected = tuple(layer(rows) for layer in module)
    gm, context = merged(module)
    assert split_sizes(gm) == [*sizes, padding][: len(sizes) + (padding > 0)]
    assert sum(calls(node, "getitem") for node in gm.graph.nodes) == len(sizes)
    for name, whole in context.constants.items():
        placeholder = next(node for node in gm.graph.nodes if node.name == name)
        assert tensor_of(placeholder).shape == whole.shape  # type: ignore[union-attr]
        assert len(whole) == sum(sizes) + padding
        assert whole.is_contiguous()
        assert whole[sum(sizes) :].count_nonzero() == 0
        assert whole.untyped_storage().nbytes() == whole.nbytes
    found = run(gm, context, rows)
    torch.testing.assert_close(found, expected)
    # Parameters are views: what is written to them is what the graph reads.
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(-2)
    torch.testing.assert_close(run(gm, context, rows), tuple(-2 * part for part in expected))


def test_a_second_capture_finds_the_same_memory() -> None:
    module = layers((6, 5, 5, 1), torch.bfloat16, has_bias=True)
    _, first = merged(module)
    before = {name: whole.data_ptr() for name, whole in first.constants.items()}
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    gm, again = merged(module)
    assert split_sizes(gm) == [6, 5, 5, 1, 15]
    assert {name: whole.data_ptr() for name, whole in again.constants.items()} == before
    assert all(len(whole) == 32 for whole in again.constants.values())
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers


def views(fused: Tensor, sizes: Sequence[int]) -> list[nn.Parameter]:
    """Parameters in the memory of a fused tensor, which may continue beyond them."""
    parts = fused[: sum(sizes)].split(list(sizes))
    return [nn.Parameter(part) for part in parts]


def test_a_storage_that_ends_too_early_is_not_read_beyond_its_end() -> None:
    for rest in (0, 2):
        fused = torch.randn(7 + rest, IN)
        parameters = views(fused, (4, 3))
        assert consecutive_views(parameters) is not None
        assert consecutive_views(parameters, 3) is None
        whole = merge_storage(parameters, 3)
        assert torch.equal(whole[:7], fused[:7])
        assert whole[7:].count_nonzero() == 0
        assert whole.data_ptr() == parameters[0].data_ptr() != fused.data_ptr()


def test_the_end_is_counted_from_where_the_parameters_begin() -> None:
    fused = torch.randn(11, IN)
    parameters = views(fused[2:], (4, 2))
    assert consecutive_views(parameters, 3) is not None
    assert consecutive_views(parameters, 4) is None


def test_padding_rows_may_hold_anything() -> None:
    """The storage is not moved: no node reads the columns of the padding."""
    fused = torch.randn(10, IN)
    fused[7:] = torch.nan
    parameters = views(fused, (4, 3))
    whole = merge_storage(parameters, 3)
    assert (whole.data_ptr(), len(whole)) == (fused.data_ptr(), 10)
    assert consecutive_views(parameters[::-1], 3) is None


def test_a_stand_in_has_the_shape_alone() -> None:
    module = layers((6, 5), torch.bfloat16, has_bias=False)
    for layer in module:
        layer.weight.data = stand_in(layer.weight.shape, torch.bfloat16)  # type: ignore[arg-type]
    gm, context = merged(module)
    assert split_sizes(gm) == [6, 5, 5]
    (whole,) = context.constants.values()
    assert is_stand_in(whole)
    assert whole.shape == (16, IN)


def test_what_is_held_quantised_is_not_padded() -> None:
    module = layers((6, 5), torch.float32, has_bias=True)
    gm, context = captured(module)
    for layer in module:
        size = len(layer.weight)  # type: ignore[arg-type]
        values = torch.ones(size, IN, dtype=torch.int8)
        context.quantized[id(layer.weight)] = Int8Weight(values, torch.ones(size, 1))
    assert merge_linear(gm, context) == 1
    assert split_sizes(gm) == [6, 5]
    assert [len(whole) for whole in context.constants.values()] == [11, 11]
    (held,) = context.quantized.values()
    assert held is not None
    assert len(held.values) == 11


def test_a_model_is_padded_once() -> None:
    """Gate and up of 48, a router of 8 experts and a gate: 105 outputs."""
    settings = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    loaded = load_model(tiny_model("qwen2_moe", num_experts=8, **settings).to(torch.bfloat16))
    state = {name: value.clone() for name, value in loaded.module.state_dict().items()}
    specs = probe_model(loaded)
    found = []
    for _ in range(2):
        graph = capture_model(loaded, specs, graph_cache=graph_cache()).graph
        assert graph is not None
        widths = [split.args[1] for split in graph.graph.nodes if calls(split, "split")]
        assert widths.count([48, 48, 8, 1, 7]) == 2
        # Groups of whole units are as they were.
        assert sum(sum(sizes) % 16 == 0 for sizes in widths) == len(widths)
        found.append({name: p.data_ptr() for name, p in loaded.module.named_parameters()})
    assert found[0] == found[1]
    for name, value in loaded.module.state_dict().items():
        assert torch.equal(value, state[name])
