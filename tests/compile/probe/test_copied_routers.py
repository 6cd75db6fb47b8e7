"""Routers that multiply with a copy of their weight.

The probe must not take the copy's address for a dependence on the forward pass. It must still
detect a real dependence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagespec.compile.load.load import load_model
from pagespec.compile.probe import cheap_passes, probe
from pagespec.compile.probe.probe import probe_model, probe_with_reach
from pagespec.errors import UnsupportedModelError
from tests.support.models import tiny_model

_MANY = {"n_routed_experts": 64, "num_experts_per_tok": 6, "num_hidden_layers": 6}


def in_bfloat16(arch: str, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = tiny_model(arch, **options).to(torch.bfloat16)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("arch", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1"])
def test_routers_that_copy_their_weight_do_not_depend_on_the_pass(arch: str) -> None:
    """The copy has another address in each pass; in float32 there is no copy."""
    loaded = load_model(in_bfloat16(arch, **_MANY))
    _, reach = probe_with_reach(loaded)
    assert reach.longest > 96


class Router(nn.Module):
    """A router whose input has an error that differs per row and per length."""

    def __init__(self, inner: nn.Module, error: float) -> None:
        super().__init__()
        self.inner, self.error = inner, error

    def forward(self, hidden_states: Tensor) -> Any:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1]).float()
        generator = torch.Generator().manual_seed(len(flat))
        noise = 1 + self.error * torch.randn(flat.shape, generator=generator)
        return self.inner((flat * noise).to(hidden_states.dtype).view_as(hidden_states))


def with_errors(arch: str, error: float) -> PreTrainedModel:
    model = in_bfloat16(arch, **_MANY)
    for layer in model.model.layers:  # type: ignore[union-attr]
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate = Router(layer.mlp.gate, error)
    return model


def _unsupported(*_: Any) -> Tensor:
    raise UnsupportedModelError("not replaced")


@pytest.mark.parametrize(("arch", "is_whole"), [("deepseek_v3", True), ("deepseek_v2", False)])
def test_a_router_that_depends_on_the_pass_is_refused(
    arch: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where matmuls are replaced: the experts are equal, but their weights are not."""
    monkeypatch.setattr(probe, "_check_token_independence", lambda *_: None)
    if is_whole:
        monkeypatch.setattr(cheap_passes._CheapMatmuls, "_mixed", _unsupported)
    with pytest.raises(UnsupportedModelError, match="number of tokens in a pass"):
        probe_model(load_model(with_errors(arch, 0.5)))
