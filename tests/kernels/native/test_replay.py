"""Recorded calls of native kernels equal direct calls, for any step of their shape."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from pagespec.kernels.native import calls
from pagespec.kernels.native.library import library
from pagespec.kernels.native.replay import Stretch

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built")
WIDTH, NUM_LAYERS = 64, 3


def chain(view: str = "reshape") -> Stretch:
    """Layers of a norm, a gated activation of two halves, and a sum."""
    graph = Graph()
    places = [graph.placeholder(name) for name in ("x", "weight", "size")]
    x, weight, size = places
    residual = x
    for _ in range(NUM_LAYERS):
        pair = graph.call_function(calls.add_rms_norm, (x, residual, weight, 1e-5, "wide"))
        normed, residual = (graph.call_function(operator.getitem, (pair, i)) for i in (0, 1))
        parts = graph.call_method("split", (normed, WIDTH // 2, -1))
        halves = [graph.call_function(operator.getitem, (parts, i)) for i in (0, 1)]
        gated = graph.call_function(calls.act_mul, (*halves, "silu"))
        both = graph.call_function(calls.act_mul, (normed, residual, "silu"))
        x = graph.call_method(view, (both, (1, size, WIDTH)))
    graph.output((gated, both))
    return Stretch(graph, [True, False, False], "chain")


def by_torch(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual = x
    for _ in range(NUM_LAYERS):
        normed, residual = calls.add_rms_norm(x, residual, weight, 1e-5, "wide")
        gated = calls.act_mul(*normed.split(WIDTH // 2, -1), "silu")
        x = calls.act_mul(normed, residual, "silu")
    return gated, x


def test_replays_equal_calls() -> None:
    stretch, weights = chain(), [torch.randn(WIDTH), torch.randn(WIDTH)]
    earlier: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for step in range(24):
        num_tokens = (2, 7, 3, 100)[step % 4]
        x, weight = torch.randn(1, num_tokens, WIDTH), weights[step // 8 % 2]
        found, expected = stretch(x, weight, num_tokens), by_torch(x, weight)
        earlier.append((found, expected))
    # Results of earlier steps are not written to again.
    for found, expected in earlier:
        assert all(map(torch.equal, found, expected))
    recordings = stretch._recordings
    assert len(recordings) == 2 * 3
    assert None not in recordings.values()


def test_inputs_of_another_layout_and_copies_are_not_replayed() -> None:
    stretch, weight = chain(), torch.randn(WIDTH)
    for _ in range(3):
        x = torch.randn(1, WIDTH, 5).transpose(1, 2)
        assert all(map(torch.equal, stretch(x, weight, 5), by_torch(x, weight)))
    assert list(stretch._recordings.values()) == [None]

    def cloned(graph: Graph) -> Stretch:
        for node in graph.nodes:
            if node.target == "reshape":
                node.target, node.args = "clone", node.args[:1]
        return Stretch(graph, [True, False, False], "cloned")

    stretch = cloned(chain().graph)
    for _ in range(3):
        x = torch.randn(1, 5, WIDTH)
        assert all(map(torch.equal, stretch(x, weight, 5), by_torch(x, weight)))
    assert list(stretch._recordings.values()) == [None]


def test_few_recordings_are_kept() -> None:
    stretch, weight = chain(), torch.randn(WIDTH)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_tokens in range(1, 60):
            stretch(torch.randn(1, num_tokens, WIDTH), weight, num_tokens)
    assert len(stretch._recordings) == 64


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
