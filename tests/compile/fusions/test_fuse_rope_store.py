"""Fusion of rotations and cache writes, with the norms of queries and keys, and near misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from pagespec.compile.fx.nodes import calls
from pagespec.kernels.fused import dispatch as fused
from tests.support.captures import capture_plain, first, fuse


@pytest.mark.parametrize("arch", ["qwen3", "gemma3_text"])
def test_norms_of_queries_and_keys_are_part_of_the_rotation(arch: str) -> None:
    gm, _ = fuse(capture_plain(arch, torch.bfloat16))
    ropes = [node for node in gm.graph.nodes if node.target is fused.norm_rope_store]
    assert ropes
    for node in ropes:
        q_weight, k_weight, eps, form = node.args[0][6:]
        assert "q_norm" in q_weight.name
        assert "k_norm" in k_weight.name
        assert eps == 1e-6
        assert form == ("rounded" if arch == "qwen3" else "plus_one")


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


@pytest.mark.parametrize(
    "change",
    [
        _another_half,
        _halves_swapped,
        _rotated_backwards,
        _keys_by_another_angle,
        _value_written_in_place,
    ],
)
def test_what_is_not_quite_the_pattern_is_left_alone(change: Callable[[GraphModule], None]) -> None:
    _, counts = fuse(capture_plain("llama", torch.bfloat16), change)
    assert tuple(counts.values()) == (1, 5, 2)
