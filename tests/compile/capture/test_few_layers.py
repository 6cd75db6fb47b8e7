"""A graph built from a trace of a few layers equals a trace of all layers, or is not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from pagespec.compile.capture import dynamo, few_layers
from pagespec.compile.capture.dynamo import trace
from pagespec.compile.capture.few_layers import find_groups, trace_layers
from pagespec.compile.capture.graph_cache import GraphCache
from pagespec.compile.capture.graph_json import Traced, decode
from pagespec.compile.captured_model import capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.model.loaded import LoadedModel, named_tensors
from pagespec.compile.probe.probe import probe_model
from pagespec.kernels.attention.attention_spec import AttentionSpec
from tests.support.models import tiny_model

NUM_LAYERS = 6


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers of each trace."""
    found: list[int] = []

    def traced(loaded: LoadedModel, specs: Any, fields: Any) -> Traced:
        layers = [m for m in loaded.module.modules() if isinstance(m, GradientCheckpointingLayer)]
        found.append(len(layers))
        return trace(loaded, specs, fields)

    for module in (few_layers, dynamo):
        monkeypatch.setattr(module, "trace", traced)
    return found


@pytest.fixture
def change_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, Callable[..., Any]], None]:
    """Make a class of modules compute ``change(module, results)``."""

    def replace(kind: Any, change: Callable[..., Any]) -> None:
        forward = kind.forward

        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            return change(self, forward(self, *args, **kwargs))

        monkeypatch.setattr(kind, "forward", changed)

    return replace


def probed(arch: str = "llama", **changes: Any) -> tuple[LoadedModel, list[AttentionSpec]]:
    depth = "n_layer" if arch == "gpt2" else "num_hidden_layers"
    loaded = load_model(tiny_model(arch, **{depth: NUM_LAYERS}, **changes))
    return loaded, probe_model(loaded)


def description(traced: Traced) -> list[Any]:
    """All that a graph says but the names of nodes: where inputs come from, what is called on what,
    and of each result its layout, memory and identity."""
    places = {node: place for place, node in enumerate(traced.gm.graph.nodes)}
    numbers: dict[int, int] = {}

    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return type(value), str(value)
        memory = numbers.setdefault(value.untyped_storage()._cdata, len(numbers))
        itself = numbers.setdefault(id(value), len(numbers))
        layout = str((value.shape, value.stride(), value.storage_offset()))
        kind = type(value), isinstance(value, torch.nn.Parameter), value.requires_grad
        return layout, value.dtype, value.device, kind, value.is_inference(), memory, itself

    def source(node: Node) -> Any:
        if node.name in traced.constants:
            return id(traced.constants[node.name])
        return traced.sources.get(node.name)

    return [
        (
            *(node.op, source(node) if node.op == "placeholder" else node.target),
            str(map_arg((node.args, node.kwargs), lambda n: f"node {places[n]}")),  # type: ignore[arg-type, return-value]
            [of(leaf) for leaf in tree_leaves(node.meta.get("example_value"))],
        )
        for node in traced.gm.graph.nodes
    ]


# In the last two models, the first layers have something more than the others: sizes that all
# layers need, or dense matmuls. The very last model has both.
@pytest.mark.parametrize(
    "arch",
    [
        "llama",
        pytest.param("qwen3", marks=pytest.mark.nightly),
        "gpt2",
        pytest.param("qwen3_moe", marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", marks=pytest.mark.nightly),
    ],
)
def test_the_graph_is_that_of_all_layers(arch: str) -> None:
    loaded, specs = probed(arch)
    before = [name for name, _ in loaded.module.named_parameters()]
    found = trace_layers(loaded, specs)
    assert found is not None
    made, data = found
    assert [name for name, _ in loaded.module.named_parameters()] == before
    assert description(made) == description(trace(loaded, specs))
    tensors = dict(named_tensors(loaded.module))
    again = decode(data, tensors)
    assert description(again) == description(made)


_S, _F, _L = "sliding_attention", "full_attention", "linear_attention"
# Windows; delta rules and an attention; attention beside a scan; no attention at all. Layers, how
# many of them are traced, and their types.
GROUPED: dict[str, tuple[int, int, list[str] | None]] = {
    "gpt_oss": (12, 6, [_S, _F] * 6),
    "gemma3_text": (27, 12, [_S, *[_S, _S, _F] * 8, _S, _S]),
    "qwen3_next": (12, 6, [_L, _F] * 6),
    "lfm2": (12, 6, ["conv", _F] * 6),
    "falcon_h1": (8, 3, None),
    "mamba2": (8, 3, None),
}


def grouped(arch: str) -> tuple[LoadedModel, list[AttentionSpec]]:
    num_layers, _, types = GROUPED[arch]
    given = {"layer_types": types} if types else {}
    model = tiny_model(arch, num_hidden_layers=num_layers, **given)
    loaded = load_model(model, max_model_len=128)
    return loaded, probe_model(loaded)


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=() if arch in ("gpt_oss", "qwen3_next") else pytest.mark.nightly)
        for arch in GROUPED
    ],
)
def test_groups_of_layers_are_repeated(arch: str, depths: list[int]) -> None:
    loaded, specs = grouped(arch)
    found = trace_layers(loaded, specs)
    assert found is not None
    assert depths == [GROUPED[arch][1]]
    assert description(found[0]) == description(trace(loaded, specs))


def test_a_recurrent_layer_that_computes_something_else_by_its_number_is_found(
    change_forward: Callable[..., None],
) -> None:
    """The layer looks like the others and is in a group that is not traced."""
    change_forward(
        Qwen3NextGatedDeltaNet, lambda layer, out: out * 1.5 if layer.layer_idx == 6 else out
    )
    assert trace_layers(*grouped("qwen3_next")) is None


@pytest.mark.parametrize(
    ("forms", "num_first", "expected"),
    [
        ("aaaaaa", 2, (0, 1, 6, 2)),
        ("baaaaaaa", 3, (1, 1, 7, 3)),
        ("aaaaa", 2, None),  # two left out
        ("ab" * 6, 2, (0, 2, 6, 2)),
        ("abab" + "ba" * 8, 2, (4, 2, 8, 2)),
        ("ab" * 5, 2, None),  # four of ten left out
        ("aab" * 8 + "aa", 2, (2, 3, 8, 2)),  # "baa" from the third on
        ("aab" * 8 + "aa", 3, None),
        ("abcdefgh", 2, None),
    ],
)
def test_groups_are_those_that_leave_the_most_layers_out(
    forms: str, num_first: int, expected: tuple[int, int, int, int] | None
) -> None:
    groups = find_groups(forms, num_first)
    assert (groups and astuple(groups)) == expected
    if groups is not None:
        last = len(forms) - groups.period
        assert groups.traced == [
            *range(groups.begin + num_first * groups.period),
            *range(last, len(forms)),
        ]
        assert [groups.place(i) for i in groups.traced[-groups.period :]] == [
            (groups.num_groups - 1, number) for number in range(groups.period)
        ]


def test_an_activation_with_an_option_keeps_no_layers_apart() -> None:
    loaded, specs = probed("gemma2", layer_types=["full_attention"] * NUM_LAYERS)
    found = trace_layers(loaded, specs)
    assert found is not None
    assert description(found[0]) == description(trace(loaded, specs))


def test_a_capture_traces_few_layers(tmp_path: Path, depths: list[int]) -> None:
    begun: list[str] = []
    cache = GraphCache(tmp_path, before_trace=lambda: begun.append(f"after {len(depths)}"))
    assert capture_model(*probed(), graph_cache=cache).num_captures == 1
    assert depths == [3]
    assert capture_model(*probed(), graph_cache=cache).num_captures == 0
    assert begun == ["after 0"]
    # Modules that the caller holds are left as they are, and so are few layers.
    loaded = load_model(tiny_model("llama"))
    capture_model(loaded, probe_model(loaded), graph_cache=GraphCache(tmp_path))
    assert depths == [3, 2]


def test_a_layer_that_computes_something_else_by_its_number_is_found(
    change_forward: Callable[..., None],
) -> None:
    """The layer looks like the others, and no traced layer does so."""
    odd = NUM_LAYERS - 3
    change_forward(
        LlamaDecoderLayer, lambda layer, out: out * 1.5 if layer.self_attn.layer_idx == odd else out
    )
    assert trace_layers(*probed()) is None


def test_layers_with_other_numbers_in_them_are_not_repeated() -> None:
    loaded, specs = probed()
    layers: Any = loaded.module.model.layers  # type: ignore[union-attr]
    layers[NUM_LAYERS - 3].input_layernorm.variance_epsilon = 1e-3
    assert trace_layers(loaded, specs) is None


def test_a_hook_of_a_layer_is_not_repeated() -> None:
    loaded, specs = probed()
    layers: Any = loaded.module.model.layers  # type: ignore[union-attr]
    layers[NUM_LAYERS - 3].mlp.register_forward_hook(lambda *_: None)
    assert trace_layers(loaded, specs) is None


def test_a_model_that_needs_all_its_layers_gets_them_back(
    change_forward: Callable[..., None],
) -> None:
    change_forward(LlamaModel, lambda model, out: (model.layers[NUM_LAYERS - 1], out)[1])
    loaded, specs = probed()
    assert trace_layers(loaded, specs) is None
    assert len(loaded.module.model.layers) == NUM_LAYERS  # type: ignore[union-attr, arg-type]
    caches = [s for s in trace(loaded, specs).sources.values() if s[0] == "cache"]
    assert len(caches) == 2 * NUM_LAYERS
