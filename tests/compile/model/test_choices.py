"""Models whose tokens choose experts: rounding is not taken for a dependence on the pass, and a
dependence is not taken for rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagespec.compile.model import cheap_passes, probe, probe_pass
from pagespec.compile.model.choices import Choice, HeldChoices, choices_at, joined_choices
from pagespec.compile.model.load import load_model
from pagespec.compile.model.probe import probe_model, probe_with_reach
from pagespec.errors import UnsupportedModelError
from tests.support.models import tiny_model

_MANY = {"n_routed_experts": 64, "num_experts_per_tok": 6, "num_hidden_layers": 6}


def in_bfloat16(arch: str, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = tiny_model(arch, **options).to(torch.bfloat16)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("arch", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1"])
def test_routers_that_copy_their_weight_do_not_depend_on_the_pass(arch: str) -> None:
    """A copy lies elsewhere in each pass; in float32 there is none."""
    loaded = load_model(in_bfloat16(arch, **_MANY))
    _, reach = probe_with_reach(loaded)
    assert reach.longest > 96


class Router(nn.Module):
    """A router that sees its input with an error, another in each row and at each length."""

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


def test_a_tie_in_a_router_is_no_dependence(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pass of the same tokens in another order, which runs all layers as they are."""
    monkeypatch.setattr(probe, "check_reach", lambda *_: None)
    model = with_errors("deepseek_v3", 2**-9)
    probe_model(load_model(model))
    # Were choices not held, it would be refused for this error.
    monkeypatch.setattr(probe_pass, "choices_at", lambda *_: [])
    with pytest.raises(UnsupportedModelError, match="position_ids are not followed"):
        probe_model(load_model(model))


def _unsupported(*_: Any) -> Tensor:
    raise UnsupportedModelError("not replaced")


@pytest.mark.parametrize(("arch", "is_whole"), [("deepseek_v3", True), ("deepseek_v2", False)])
def test_a_router_that_depends_on_the_pass_is_refused(
    arch: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where matmuls are replaced, experts are alike, but their weights are not."""
    monkeypatch.setattr(probe, "_check_token_independence", lambda *_: None)
    if is_whole:
        monkeypatch.setattr(cheap_passes._CheapMatmuls, "_mixed", _unsupported)
    with pytest.raises(UnsupportedModelError, match="number of tokens in a pass"):
        probe_model(load_model(with_errors(arch, 0.5)))


def choose(mode: HeldChoices, scores: Tensor) -> list[list[int]]:
    with mode:
        values, indices = scores.topk(2, dim=-1)
    assert torch.equal(scores.gather(-1, indices), values)
    return [sorted(row) for row in indices.tolist()]


def test_a_choice_is_held_where_it_is_as_good() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    first = HeldChoices(2, 2e-3)
    assert choose(first, scores) == [[0, 1], [0, 1]]
    # The first token's scores are equal but for rounding; those of the second are others.
    other = torch.tensor([[3.0, 2.0, 2.001], [3.0, 2.0, 2.5]])
    assert choose(HeldChoices(2, 2e-3), other) == [[0, 2], [0, 2]]
    assert choose(HeldChoices(2, 2e-3, first.made), other) == [[0, 1], [0, 2]]
    # Of the tokens behind those that are known nothing is held, nor among other numbers of scores.
    known = choices_at(first.made, torch.tensor([0]))
    tied = torch.tensor([[3.0, 2.0, 2.001], [3.0, 2.0, 2.001]])
    assert choose(HeldChoices(2, 2e-3, known), tied) == [[0, 1], [0, 2]]
    more = torch.cat([tied, tied.new_zeros(2, 1)], 1)
    assert choose(HeldChoices(2, 2e-3, first.made), more) == [[0, 2], [0, 2]]


def test_choices_of_passes_with_other_calls_are_not_joined() -> None:
    one, two = Choice(torch.tensor([[1]]), 4), Choice(torch.tensor([[2]]), 4)
    (joined,) = joined_choices([[one], [two]])
    assert joined.indices.tolist() == [[1], [2]]
    assert joined_choices([[one], [Choice(two.indices, 5)]]) == []
    assert joined_choices([[one], []]) == []
