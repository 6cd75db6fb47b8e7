"""Hidden states between layers as results of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pagespec import UnsupportedModelError
from pagespec.compile.capture.graph_cache import graph_key
from pagespec.compile.load.load import load_model
from pagespec.compile.model.aux_states import decoder_layers
from pagespec.compile.probe.probe import probe_model
from tests.support.drafting import Target
from tests.support.models import VOCAB_SIZE, tiny_model

IDS = [(7 * i + 3) % VOCAB_SIZE for i in range(24)]


@pytest.mark.parametrize("compile", ["graph", "eager"])
@pytest.mark.parametrize("arch", ["llama", "qwen3_next"])
def test_a_step_returns_what_enters_the_layers(arch: str, compile: str) -> None:
    model = tiny_model(arch)
    num_layers = model.config.num_hidden_layers
    layers = (0, num_layers - 1, num_layers)
    found: dict[int, Any] = {}

    def keep(_norm: nn.Module, args: tuple[Any, ...]) -> None:
        found[num_layers] = args[0]

    hook = model.model.norm.register_forward_pre_hook(keep)
    with torch.inference_mode():
        reference = model(torch.tensor([IDS]), output_hidden_states=True)
    hook.remove()
    found |= {n: reference.hidden_states[n] for n in layers[:2]}
    target = Target(replace(load_model(model), aux_layers=layers), compile)
    parts = [target(IDS[:20]), target(IDS[20:], 20)]
    aux = torch.cat([part.aux for part in parts])
    expected = torch.cat([found[n][0] for n in layers], -1)
    torch.testing.assert_close(aux, expected, rtol=1e-4, atol=1e-4)
    hidden = torch.cat([part.hidden for part in parts])
    torch.testing.assert_close(hidden, reference.hidden_states[-1][0], rtol=1e-4, atol=1e-4)


def test_a_model_without_aux_layers_returns_none() -> None:
    assert Target(load_model(tiny_model("llama")))(IDS).aux is None


def test_graphs_are_stored_apart() -> None:
    loaded = load_model(tiny_model("llama"))
    specs = probe_model(loaded)
    keys = {graph_key(replace(loaded, aux_layers=layers), specs) for layers in ((), (0,), (1,))}
    assert len(keys) == 3
    assert None not in keys


def test_layers_that_are_in_no_list_are_refused() -> None:
    loaded = load_model(tiny_model("llama"))
    assert decoder_layers(loaded) is loaded.module.model.layers
    loaded.module.model.layers = nn.ModuleList([loaded.module.model.layers[0]])
    with pytest.raises(UnsupportedModelError, match="layers are not in one list"):
        decoder_layers(loaded)
