"""Latents are cached if the graph is that of latent attention, and only then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from pagespec.compile.capture.graph_json import Traced
from pagespec.compile.captured_model import CaptureOptions, capture_model
from pagespec.compile.fx.nodes import calls, calls_op, is_linear, last_dim_slice
from pagespec.compile.kv_cache import allocate_kv_caches, kv_bytes_per_block
from pagespec.compile.load.load import load_model
from pagespec.compile.passes import PassContext
from pagespec.compile.passes.cache_latents import cache_latents
from pagespec.compile.probe.probe import probe_model
from pagespec.kernels.attention.attention_spec import AttentionSpec
from pagespec.kernels.mla import dispatch as mla
from tests.support.captures import generate, graph_cache
from tests.support.models import tiny_model
from tests.support.tiny_configs import LATENT

# The calls that are latent, of all attention calls.
MATCHED = {"deepseek_v3": 2, "kimi_linear": 1, **dict.fromkeys(LATENT, 2)}


@pytest.mark.parametrize("arch", MATCHED)
def test_models_with_latent_attention_cache_latents(arch: str) -> None:
    loaded = load_model(tiny_model(arch))
    specs = probe_model(loaded)
    captured = capture_model(loaded, specs, graph_cache=graph_cache())
    assert captured.rewrites["cache_latents"] == MATCHED[arch] == len(specs)
    for spec in captured.specs:
        assert (spec.num_q_heads, spec.num_kv_heads, spec.k_dim, spec.v_dim) == (4, 1, 24, 16)
        assert spec.is_latent
    assert [spec.scale for spec in captured.specs] == [spec.scale for spec in specs]
    assert not [source for source in captured.sources if source[::2] == ("cache", 1)]
    # The weights are read where they lie.
    weights = {p.untyped_storage().data_ptr() for p in loaded.module.parameters()}
    constants = [source[1] for source in captured.sources if source[0] == "constant"]
    views = [constant for constant in constants if constant.dim() == 3]
    assert len([v for v in views if v.untyped_storage().data_ptr() in weights]) >= 2 * len(specs)


def test_without_the_setting_heads_are_cached() -> None:
    loaded = load_model(tiny_model("deepseek_v3"))
    specs = probe_model(loaded)
    captured = capture_model(
        loaded, specs, CaptureOptions(mla_latent_cache=False), graph_cache=graph_cache()
    )
    assert captured.rewrites["cache_latents"] == 0
    assert captured.specs == tuple(specs)


def test_a_vector_is_kept_once() -> None:
    """DeepSeek-V3: 1,152 bytes per token and layer in bfloat16, instead of 81,920."""
    heads = AttentionSpec(0, 128, 128, 192, 128, 1.0)
    latent = replace(heads, num_kv_heads=1, k_dim=576, v_dim=512, is_latent=True)
    assert kv_bytes_per_block(torch.bfloat16, [latent], 1) == 2 * (512 + 64)
    assert kv_bytes_per_block(torch.bfloat16, [heads], 1) == 2 * 128 * (192 + 128)
    for dtype in (torch.bfloat16, torch.uint8):
        caches = allocate_kv_caches([latent, heads], 5, 16, dtype, "cpu")
        assert [len(call) for call in caches] == [1, 2]
        num_bytes = sum(cache.nbytes for call in caches for cache in call)
        assert num_bytes == 6 * kv_bytes_per_block(dtype, [latent, heads], 16)


def traced() -> tuple[Traced, PassContext]:
    """One layer, as it was traced."""
    loaded = load_model(tiny_model("deepseek_v3", num_hidden_layers=1))
    specs = probe_model(loaded)
    found, _ = graph_cache().get(loaded, specs)
    calls = {name: s[1] for name, s in found.sources.items() if s[::2] == ("cache", 0)}
    context = PassContext(
        loaded.module, found.constants, specs=list(specs), calls=calls, caches_latents=True
    )
    return found, context


def _the(graph: Graph, test: Callable[[Node], bool]) -> Node:
    (found,) = filter(test, graph.nodes)
    return found


def _linear(graph: Graph) -> Node:
    return _the(graph, lambda n: is_linear(n) and "kv_b_proj" in str(n.args[1]))


def _attention(graph: Graph) -> Node:
    return _the(graph, lambda n: calls_op(n, "paged_attention"))


def _store(graph: Graph) -> Node:
    return _the(graph, lambda n: calls_op(n, "kv_store"))


def _keys(graph: Graph) -> Node:
    return _the(graph, lambda n: calls(n, "new_empty") and any(map(last_dim_slice, n.users)))


def _between(graph: Graph, node: Node, *call: Any) -> None:
    """Insert a call on the result of ``node`` before all its readers."""
    users = list(node.users)
    with graph.inserting_after(node):
        new = graph.call_method(call[0], (node, *call[1:]))
    new.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, new)


def bias(graph: Graph, context: PassContext) -> None:
    linear = _linear(graph)
    linear.args = (*linear.args[:2], linear.args[1])


def quantised(graph: Graph, context: PassContext) -> None:
    context.quantized[id(context.constant(_linear(graph).args[1]))] = None


def window(graph: Graph, context: PassContext) -> None:
    _attention(graph).update_arg(8, 24)


def sinks(graph: Graph, context: PassContext) -> None:
    context.specs[0] = replace(context.specs[0], has_sinks=True)


def other_heads(graph: Graph, context: PassContext) -> None:
    context.specs[0] = replace(context.specs[0], v_dim=11)


def scaled_projection(graph: Graph, context: PassContext) -> None:
    _between(graph, _linear(graph), "mul", 2.0)


def scaled_values(graph: Graph, context: PassContext) -> None:
    _between(graph, _store(graph).args[1].args[0].args[0], "mul", 2.0)


def keys_of_another_part(graph: Graph, context: PassContext) -> None:
    parts = [n.args[1] for n in graph.nodes if calls(n, "copy_")]
    left = next(part for part in parts if calls(part, "getitem"))
    _the(graph, lambda n: calls(n, "copy_") and n.args[1] is left).update_arg(
        1, _store(graph).args[1].args[0].args[0]
    )


def rotated_part_first(graph: Graph, context: PassContext) -> None:
    for copy in [n for n in graph.nodes if calls(n, "copy_")]:
        cut = copy.args[0]
        begin = last_dim_slice(cut)[1]  # type: ignore[index]
        new = slice(8, None) if begin == 0 else slice(None, 8)
        cut.update_arg(1, (Ellipsis, new))


def rotated_part_of_each_head(graph: Graph, context: PassContext) -> None:
    node = _the(graph, lambda n: calls(n, "expand") and any(calls(u, "copy_") for u in n.users))
    node.target = "repeat"


def read_before_it_is_written(graph: Graph, context: PassContext) -> None:
    keys = _keys(graph)
    squeezed = next(user for user in keys.users if calls(user, "squeeze"))
    keys.append(squeezed)


def another_reader_of_the_keys(graph: Graph, context: PassContext) -> None:
    with graph.inserting_before(_store(graph)):
        graph.call_method("add_", (_keys(graph), 1.0))


def another_reader_of_the_cache(graph: Graph, context: PassContext) -> None:
    attention = _attention(graph)
    with graph.inserting_after(attention):
        graph.node_copy(attention)


def latents_changed_in_place(graph: Graph, context: PassContext) -> None:
    latent = _linear(graph).args[0]
    with graph.inserting_after(_linear(graph)):
        graph.call_method("mul_", (latent, 2.0))


def not_asked_for(graph: Graph, context: PassContext) -> None:
    context.caches_latents = False


NEAR_MISSES = [
    bias,
    quantised,
    window,
    sinks,
    other_heads,
    scaled_projection,
    scaled_values,
    keys_of_another_part,
    rotated_part_first,
    rotated_part_of_each_head,
    read_before_it_is_written,
    another_reader_of_the_keys,
    another_reader_of_the_cache,
    latents_changed_in_place,
    not_asked_for,
]


@pytest.mark.parametrize("change", NEAR_MISSES, ids=lambda change: change.__name__)
def test_a_graph_that_differs_stays_as_it_is(
    change: Callable[[Graph, PassContext], None],
) -> None:
    found, context = traced()
    change(found.gm.graph, context)
    specs = list(context.specs)
    before = [(node.op, node.target, node.args) for node in found.gm.graph.nodes]
    assert cache_latents(found.gm, context) == 0
    assert [(node.op, node.target, node.args) for node in found.gm.graph.nodes] == before
    assert context.specs == specs


def test_the_unchanged_graph_is_rewritten() -> None:
    found, context = traced()
    graph = found.gm.graph
    assert cache_latents(found.gm, context) == 1
    graph.lint()
    targets = [node.target for node in graph.nodes]
    for target in (mla.store_latent, mla.latent_query, mla.attention, mla.head_values):
        assert targets.count(target) == 1
    assert not any(calls(node, "new_empty", "copy_") for node in graph.nodes)
    assert not any(calls_op(n, "kv_store") or calls_op(n, "paged_attention") for n in graph.nodes)


def test_keys_made_by_cat_are_known() -> None:
    """As other versions of the model's code write them."""
    found, context = traced()
    graph = found.gm.graph
    keys = _keys(graph)
    copies = [n for n in graph.nodes if calls(n, "copy_")]
    parts = tuple(copy.args[1] for copy in copies)
    with graph.inserting_after(copies[-1]):
        joined = graph.call_function(torch.cat, (parts,), {"dim": -1})
    joined.meta = dict(keys.meta)
    next(user for user in keys.users if calls(user, "squeeze")).update_arg(0, joined)
    for node in [*copies, *(copy.args[0] for copy in copies), keys]:
        graph.erase_node(node)
    assert cache_latents(found.gm, context) == 1


def test_logits_are_those_of_expanded_heads() -> None:
    """In float32, within 1e-5 of the largest logit: the order of summation differs."""
    found = []
    for latent in (True, False):
        loaded = load_model(tiny_model("deepseek_v3"))
        captured = capture_model(
            loaded,
            probe_model(loaded),
            CaptureOptions(mla_latent_cache=latent),
            graph_cache=graph_cache(),
        )
        assert captured.graph is not None
        found.append(torch.cat(generate(captured, captured.graph)[:5]))
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[1].abs().max()
    assert not torch.equal(*found)
