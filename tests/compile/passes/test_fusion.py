"""The fusion passes find what the structure says, change no bit, and leave all else alone.

On a CPU a fused call runs the operations it replaced, so the bits must be equal. The Triton
kernels behind the same calls are tested in tests/kernels/fused/test_dispatch.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule, Node

from pagespec.compile import captured_model as capture_module
from pagespec.compile.captured_model import CapturedModel, capture_model
from pagespec.compile.fx.nodes import calls
from pagespec.compile.model.load import load_model
from pagespec.compile.model.probe import probe_model
from pagespec.compile.passes import PassContext
from pagespec.compile.passes.fuse_activation import fuse_activation
from pagespec.compile.passes.fuse_norm import fuse_norm
from pagespec.compile.passes.fuse_rope_store import fuse_rope_store
from pagespec.kernels.fused import dispatch as fused
from pagespec.runner.cpu_runner import ModelRunner
from tests.support.driving import drive, make_requests
from tests.support.models import ARCHITECTURES, tiny_model

PASSES = {"rope": fuse_rope_store, "norm": fuse_norm, "activation": fuse_activation}
# (rope and store, norms, activations). A Llama layer: one, two (and one at the end), one. Gemma has
# four norms a layer, gpt2 and gpt_neox have LayerNorm; gpt_oss has an activation of its own;
# deepseek_v3 rotates interleaved pairs of a part of its keys only, and has two norms more a layer
# and a shared expert.
EXPECTED = {
    "llama": (2, 5, 2),
    "qwen3": (1, 3, 1),
    "qwen2": (2, 5, 2),
    "mistral": (1, 3, 1),
    "gemma2": (2, 9, 2),
    "gemma3_text": (2, 9, 2),
    "phi3": (1, 3, 1),
    "gpt2": (0, 0, 0),
    "gpt_neox": (1, 0, 0),
    "gpt_oss": (2, 5, 0),
    "qwen3_moe": (1, 3, 1),
    "deepseek_v3": (0, 9, 3),
}


# One layer is enough where all are alike and others stand for what lies between two.
OVERRIDES = {
    "qwen3": {"num_hidden_layers": 1},
    "qwen2": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 1},
    "phi3": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "gpt_neox": {"num_hidden_layers": 1},
    "qwen3_moe": {"num_hidden_layers": 1},
}
Captures = Callable[[str, torch.dtype], CapturedModel]


def capture_plain(arch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> CapturedModel:
    """A model captured with the passes that every machine runs, and no others."""
    loaded = load_model(tiny_model(arch, **OVERRIDES.get(arch, {})).to(dtype))
    with monkeypatch.context() as patch:
        patch.setattr(capture_module, "CPU_GRAPH_PASSES", {})
        return capture_model(loaded, probe_model(loaded))


@pytest.fixture(scope="module")
def captures() -> Captures:
    """:func:`capture_plain`, once for each architecture and dtype."""
    found: dict[tuple[str, torch.dtype], CapturedModel] = {}

    def get(arch: str, dtype: torch.dtype) -> CapturedModel:
        if (arch, dtype) not in found:
            with pytest.MonkeyPatch.context() as patch:
                found[arch, dtype] = capture_plain(arch, dtype, patch)
        return found[arch, dtype]

    return get


def fuse(captured: CapturedModel) -> tuple[GraphModule, dict[str, int]]:
    """A fused copy of the graph, and the rewrites of each pass."""
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    context = PassContext(captured.loaded.module, {})
    counts = {name: graph_pass(gm, context) for name, graph_pass in PASSES.items()}
    gm.graph.lint()
    gm.recompile()
    return gm, counts


def generate(captured: CapturedModel, gm: GraphModule) -> list[torch.Tensor]:
    """Logits of every step and what is in the caches afterwards."""
    captured = replace(captured, graph=gm)
    seen: list[torch.Tensor] = []
    runner = ModelRunner(
        captured,
        block_size=8,
        num_blocks=12,
        on_logits=lambda plan, logits: seen.append(logits.clone()),
    )
    requests = make_requests([[5, 9, 200, 31, 8, 90, 2, 40, 41], [77, 3, 5]], 5)
    drive(runner, requests, block_size=8, num_blocks=12, chunk=4)
    # The last block is the null block, in which many tokens may write one slot.
    return [*seen, *(cache[:-1].clone() for pair in runner.kv_caches for cache in pair)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_finds_the_structure_and_changes_no_bit(
    arch: str, dtype: torch.dtype, captures: Captures
) -> None:
    captured = captures(arch, dtype)
    plain = captured.graph
    assert plain is not None
    gm, counts = fuse(captured)
    assert tuple(counts.values()) == EXPECTED[arch]
    called = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert called.count(fused.norm_rope_store) == counts["rope"]
    assert called.count(fused.act_mul) == counts["activation"]
    assert called.count(fused.rms_norm) + called.count(fused.add_rms_norm) == counts["norm"]
    if counts["rope"]:
        assert torch.ops.pagespec.kv_store not in called
        assert not any(calls(node, "neg") for node in gm.graph.nodes)
    if counts["norm"]:
        assert not any(calls(node, "rsqrt") for node in gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.target in (fused.norm_rope_store, fused.act_mul, fused.rms_norm):
            assert isinstance(node.meta["example_value"], torch.Tensor)
    expected, found = generate(captured, plain), generate(captured, gm)
    assert len(expected) == len(found)
    for before, after in zip(expected, found, strict=True):
        assert torch.equal(before, after)
    assert torch.cat(expected[: -2 * len(captured.specs)]).count_nonzero() > 0


@pytest.mark.parametrize(("arch", "num_added"), [("llama", 4), ("gemma3_text", 4), ("gpt_oss", 4)])
def test_residual_sums_are_part_of_the_norms_behind_them(
    arch: str, num_added: int, captures: Captures
) -> None:
    gm, _ = fuse(captures(arch, torch.bfloat16))
    called = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert called.count(fused.add_rms_norm) == num_added


@pytest.mark.parametrize("arch", ["qwen3", "gemma3_text"])
def test_norms_of_queries_and_keys_are_part_of_the_rotation(arch: str, captures: Captures) -> None:
    gm, _ = fuse(captures(arch, torch.bfloat16))
    ropes = [node for node in gm.graph.nodes if node.target is fused.norm_rope_store]
    assert ropes
    for node in ropes:
        q_weight, k_weight, eps, form = node.args[0][6:]
        assert "q_norm" in q_weight.name
        assert "k_norm" in k_weight.name
        assert eps == 1e-6
        assert form == ("rounded" if arch == "qwen3" else "plus_one")


def test_fuses_without_merged_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        passes = dict(capture_module.COMMON_PASSES)
        del passes["merge_linear"]
        patch.setattr(capture_module, "COMMON_PASSES", passes)
        captured = capture_plain("qwen3", torch.float32, monkeypatch)
    plain = captured.graph
    assert plain is not None
    gm, counts = fuse(captured)
    assert tuple(counts.values()) == EXPECTED["qwen3"]
    for before, after in zip(generate(captured, plain), generate(captured, gm), strict=True):
        assert torch.equal(before, after)


def first(gm: GraphModule, *names: str) -> Node:
    return next(node for node in gm.graph.nodes if calls(node, *names))


def _square_to_cube(gm: GraphModule) -> None:
    node = first(gm, "pow")
    node.args = (node.args[0], 3)


def _mean_of_tokens(gm: GraphModule) -> None:
    node = first(gm, "mean")
    node.args = (node.args[0], -2)


def _rsqrt_read_elsewhere(gm: GraphModule) -> None:
    node = first(gm, "rsqrt")
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.neg, (node,))


def _computed_weight(gm: GraphModule) -> None:
    node = first(gm, "rsqrt")
    product = next(iter(next(iter(node.users)).users))
    while not calls(product, "mul"):
        product = next(iter(product.users))
    weight = next(arg for arg in product.args if arg.op == "placeholder")
    with gm.graph.inserting_before(product):
        other = gm.graph.call_function(torch.abs, (weight,))
    other.meta["example_value"] = weight.meta["example_value"]
    product.replace_input_with(weight, other)


def _source_written_in_place(gm: GraphModule) -> None:
    embedded = first(gm, "embedding")
    with gm.graph.inserting_before(first(gm, "rsqrt")):
        gm.graph.call_method("mul_", (embedded, 2.0))


def _another_half(gm: GraphModule) -> None:
    negated = first(gm, "neg").args[0]
    negated.args = (negated.args[0], (Ellipsis, slice(1, None, None)))


def _halves_swapped(gm: GraphModule) -> None:
    node = next(iter(first(gm, "neg").users))
    node.args = (tuple(reversed(node.args[0])),)


def _rotated_backwards(gm: GraphModule) -> None:
    node = next(iter(next(iter(next(iter(first(gm, "neg").users)).users)).users))
    node.target = torch.sub


def _keys_by_another_angle(gm: GraphModule) -> None:
    negated = [node for node in gm.graph.nodes if calls(node, "neg")][1]
    product = next(iter(next(iter(negated.users)).users))
    cos, sin = [node for node in gm.graph.nodes if calls(node, "unsqueeze")][:2]
    assert cos is not sin
    product.args = (product.args[0], cos)


def _value_written_in_place(gm: GraphModule) -> None:
    store = first(gm, "kv_store", "kv_store.default")
    with gm.graph.inserting_before(store):
        gm.graph.call_method("mul_", (store.args[1], 2.0))


def _silu_in_place(gm: GraphModule) -> None:
    first(gm, "silu").kwargs = {"inplace": True}


def _silu_read_twice(gm: GraphModule) -> None:
    node = first(gm, "silu")
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.neg, (node,))


def _silu_times_a_number(gm: GraphModule) -> None:
    node = first(gm, "silu")
    next(iter(node.users)).args = (node, 2.0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_square_to_cube, (2, 4, 2)),
        (_mean_of_tokens, (2, 4, 2)),
        (_rsqrt_read_elsewhere, (2, 4, 2)),
        (_computed_weight, (2, 4, 2)),
        (_source_written_in_place, (2, 4, 2)),
        (_another_half, (1, 5, 2)),
        (_halves_swapped, (1, 5, 2)),
        (_rotated_backwards, (1, 5, 2)),
        (_keys_by_another_angle, (1, 5, 2)),
        (_value_written_in_place, (1, 5, 2)),
        (_silu_in_place, (2, 5, 1)),
        (_silu_read_twice, (2, 5, 1)),
        (_silu_times_a_number, (2, 5, 1)),
    ],
)
def test_what_is_not_quite_the_pattern_is_left_alone(
    captures: Captures,
    change: Callable[[GraphModule], None],
    expected: tuple[int, int, int],
) -> None:
    llama = captures("llama", torch.bfloat16)
    assert llama.graph is not None
    gm = GraphModule(llama.graph, copy.deepcopy(llama.graph.graph))
    change(gm)
    context = PassContext(llama.loaded.module, {})
    assert tuple(graph_pass(gm, context) for graph_pass in PASSES.values()) == expected
    gm.graph.lint()
