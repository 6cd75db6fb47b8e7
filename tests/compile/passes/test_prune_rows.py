"""The pruned form of graphs: where it begins, that unknown calls stop it, and that it gives the
very bits of the whole form, prompts' log-probabilities among them."""

from __future__ import annotations

import importlib.util
import operator
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pagespec import LLM, SamplingParams
from pagespec.compile import captured_model
from pagespec.compile.captured_model import CapturedModel, capture_model
from pagespec.compile.model.load import load_model
from pagespec.compile.model.loaded import Shard
from pagespec.compile.model.probe import probe_model
from pagespec.compile.model.tensor_parallel import shard_model
from pagespec.compile.passes import gpu_passes
from pagespec.compile.passes.prune_rows import prune_rows
from pagespec.compile.passes.split_head import keep_rows, take_rows
from pagespec.kernels.collectives.communicator import LoneRank, communicator_scope
from tests.compile.fx.test_spec import JOINING
from tests.support.captures import graph_cache
from tests.support.models import VOCAB_SIZE, tiny_model

has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="passes of a GPU need Triton")
SOURCES = {"ids": ("input", "input_ids"), "rows": ("input", "logits_to_keep")}
T, S, H = 1009, 5, 8  # no size of the model is a multiple of T


def capture(arch: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> CapturedModel:
    is_cpu = stage == "cpu"
    if not is_cpu:
        monkeypatch.setattr(captured_model, "cpu_passes", lambda _: gpu_passes())
    loaded = load_model(tiny_model(arch).to(torch.bfloat16), max_model_len=512)
    return capture_model(
        loaded,
        probe_model(loaded),
        transparent=is_cpu,
        attention=None if is_cpu else JOINING,
        graph_cache=graph_cache(),
    )


def names(nodes: Any) -> list[str]:
    return [getattr(node.target, "__name__", str(node.target)) for node in nodes]


def behind(gm: GraphModule) -> tuple[list[str], list[str]]:
    """What is called behind the gather of rows, and what the gathers read."""
    taken = [node for node in gm.graph.nodes if node.target is take_rows]
    found = set(taken)
    for node in gm.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes) and node.op != "output":
            found.add(node)
    order = [node for node in gm.graph.nodes if node in found and node not in taken]
    return names(order), names(node.args[0] for node in taken)


# What computes the last layer's part behind its attention, or its recurrence.
@pytest.mark.parametrize(
    ("arch", "stage", "needed", "stopped_at"),
    [
        ("qwen3", "cpu", {"linear": 4, "elementwise": 1}, {"attend", "add"}),
        ("gemma3_text", "cpu", {"linear": 4, "rsqrt": 4}, {"attend", "add"}),
        ("gpt2", "cpu", {"product": 3, "layer_norm": 2, "linear": 1}, {"attend", "add"}),
        ("qwen3_moe", "cpu", {"linear": 3, "sort": 1, "grouped_mm": 2}, {"attend", "add"}),
        ("gpt_oss", "cpu", {"linear": 3, "sort": 1, "grouped_mm": 2}, {"attend", "add"}),
        ("deepseek_v3", "cpu", {"head_values": 1, "grouped_mm": 2}, {"attend", "add"}),
        ("lfm2", "cpu", {"linear": 4}, {"short_conv", "getitem", "add"}),
        ("qwen3_next", "cpu", {"grouped_mm": 2}, {"getitem", "attend", "add"}),
        ("qwen3", "gpu", {"linear": 3, "linear_silu_mul": 1, "add_rms_norm": 2}, None),
        ("gemma3_text", "gpu", {"linear": 4, "rms_norm": 2, "add_rms_norm": 2}, None),
        ("qwen3_moe", "gpu", {"route_rows": 1, "grouped_mm": 2, "combine_add_rms_norm": 1}, None),
        ("gpt_oss", "gpu", {"sort_by_expert": 1, "grouped_mm": 2, "combine_experts": 1}, None),
        ("deepseek_v3", "gpu", {"head_values": 1, "spread_rows": 1, "combine_experts": 1}, None),
        ("lfm2", "gpu", {"linear": 3, "linear_silu_mul": 1}, {"short_conv", "getitem"}),
    ],
)
def test_where_it_begins(
    arch: str,
    stage: str,
    needed: dict[str, int],
    stopped_at: set[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if stage == "gpu" and not has_triton:
        pytest.skip("passes of a GPU need Triton")
    captured = capture(arch, stage, monkeypatch)
    assert captured.pruned is not None
    assert captured.graph is not None
    called, read = behind(captured.pruned)
    assert {name: called.count(name) for name in needed} == needed
    attention = {"fused_rope_attention", "attention"}
    if stopped_at is None:
        assert len(read) == 2
        assert attention & set(read)
        assert "getitem" in read
    else:
        assert set(read) == stopped_at
    assert not {"attend", "short_conv", "kv_store", *attention} & set(called)
    # The whole form has its gather where the model has it, and no other.
    assert not any(node.target is take_rows for node in captured.graph.graph.nodes)
    assert names(captured.graph.graph.nodes).count("keep_rows") == 1
    assert captured.head is not None


@needs_triton
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_sums_over_ranks_are_made_of_kept_rows(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_model, "cpu_passes", lambda _: gpu_passes())
    model = tiny_model(arch, num_hidden_layers=2).to(torch.bfloat16)
    loaded, shard = load_model(model), Shard(0, 2)
    loaded = replace(loaded, shard=shard, vocab_sizes=shard_model(model, shard))
    communicator = LoneRank(0, 2)
    with communicator_scope(communicator):
        specs = probe_model(loaded)
        captured = capture_model(
            loaded, specs, transparent=False, attention=JOINING, communicator=communicator
        )
    assert captured.pruned is not None
    called, read = behind(captured.pruned)
    assert called.count("linear_norm") + called.count("all_reduce_norm") == 2
    assert set(read) == {"fused_rope_attention", "getitem"}


# Graphs made by hand ------------------------------------------------------------------------------

Layer = Callable[[Callable[..., Node], Node, Node], Node]


def graph_of(layer: Layer) -> GraphModule:
    """A layer, a linear layer of all tokens, and the head."""
    graph = Graph()
    examples = {
        "ids": torch.empty(1, T, dtype=torch.int64, device="meta"),
        "rows": torch.empty(S, dtype=torch.int64, device="meta"),
        "x": torch.empty(1, T, H, device="meta"),
        "weight": torch.empty(H, H, device="meta"),
        "head": torch.empty(11, H, device="meta"),
    }
    nodes = {}
    for name, example in examples.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["example_value"] = example

    def add(function: Any, *args: Any, **kwargs: Any) -> Node:
        make = graph.call_method if isinstance(function, str) else graph.call_function
        node = make(function, args, kwargs)

        def value(n: Node) -> Any:
            return n.meta["example_value"]

        given, named = torch.fx.map_arg((args, kwargs), value)
        with torch.device("meta"):
            run = getattr(given[0], function) if isinstance(function, str) else function
            node.meta["example_value"] = run(
                *(given[1:] if run is not function else given), **named
            )
        return node

    linear = torch.nn.functional.linear
    hidden = add(linear, nodes["x"], nodes["weight"])  # read by itself: it may well be of the tail
    hidden = add(linear, layer(add, hidden, nodes["weight"]), nodes["weight"])
    cut = add(keep_rows, hidden, nodes["rows"])
    graph.output((add(linear, cut, nodes["head"]), hidden))
    return GraphModule({}, graph)


SOURCES_BY_HAND = {**SOURCES, "x": ("input", "position_ids")}
ROW_WISE: dict[str, Layer] = {
    "norm": lambda add, x, w: add(torch.nn.functional.rms_norm, x, [H]),
    "softmax of a row": lambda add, x, w: add(torch.softmax, x, -1),
    "heads": lambda add, x, w: add("reshape", add("view", x, 1, -1, 2, 4), 1, -1, H),
    "columns": lambda add, x, w: add("transpose", add("transpose", x, 1, 2), 1, 2),
    "halves": lambda add, x, w: add(
        operator.add,
        x,
        add(operator.getitem, x, (Ellipsis, slice(0, 1))),
    ),
    "in place on its own": lambda add, x, w: add(operator.iadd, add(operator.mul, x, 2.0), 1.0),
}
MIXING: dict[str, Layer] = {
    "sum of all before": lambda add, x, w: add(torch.cumsum, x, 1),
    "softmax over tokens": lambda add, x, w: add(torch.softmax, x, 1),
    "mean of all": lambda add, x, w: add(operator.add, x, add("mean", x, 1, keepdim=True)),
    "all of one number": lambda add, x, w: add(operator.add, x, add("mean", x)),
    "shifted": lambda add, x, w: add(torch.roll, x, 1, 1),
    "unknown": lambda add, x, w: add(torch.sinc, x),
    "largest tokens": lambda add, x, w: add(operator.getitem, add(torch.topk, x, T, 1), 0),
    "of other tokens": lambda add, x, w: add(
        operator.add, x, add(operator.getitem, x, (slice(None), slice(None, 1)))
    ),
    "rows joined": lambda add, x, w: add(
        "reshape", add("transpose", add("reshape", x, 1, H, -1), 1, 2), 1, -1, H
    ),
    "counted": lambda add, x, w: add(operator.mul, x, add("size", x, 1)),
}


def run(gm: GraphModule, rows: Tensor, num_tokens: int) -> Tensor:
    torch.manual_seed(0)
    x, w, head = torch.randn(1, num_tokens, H), torch.randn(H, H), torch.randn(11, H)
    logits: Tensor = gm(torch.zeros(1, num_tokens, dtype=torch.int64), rows, x, w, head)[0]
    return logits


@pytest.mark.parametrize("name", ROW_WISE)
def test_row_wise_calls_are_pruned(name: str) -> None:
    gm = graph_of(ROW_WISE[name])
    pruned = prune_rows(gm, SOURCES_BY_HAND)
    gm.recompile()
    assert pruned is not None
    called, read = behind(pruned)
    assert called.count("linear") == 3
    assert read == ["x"]
    rows = torch.tensor([3, 1000, 3, 0, 77])
    torch.testing.assert_close(run(pruned, rows, T), run(gm, rows, T), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MIXING)
def test_calls_that_mix_rows_stop_it(name: str) -> None:
    gm = graph_of(MIXING[name])
    pruned = prune_rows(gm, SOURCES_BY_HAND)
    gm.recompile()
    assert pruned is not None
    called, read = behind(pruned)
    assert called.count("linear") == 2
    assert read != ["x"]
    rows = torch.tensor([3, 1000, 3, 0, 77])
    torch.testing.assert_close(run(pruned, rows, T), run(gm, rows, T), rtol=1e-5, atol=1e-5)


def test_what_writes_to_memory_of_others_stops_it() -> None:
    """``x`` is changed, which is read before and may be read elsewhere."""

    def layer(add: Callable[..., Node], x: Node, weight: Node) -> Node:
        return add(operator.iadd, add(torch.cumsum, x, 1), 1.0)

    gm = graph_of(layer)
    pruned = prune_rows(gm, SOURCES_BY_HAND)
    assert pruned is not None
    assert behind(pruned) == (["linear", "linear"], ["iadd"])


def test_nothing_is_pruned_where_nothing_is_saved() -> None:
    graph = graph_of(ROW_WISE["norm"]).graph
    cut = next(node for node in graph.nodes if node.target is keep_rows)
    with graph.inserting_before(cut):
        mixed = graph.call_function(torch.cumsum, (cut.args[0], 1))
    mixed.meta["example_value"] = cut.args[0].meta["example_value"]
    cut.update_arg(0, mixed)
    graph.output_node().args = ((graph.output_node().args[0][0], mixed),)
    before = str(graph)
    assert prune_rows(GraphModule({}, graph), SOURCES_BY_HAND) is None
    assert str(graph) == before


# Engines ------------------------------------------------------------------------------------------


class Counted:
    """Lets engines be made with the pruned form or without, and counts its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on, self.num_steps = True, 0
        monkeypatch.setattr(captured_model, "prune_rows", self._prune)

    def _prune(self, gm: GraphModule, *args: Any) -> GraphModule | None:
        pruned = prune_rows(gm, *args) if self.is_on else None
        if pruned is None:
            return None

        def forward(*inputs: Any) -> Any:
            self.num_steps += 1
            return type(pruned).forward(pruned, *inputs)

        pruned.forward = forward  # type: ignore[assignment]
        return pruned


def answers(arch: str, **settings: Any) -> tuple[list[Any], list[Tensor]]:
    """Tokens and log-probabilities of requests that are served beside each other, of which some
    ask for their prompts', and all logits. Prompts are computed in chunks; some keep no row."""
    seen: list[Tensor] = []
    llm = LLM(
        tiny_model(arch),
        **{
            "device": "cpu", "max_model_len": 256, "num_blocks": 96, "max_num_seqs": 4,
            "max_num_batched_tokens": 48, "enable_prefix_caching": False, **settings,
        },
    )  # fmt: skip
    runner: Any = llm._runner
    runner._on_logits = lambda _, logits: seen.append(logits.clone())
    rng = random.Random(3)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (110, 7, 1, 33, 20)]
    asked = [
        SamplingParams(
            temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2,
            prompt_logprobs=1 if number in (0, 3) else None,
        )
        for number in range(len(prompts))
    ]  # fmt: skip
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    found = []
    for output in outputs:
        entries = [*(output.prompt_logprobs or ()), *output.outputs[0].logprobs]
        values = [{t: (e.logprob, e.rank) for t, e in each.items()} for each in entries if each]
        found.append((output.outputs[0].token_ids, values))
    return found, seen


ENGINES = [
    ("qwen3", {}),
    ("qwen3", {"compile": "inductor"}),
    ("gemma3_text", {}),
    ("gpt2", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"compile": "inductor"}),
    ("gpt_oss", {}),
    ("deepseek_v3", {}),
    ("lfm2", {"state_interval": 16}),
    ("qwen3_next", {"state_interval": 16}),
    ("aria_text", {}),
]


@pytest.mark.parametrize(
    ("arch", "settings"), ENGINES, ids=["-".join([a, *map(str, s.values())]) for a, s in ENGINES]
)
def test_bits_are_those_of_the_whole_form(
    arch: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    found, logits = answers(arch, **settings)
    assert counted.num_steps > 3
    num_steps, counted.is_on = counted.num_steps, False
    expected, expected_logits = answers(arch, **settings)
    assert counted.num_steps == num_steps
    assert found == expected
    assert len(logits) == len(expected_logits)
    for own, other in zip(logits, expected_logits, strict=True):
        assert torch.equal(own, other)


def test_wrong_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above finds a pruned form that keeps the rows before."""
    expected, _ = answers("qwen3")
    wrong = lambda x, rows, dim: take_rows(x, (rows - 1).clamp(min=0), dim)  # noqa: E731
    wrong.__module__ = take_rows.__module__
    monkeypatch.setattr("pagespec.compile.passes.prune_rows.take_rows", wrong)
    monkeypatch.setattr("pagespec.compile.passes.split_head.take_rows", wrong)
    found, _ = answers("qwen3")
    assert found != expected


def test_steps_of_one_token_a_row_run_the_whole_form(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    llm = LLM(tiny_model("qwen3"), device="cpu", max_model_len=64, num_blocks=16)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    llm.generate([[5, 6, 7, 8], [9, 10, 11]], params, use_tqdm=False)
    assert counted.num_steps == 1
