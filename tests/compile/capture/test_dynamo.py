"""The inputs on which a traced graph depends."""

from __future__ import annotations

import pytest
import torch

from pagespec.compile.capture import dynamo
from pagespec.compile.fx.nodes import example
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from tests.support.models import tiny_model


# The last has layers of both kinds, as the one before it has.
@pytest.mark.parametrize(
    "arch", ["llama", pytest.param("gemma3_text", marks=pytest.mark.nightly), "gpt_oss"]
)
def test_the_sizes_of_the_caches_are_not_in_the_graph(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(tiny_model(arch))
    specs = probe_model(loaded)
    found = []
    for num_blocks, block_size in ((12, 17), (31, 64)):
        sizes = {**dynamo.EXAMPLE_SIZES, "num_blocks": num_blocks, "block_size": block_size}
        monkeypatch.setattr(dynamo, "EXAMPLE_SIZES", sizes)
        traced = dynamo.trace(loaded, specs)
        nodes = list(traced.gm.graph.nodes)
        caches = [node for node in nodes if traced.sources.get(node.name, ("",))[0] == "cache"]
        assert len(caches) == 2 * len(specs)
        for cache in caches:
            value = example(cache)
            assert isinstance(value, torch.Tensor)
            assert value.shape[:2] == (num_blocks + 1, block_size)
        # What no cache is, with its symbolic sizes.
        values = [str(example(node)) for node in nodes if node not in caches]
        texts = [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs)) for n in nodes]
        found.append((texts, values, traced.sources))
    assert found[0] == found[1]
