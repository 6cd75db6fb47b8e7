"""Complex tensors stay outside of compiled regions, because Inductor generates no code for them."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from torch.fx import Graph

from pagespec.compile.captured_model import CaptureOptions, capture_model
from pagespec.compile.inductor.regions import find_regions
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from tests.compile.inductor.test_regions import logits_of
from tests.support.captures import graph_cache
from tests.support.models import tiny_model


def test_complex_numbers_bound_a_region() -> None:
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = value = torch.ones(4, 2)
    of_complex = torch.view_as_complex, torch.square, torch.view_as_real
    for target in (torch.exp, torch.neg, *of_complex, torch.sin, torch.cos):
        node, value = graph.call_function(target, (node,)), target(value)
        node.meta["example_value"] = value
    graph.output(node)
    assert [[node.target for node in region.nodes] for region in find_regions(graph)] == [
        [torch.exp, torch.neg],
        [torch.sin, torch.cos],
    ]


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_complex_rotation_computes_the_same() -> None:
    loaded = [load_model(tiny_model("deepseek_v2")) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*complex operators")
        found, expected = (
            logits_of(
                capture_model(
                    model,
                    probe_model(model),
                    CaptureOptions(compile=mode),
                    graph_cache=graph_cache(),
                )
            )
            for model, mode in zip(loaded, ("inductor", "graph"), strict=True)
        )
    assert found.keys() == expected.keys()
    for key, logits in expected.items():
        torch.testing.assert_close(found[key], logits)
