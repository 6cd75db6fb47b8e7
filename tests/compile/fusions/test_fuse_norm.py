"""Fusion of norms, with the residual sum before them, and near misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from pagespec.compile.fx.nodes import calls
from pagespec.kernels.fused import dispatch as fused
from tests.support.captures import capture_plain, first, fuse


@pytest.mark.parametrize(("arch", "num_added"), [("llama", 4), ("gemma3_text", 4), ("gpt_oss", 4)])
def test_residual_sums_are_part_of_the_norms_behind_them(arch: str, num_added: int) -> None:
    gm, _ = fuse(capture_plain(arch, torch.bfloat16))
    called = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert called.count(fused.add_rms_norm) == num_added


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


@pytest.mark.parametrize(
    "change",
    [
        _square_to_cube,
        _mean_of_tokens,
        _rsqrt_read_elsewhere,
        _computed_weight,
        _source_written_in_place,
    ],
)
def test_what_is_not_quite_the_pattern_is_left_alone(change: Callable[[GraphModule], None]) -> None:
    _, counts = fuse(capture_plain("llama", torch.bfloat16), change)
    assert tuple(counts.values()) == (2, 4, 2)
