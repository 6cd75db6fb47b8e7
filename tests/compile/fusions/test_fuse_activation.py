"""Near misses of an activation times a projection are not fused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from tests.support.captures import capture_plain, first, fuse


def _silu_in_place(gm: GraphModule) -> None:
    first(gm, "silu").kwargs = {"inplace": True}


def _silu_read_twice(gm: GraphModule) -> None:
    node = first(gm, "silu")
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.neg, (node,))


def _silu_times_a_number(gm: GraphModule) -> None:
    node = first(gm, "silu")
    next(iter(node.users)).args = (node, 2.0)


@pytest.mark.parametrize("change", [_silu_in_place, _silu_read_twice, _silu_times_a_number])
def test_what_is_not_quite_the_pattern_is_left_alone(change: Callable[[GraphModule], None]) -> None:
    _, counts = fuse(capture_plain("llama", torch.bfloat16), change)
    assert tuple(counts.values()) == (2, 5, 1)
