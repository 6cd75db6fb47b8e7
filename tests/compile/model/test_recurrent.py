"""Recurrences of models: found, replaced where models call them, and rejected if unknown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagespec import InvalidInputError, UnsupportedModelError
from pagespec.compile.kv_cache import bytes_per_slot
from pagespec.compile.load.load import load_model
from pagespec.compile.model.attention import attention_implementation
from pagespec.compile.model.current_step import RecurrentCall
from pagespec.compile.model.local_calls import LOCAL
from pagespec.compile.probe.probe import probe_model
from tests.support.models import tiny_model


def _home(model: PreTrainedModel) -> Any:
    return sys.modules[type(model).__module__]


def test_finds_calls_in_order_with_their_states() -> None:
    loaded = load_model(tiny_model("falcon_h1"))
    assert [spec.call for spec in probe_model(loaded)] == [0, 1]
    assert [(spec.call, spec.kind, spec.state_shape) for spec in loaded.recurrent] == [
        (0, "short_conv", (3, 128)),
        (1, "ssd_scan", (8, 8, 12)),
        (2, "short_conv", (3, 128)),
        (3, "ssd_scan", (8, 8, 12)),
    ]
    assert bytes_per_slot(loaded.recurrent, "cpu") == 2 * 4 * (3 * 128 + 8 * 8 * 12)


def test_a_short_convolution_has_a_state_in_the_dtype_of_the_model() -> None:
    loaded = load_model(tiny_model("lfm2"), dtype="bfloat16")
    assert len(probe_model(loaded)) == 1
    assert {(spec.kind, spec.state_dtype) for spec in loaded.recurrent} == {
        ("short_conv", "bfloat16")
    }


def test_models_without_attention_need_no_positions_but_a_longest_context() -> None:
    model = tiny_model("mamba2")
    with pytest.raises(InvalidInputError, match="names none") as refused:
        load_model(model)
    assert refused.value.field == "max_model_len"
    loaded = load_model(model, max_model_len=300)
    assert probe_model(loaded) == []
    assert loaded.max_position_embeddings == 300


def _with(**changed: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper that passes other arguments to a mixer's function."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*args, **{**kwargs, **changed})

    return wrap


@pytest.mark.parametrize(
    ("arch", "name", "changed", "reason"),
    [
        ("lfm2", "causal_conv1d_fn", {"seq_idx": torch.zeros(1, 8)}, "takes 'seq_idx'"),
        ("lfm2", "causal_conv1d_fn", {"activation": "tanh"}, "the activation 'tanh'"),
        ("lfm2", "causal_conv1d_fn", {"dilation": 2}, "takes dilation = 2"),
        (
            "qwen3_next",
            "torch_chunk_gated_delta_rule",
            {"initial_state": torch.zeros(1, 4, 8, 16)},
            "takes 'initial_state'",
        ),
        (
            "qwen3_next",
            "torch_chunk_gated_delta_rule",
            {"cu_seqlens": torch.zeros(2)},
            "takes 'cu_seqlens'",
        ),
        ("mamba2", "mamba2_chunk_scan", {"z": torch.zeros(1)}, "takes 'z'"),
        ("mamba2", "mamba2_chunk_scan", {"D": torch.zeros(8, 12)}, "over shapes"),
    ],
)
def test_refuses_calls_with_what_is_not_known(
    arch: str, name: str, changed: dict[str, Any], reason: str
) -> None:
    model = tiny_model(arch)
    loaded = load_model(model, max_model_len=512)
    mixer = next(m for m in model.modules() if any("conv" in n for n, _ in m.named_children()))
    forward, home = mixer.forward, _home(model)

    def changed_forward(*args: Any, **kwargs: Any) -> Any:
        before = getattr(home, name)
        setattr(home, name, _with(**changed)(before))
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(home, name, before)

    mixer.forward = changed_forward  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match=reason):
        probe_model(loaded)


def test_a_function_with_other_parameters_is_not_taken_for_the_one_known_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("lfm2")
    original = _home(model).causal_conv1d_fn

    def other(hidden_states: Tensor, weight: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        out: Tensor = original(hidden_states, weight, *rest, **kwargs)
        return out

    monkeypatch.setattr(_home(model), "causal_conv1d_fn", other)
    with pytest.raises(UnsupportedModelError, match="attention calls through AttentionInterface"):
        probe_model(load_model(model))


def test_models_get_their_own_functions_back() -> None:
    model = tiny_model("lfm2")
    home = _home(model)
    before = home.causal_conv1d_fn
    ids = torch.arange(8).unsqueeze(0)
    seen: list[str] = []

    def note(call: RecurrentCall) -> Tensor:
        seen.append(call.kind)
        assert call.tensors[0] is not None
        return call.tensors[0]

    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        functions = LOCAL._replace(recurrence=note)
        with attention_implementation(model, functions):
            with attention_implementation(model, functions):
                assert home.causal_conv1d_fn is not before
            model(input_ids=ids, use_cache=False)
        assert home.causal_conv1d_fn is before
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    assert seen == ["short_conv"] * 2
