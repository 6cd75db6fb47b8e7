"""Heads repeated for the delta rule are passed to it once; near misses are unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from pagespec.compile.fx.nodes import calls, calls_op
from pagespec.compile.fx.recorder import recording
from pagespec.compile.passes import COMMON_PASSES, PassContext
from pagespec.compile.passes.share_heads import share_heads
from tests.support.captures import capture_plain, first


def traced(arch: str) -> tuple[GraphModule, PassContext]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(COMMON_PASSES, "share_heads")
        captured = capture_plain(arch, torch.bfloat16)
    assert captured.graph is not None
    gm = GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    if not repeats(gm):
        _repeat(gm)
    return gm, PassContext(captured.loaded.module, {})


def _repeat(gm: GraphModule) -> None:
    """The repetition that transformers before 5.24 wrote for its delta rule."""
    with recording(gm.graph) as results:
        for node in recurrences(gm):
            for i, squeezed in enumerate(node.args[:2]):
                with gm.graph.inserting_before(node):
                    given = (squeezed.args[0], 2)
                    repeated = gm.graph.call_method("repeat_interleave", given, {"dim": 2})
                    results.record(repeated)
                    again = gm.graph.call_method("squeeze", (repeated, 0))
                    results.record(again)
                node.update_arg(i, again)
    gm.graph.eliminate_dead_code()


def recurrences(gm: GraphModule) -> list[Any]:
    return [node for node in gm.graph.nodes if calls_op(node, "delta_rule")]


def repeats(gm: GraphModule) -> list[Any]:
    return [node for node in gm.graph.nodes if calls(node, "repeat_interleave")]


@pytest.mark.parametrize("arch", ["qwen3_next", "qwen3_5_text"])
def test_repeated_heads_are_shared(arch: str) -> None:
    gm, context = traced(arch)
    assert len(repeats(gm)) == 2 * len(recurrences(gm)) > 0
    assert share_heads(gm, context) == len(recurrences(gm))
    gm.graph.lint()
    assert not repeats(gm)
    for node in recurrences(gm):
        query, key, value = (argument.meta["example_value"] for argument in node.args[:3])
        assert query.shape[1] == key.shape[1] == value.shape[1] // 2


def _keys_alone(gm: GraphModule) -> None:
    squeezed = recurrences(gm)[0].args[0]
    squeezed.args = (squeezed.args[0].args[0], 0)


def _other_dimension(gm: GraphModule) -> None:
    first(gm, "repeat_interleave").kwargs = {"dim": 3}


def _written(gm: GraphModule) -> None:
    source = first(gm, "repeat_interleave").args[0]
    with gm.graph.inserting_after(source):
        gm.graph.call_method("mul_", (source, 2.0))


@pytest.mark.parametrize("change", [_keys_alone, _other_dimension, _written])
def test_near_misses_are_left(change: Callable[[GraphModule], None]) -> None:
    gm, context = traced("qwen3_5_text")
    change(gm)
    assert share_heads(gm, context) == len(recurrences(gm)) - 1
    assert repeats(gm)
