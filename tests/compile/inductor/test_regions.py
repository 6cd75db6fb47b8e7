"""Compiled regions: the expected nodes, one compilation per distinct region, and unchanged results.

Tests of the partitioning use a compiler that runs a region uncompiled. The last tests use Inductor.
"""

from __future__ import annotations

import operator
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from pagespec.compile import captured_model as capture_module
from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.inductor import compile_region, regions
from pagespec.compile.inductor.compile_region import inductor
from pagespec.compile.inductor.regions import compile_regions, find_regions
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.runner.cpu.runner import ModelRunner
from tests.compile.test_captured_model import LogitRecorder, prompts
from tests.support.captures import graph_cache, use_passes
from tests.support.driving import drive, make_requests
from tests.support.models import BY_DAY, tiny_model


class AsItIs:
    """A compiler that only records the regions and the descriptions of their inputs."""

    def __init__(self) -> None:
        self.pieces: list[GraphModule] = []

    def __call__(self, gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.pieces.append(gm)
        assert not any(example is None for example in examples)
        return gm.forward


def captured(
    arch: str, monkeypatch: pytest.MonkeyPatch, compiler: Any = None, **changes: Any
) -> CapturedModel:
    """In "inductor" mode without Inductor; without calls of CPU kernels, as on a GPU."""
    use_passes(monkeypatch, {})
    compile_all = partial(compile_regions, compiler=compiler or AsItIs())
    monkeypatch.setattr(capture_module, "compile_regions", compile_all)
    loaded = load_model(tiny_model(arch, **changes))
    return capture_model(
        loaded, probe_model(loaded), CaptureOptions(compile="inductor"), graph_cache=graph_cache()
    )


def logits_of(captured: CapturedModel) -> dict[tuple[str, int], torch.Tensor]:
    recorder = LogitRecorder()
    runner = ModelRunner(captured, block_size=16, num_blocks=40, on_logits=recorder)
    drive(runner, make_requests(prompts(), 3), block_size=16, num_blocks=40, chunk=10)
    return recorder.logits


@pytest.mark.parametrize("arch", BY_DAY)
def test_a_cut_graph_computes_the_same(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"num_hidden_layers": 2} if arch != "deepseek_v3" else {}
    cut = captured(arch, monkeypatch, **changes)
    specs = probe_model(cut.loaded)  # not those of the captured model, whose cache may be a latent
    whole = capture_model(
        cut.loaded, specs, CaptureOptions(compile="graph"), graph_cache=graph_cache()
    )
    assert cut.rewrites["regions"] > 0
    found, expected = logits_of(cut), logits_of(whole)
    assert found.keys() == expected.keys()
    for key, logits in expected.items():
        assert torch.equal(found[key], logits)


def test_a_size_goes_by_the_symbol_of_the_tensors_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs of equal length have one symbol, and the other stands for it: a region of tensors
    of ``[2 * s, H]`` rows must be shown s itself, which Inductor looks for by its name."""
    given: list[torch.SymInt] = []

    def compiler(gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        given.extend(size for size in examples if isinstance(size, torch.SymInt))
        return gm.forward

    # As on a GPU, where one operation between two matmuls of experts is a region.
    monkeypatch.setattr(regions, "is_on_cpu", lambda values: False)
    captured("qwen3_moe", monkeypatch, compiler, num_hidden_layers=2)
    assert given
    assert all(size.node._expr == size.node.expr for size in given)


def test_layers_share_their_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    two = captured("qwen3", monkeypatch, num_hidden_layers=2)
    five = captured("qwen3", monkeypatch, num_hidden_layers=5)
    assert five.rewrites["regions"] > two.rewrites["regions"]
    assert five.num_compiled == two.num_compiled <= 5


def chain(*targets: Callable[..., Any] | str, device: str = "cpu") -> Graph:
    """x, then each target (a function or a method of no arguments) applied to the result before."""
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = value = torch.ones(4, 4, device=device)
    for target in targets:
        if isinstance(target, str):
            node, value = graph.call_method(target, (node,)), getattr(value, target)()
        else:
            node, value = graph.call_function(target, (node,)), target(value)
        node.meta["example_value"] = value
    graph.output(node)
    return graph


def weigh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, torch.ones(4, 4, device=x.device))


weigh.__module__ = "pagespec.kernels.of_a_test"


def test_opaque_calls_bound_a_region_and_views_alone_are_none() -> None:
    graph = chain(torch.exp, torch.neg, weigh, "t", "t", weigh, torch.sin, torch.cos)
    regions = find_regions(graph)
    assert [[node.target for node in region.nodes] for region in regions] == [
        [torch.exp, torch.neg],
        [torch.sin, torch.cos],
    ]


def test_parts_of_a_split_do_not_keep_a_region_from_being_one() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = value = torch.ones(4, 6, device="meta")
    split = graph.call_function(torch.split, (x, 2, 1))
    parts = [graph.call_function(operator.getitem, (split, i)) for i in range(3)]
    values = torch.split(value, 2, 1)
    for part, one in zip(parts, values, strict=True):
        part.meta["example_value"] = one
    # The first part is read by what is compiled, the others elsewhere.
    shifted = graph.call_function(torch.exp, (parts[0],))
    negated = graph.call_function(torch.neg, (shifted,))
    for node in (shifted, negated):
        node.meta["example_value"] = values[0]
    graph.output((negated, *parts[1:]))
    (region,) = find_regions(graph)
    assert region.nodes == [shifted, negated]


def test_a_view_that_has_to_copy_is_an_operation() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = value = torch.ones(4, 6, device="meta")[:, :4]
    flat = graph.call_method("reshape", (x, (16,)))
    negated = graph.call_function(torch.neg, (flat,))
    for node in (flat, negated):
        node.meta["example_value"] = value.reshape(16)
    graph.output(negated)
    (region,) = find_regions(graph)
    assert region.nodes == [flat, negated]
    x.meta["example_value"] = torch.ones(4, 4, device="meta")
    flat.meta["example_value"] = x.meta["example_value"].reshape(16)
    (region,) = find_regions(graph)
    assert region.nodes == [negated]


@pytest.mark.parametrize("is_written", [False, True])
def test_a_copy_is_made_where_it_is_read(is_written: bool) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    value = torch.ones(4, 6)[:, :4]
    flat = graph.call_method("reshape", (x, (16,)))
    weighed = graph.call_function(weigh, (x,))
    if is_written:
        graph.call_method("mul_", (x, 2.0)).meta["example_value"] = value
    negated = graph.call_function(torch.neg, (flat,))
    summed = graph.call_function(torch.exp, (negated,))
    graph.output((summed, weighed))
    x.meta["example_value"] = weighed.meta["example_value"] = value
    for node in (flat, negated, summed):
        node.meta["example_value"] = value.reshape(16)
    expected = GraphModule({}, graph)(value.clone())
    gm = GraphModule({}, graph)
    compiler = AsItIs()
    compile_regions(gm, compiler)
    called = [node.target for piece in compiler.pieces for node in piece.graph.nodes]
    assert ("reshape" in called) != is_written
    for found, right in zip(gm(value.clone()), expected, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize(("device", "expected"), [("cpu", 1), ("meta", 2)])
def test_on_a_cpu_one_operation_stays_as_it_is(device: str, expected: int) -> None:
    graph = chain(torch.exp, torch.neg, weigh, "t", torch.sin, "t", weigh, device=device)
    assert len(find_regions(graph)) == expected


def test_a_copy_alone_stays_as_it_is() -> None:
    graph = Graph()
    values = {"ids": torch.zeros(3, dtype=torch.int64), "table": torch.ones(8, 4)}
    nodes = {name: graph.placeholder(name) for name in values}
    for name, value in values.items():
        nodes[name].meta["example_value"] = value.to("meta")
    rows = graph.call_function(torch.nn.functional.embedding, (nodes["ids"], nodes["table"]))
    weighed = graph.call_function(weigh, (rows,))
    some = graph.call_function(operator.getitem, (weighed, nodes["ids"]))
    again = graph.call_function(weigh, (some,))
    for node in (rows, weighed, some, again):
        node.meta["example_value"] = torch.ones(3, 4, device="meta")
    graph.output(again)
    assert find_regions(graph) == []
    with graph.inserting_after(rows):
        scaled = graph.call_function(torch.mul, (rows, 2.0))
    scaled.meta["example_value"] = rows.meta["example_value"]
    weighed.args = (scaled,)
    assert [region.nodes for region in find_regions(graph)] == [[rows, scaled]]


def test_equal_pieces_with_other_numbers_are_distinct() -> None:
    def build(power: float) -> GraphModule:
        graph = Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.ones(2, 4)
        nodes = [x]
        for exponent in (2.0, power):
            negated = graph.call_function(torch.neg, (nodes[-1],))
            raised = graph.call_function(torch.pow, (negated, exponent))
            for node in (negated, raised):
                node.meta["example_value"] = torch.ones(2, 4)
            weighed = graph.call_function(weigh, (raised,))
            weighed.meta["example_value"] = torch.ones(2, 4)
            nodes.append(weighed)
        graph.output(nodes[-1])
        return GraphModule({}, graph)

    x = torch.rand(2, 4)
    for power, num_distinct in ((2.0, 1), (3.0, 2)):
        gm = build(power)
        expected = gm(x)
        assert compile_regions(gm, AsItIs()) == (2, num_distinct)
        assert torch.equal(gm(x), expected)


def _computes(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.exp() + y, (x - y).sum(-1)


def _returns_a_view_of_what_it_took(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.view(-1), x + y


def _returns_memory_twice(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x + y
    return total, total.view(-1)


def _writes_what_it_took(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x.add_(y)
    return (y * 2,)


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor needs a C++ compiler"
)


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each compiled graph: whether it may be called without AOTAutograd's wrappers."""
    is_plain = compile_region._is_plain
    found = []

    def record(*arguments: Any) -> bool:
        found.append(is_plain(*arguments))
        return found[-1]

    monkeypatch.setattr(compile_region, "_is_plain", record)
    return found


@needs_compiler
@pytest.mark.parametrize(
    ("function", "is_direct"),
    [
        (_computes, True),
        (_returns_a_view_of_what_it_took, False),
        (_returns_memory_twice, False),
        (_writes_what_it_took, False),
    ],
)
def test_wrappers_go_only_where_they_do_nothing(
    function: Callable[..., Any], is_direct: bool, verdicts: list[bool]
) -> None:
    with torch.inference_mode():
        found_in, expected_in = ([torch.rand(3, 8), torch.ones(3, 8)] for _ in range(2))
        expected_in[0].copy_(found_in[0])
        examples = [torch.empty(3, 8), torch.empty(3, 8)]
        compiled = inductor(torch.fx.symbolic_trace(function), examples)
        found, expected = compiled(*found_in), function(*expected_in)
    assert verdicts == [is_direct]
    # A wrapper is a function of AOTAutograd's or Inductor's; ours is of this package.
    assert compiled.__module__.startswith("pagespec") == is_direct
    assert len(found) == len(expected)
    for values in (zip(found, expected, strict=True), zip(found_in, expected_in, strict=True)):
        for one, other in values:
            torch.testing.assert_close(one, other)

    def shared(results: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> list[list[int]]:
        memories = [t.untyped_storage().data_ptr() for t in (*results, *taken)]
        return [[i for i, m in enumerate(memories) if m == memory] for memory in memories]

    assert shared(found, found_in) == shared(expected, expected_in)


@needs_compiler
def test_compiled_rows_are_the_same_in_any_batch(verdicts: list[bool]) -> None:
    loaded = load_model(tiny_model("llama", num_hidden_layers=1))
    captured = capture_model(loaded, probe_model(loaded), CaptureOptions(compile="inductor"))
    assert len(verdicts) == captured.num_compiled > 0
    assert all(verdicts)
    together = logits_of(captured)
    for request in make_requests(prompts(), 3):
        recorder = LogitRecorder()
        runner = ModelRunner(captured, block_size=16, num_blocks=40, on_logits=recorder)
        drive(runner, [request], block_size=16, num_blocks=40, chunk=64)
        assert recorder.logits
        for key, logits in recorder.logits.items():
            assert torch.equal(logits, together[key])


@pytest.mark.parametrize("is_own", [False, True])
def test_what_changes_a_tensor_from_outside_bounds_a_region(is_own: bool) -> None:
    """Of ``out.add_(x)`` and a view of ``out``, both from outside, a region has two inputs."""
    graph = Graph()
    x = graph.placeholder("x")
    out = graph.call_function(weigh, (x,))
    changed = graph.call_function(torch.exp, (out,)) if is_own else out
    side = graph.call_function(torch.sin, (x,))
    added = graph.call_method("add_", (changed, side))
    seen = graph.call_method("view", (changed, 16))
    result = graph.call_function(torch.cos, (seen,))
    for node in graph.nodes:
        node.meta["example_value"] = torch.ones(16 if node in (seen, result) else (4, 4)).to("meta")
    graph.output(result)
    assert any(added in region.nodes for region in find_regions(graph)) == is_own


@needs_compiler
def test_experts_that_are_added_in_place_compute_the_same() -> None:
    """Llama 4 adds the routed experts' results to the shared expert's in place."""
    loaded = [load_model(tiny_model("llama4_text")) for _ in range(2)]
    found, expected = (
        logits_of(capture_model(model, probe_model(model), CaptureOptions(compile=mode)))
        for model, mode in zip(loaded, ("inductor", "graph"), strict=True)
    )
    assert found.keys() == expected.keys()
    for key, logits in expected.items():
        torch.testing.assert_close(found[key], logits)
