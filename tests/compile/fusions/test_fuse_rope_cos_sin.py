"""Tables of cosines and sines are fused into one call without a changed bit; near misses stay."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.fusions.fuse_rope_cos_sin import fuse_rope_cos_sin
from pagespec.compile.fx.nodes import calls
from pagespec.compile.passes import PassContext
from pagespec.kernels.fused.dispatch import rope_table
from tests.support.captures import capture_plain, first, generate

# gemma3 has two kinds of layers with a table each; gpt_oss does not double its angles.
EXPECTED = {"llama": 1, "gpt_neox": 1, "gemma3_text": 2, "deepseek_v3": 1, "gpt_oss": 0}


def fused_copy(captured: CapturedModel) -> tuple[GraphModule, int]:
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    count = fuse_rope_cos_sin(gm, PassContext(captured.loaded.module, {}))
    gm.graph.lint()
    gm.recompile()
    return gm, count


@pytest.mark.parametrize(
    ("arch", "dtype"), [("llama", torch.float32), *((arch, torch.bfloat16) for arch in EXPECTED)]
)
def test_finds_the_tables_and_changes_no_bit(arch: str, dtype: torch.dtype) -> None:
    captured = capture_plain(arch, dtype)
    gm, count = fused_copy(captured)
    assert count == EXPECTED[arch]
    assert [node.target for node in gm.graph.nodes].count(rope_table) == count
    if count:
        assert not any(calls(node, "cos", "sin") for node in gm.graph.nodes)
        assert captured.graph is not None
        for before, after in zip(
            generate(captured, captured.graph), generate(captured, gm), strict=True
        ):
            assert torch.equal(before, after)


def columns(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As up to transformers 5.17."""
    angles = (frequencies[None, :, None] * positions[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * 2.0, angles.sin() * 2.0


def rows(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As in transformers 5.24."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * 2.0, angles.sin() * 2.0


def rounded(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """To the dtype of another tensor."""
    cos, sin = rows(frequencies, positions)
    return cos.type_as(frequencies.half()), sin.type_as(frequencies.half())


class _Noting(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["example_value"] = super().run_node(n)
        return n.meta["example_value"]


@pytest.mark.parametrize("tables", [columns, rows, rounded])
@pytest.mark.parametrize(("num_positions", "count"), [((1, 5), 1), ((2, 5), 0)])
def test_both_forms_of_packed_tokens_are_found(
    tables: Callable[..., Any], num_positions: tuple[int, int], count: int
) -> None:
    frequencies = torch.rand(4)
    positions = torch.arange(10)[: math.prod(num_positions)].view(num_positions) * 1000
    gm = torch.fx.symbolic_trace(tables)
    _Noting(gm).run(frequencies, positions)
    found = fuse_rope_cos_sin(gm, PassContext(nn.Module(), {}))
    gm.graph.lint()
    gm.recompile()
    assert found == count
    expected = tables(frequencies, positions)
    assert all(map(torch.equal, gm(frequencies, positions), expected))


def _other_halves(gm: GraphModule) -> None:
    node = first(gm, "cat")
    angles = node.args[0][0]
    with gm.graph.inserting_before(node):
        other = gm.graph.call_function(torch.neg, (angles,))
    node.args = ((angles, other),)


def _another_dim(gm: GraphModule) -> None:
    first(gm, "cat").kwargs = {"dim": 1}


def _another_factor(gm: GraphModule) -> None:
    node = first(gm, "sin")
    scaled = next(iter(node.users))
    scaled.args = (node, 2.0)


def _angles_written_in_place(gm: GraphModule) -> None:
    node = first(gm, "cat")
    with gm.graph.inserting_after(node):
        gm.graph.call_method("mul_", (node, 2.0))


def _positions_of_another_kind(gm: GraphModule) -> None:
    product = first(gm, "cat").args[0][0]
    if calls(product, "transpose"):
        product = product.args[0]
    wide = next(n for n in product.args if calls(n, "float"))
    wide.args[0].meta["example_value"] = wide.args[0].meta["example_value"].int()


@pytest.mark.parametrize(
    "change",
    [
        _other_halves,
        _another_dim,
        _another_factor,
        _angles_written_in_place,
        _positions_of_another_kind,
    ],
)
def test_what_is_not_quite_the_pattern_is_left_alone(
    change: Callable[[GraphModule], None],
) -> None:
    captured = capture_plain("llama", torch.bfloat16)
    assert fused_copy(captured)[1] == 1
    assert captured.graph is not None
    change(captured.graph)
    assert fused_copy(captured)[1] == 0
