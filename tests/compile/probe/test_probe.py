"""Results of the probe, and models that it rejects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pagespec.compile.kv_cache import kv_bytes_per_block
from pagespec.compile.load.load import load_model
from pagespec.compile.model.forward import CACHE_NAMES
from pagespec.compile.probe.cheap_passes import twins
from pagespec.compile.probe.probe import probe_model
from pagespec.errors import InvalidInputError, UnsupportedModelError
from tests.support.models import ARCHITECTURES, VOCAB_SIZE, WINDOW, tiny_model

WINDOWS = {
    "qwen2": [0, WINDOW, WINDOW],
    "mistral": [WINDOW, WINDOW],
    "gemma2": [WINDOW, 0],
    "gemma3_text": [WINDOW, 0],
    "gpt_oss": [WINDOW, 0],
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_finds_what_the_config_says(arch: str) -> None:
    model = tiny_model(arch)
    implementation = model.config._attn_implementation
    loaded = load_model(model)
    specs = probe_model(loaded)
    config = model.config
    assert [spec.window for spec in specs] == WINDOWS.get(arch, [0] * len(specs))
    assert len(specs) == config.num_hidden_layers
    assert all(spec.num_q_heads == config.num_attention_heads for spec in specs)
    assert all(spec.softcap == (3.0 if arch == "gemma2" else 0.0) for spec in specs)
    assert all(spec.has_sinks == (arch == "gpt_oss") for spec in specs)
    if arch == "deepseek_v3":
        assert [(spec.k_dim, spec.v_dim) for spec in specs] == [(24, 12)] * 2
    num_elements = sum(spec.num_kv_heads * (spec.k_dim + spec.v_dim) for spec in specs)
    assert kv_bytes_per_block(loaded.dtype, specs, 16) == num_elements * 16 * 4
    # The caller's model is as it was.
    assert model.config._attn_implementation == implementation
    calls = [m.pagespec_call for m in model.modules() if hasattr(m, "pagespec_call")]
    assert sorted(calls) == list(range(len(specs)))


class Wrapped(nn.Module):
    """An attention module with one additional operation."""

    def __init__(self, inner: nn.Module, what: str) -> None:
        super().__init__()
        self.inner = inner
        self.what = what

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if self.what == "tensor argument":
            kwargs["position_bias"] = torch.zeros(1)
        elif self.what == "number argument":
            kwargs["temperature"] = 2.0
        elif self.what == "own mask":
            kwargs["attention_mask"] = kwargs["attention_mask"] + 1.0
        out, weights = self.inner(hidden_states=hidden_states, **kwargs)
        if self.what in ("twice", "twice, kept once"):
            if self.what == "twice":
                self.inner.layer_idx += 1  # type: ignore[operator]  # its other keys
            else:
                kwargs |= dict.fromkeys(kwargs.keys() & CACHE_NAMES)
            out, weights = self.inner(hidden_states=hidden_states + out, **kwargs)
            self.inner.layer_idx = 1  # type: ignore[assignment]
        elif self.what == "token shift":
            out = out + hidden_states.roll(1, dims=1)
        elif self.what == "longest position":
            out = out + hidden_states * kwargs["position_ids"].max() / 50
        elif self.what == "own positions":
            out = out * (1 + torch.arange(out.shape[1])[None, :, None])
        return out, weights


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("tensor argument", "tensor 'position_bias'"),
        ("number argument", "temperature = 2.0"),
        ("own mask", "mask of its own"),
        ("token shift", "tokens mix outside attention"),
        ("own positions", "position_ids are not followed"),
        ("longest position", "longest position of the batch"),
    ],
)
def test_refuses_attention_it_does_not_know(what: str, reason: str) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1]  # type: ignore[union-attr]
    layer.self_attn = Wrapped(layer.self_attn, what)
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM: .*{reason}"):
        probe_model(load_model(model))


def with_a_module_called_twice(what: str) -> PreTrainedModel:
    """The model's cache has one layer per call."""
    model = tiny_model("llama", num_hidden_layers=3)
    layers = model.model.layers  # type: ignore[union-attr]
    del layers[2]
    layers[1].self_attn = Wrapped(layers[1].self_attn, what)
    return model


def test_refuses_calls_whose_keys_the_cache_does_not_keep() -> None:
    model = with_a_module_called_twice("twice, kept once")
    with pytest.raises(UnsupportedModelError, match="keeps the keys of 2 of its 3 attention calls"):
        probe_model(load_model(model))


def test_calls_of_one_module_are_numbered() -> None:
    model = with_a_module_called_twice("twice")
    layer = model.model.layers[1]  # type: ignore[union-attr]
    assert [spec.call for spec in probe_model(load_model(model))] == [0, 1, 2]
    inner = layer.self_attn.inner
    assert (inner.pagespec_call, inner.pagespec_calls) == (1, (1, 2))
    assert model.model.layers[0].self_attn.pagespec_call == 0  # type: ignore[union-attr]


class Switching(nn.Module):
    """An attention module that computes something else if a pass is long, or a position large."""

    def __init__(self, inner: nn.Module, what: str, threshold: int) -> None:
        super().__init__()
        self.inner = inner
        self.what = what
        self.threshold = threshold

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        positions = kwargs["position_ids"]
        if self.what == "number of tokens":
            hidden_states = hidden_states * (1 + (positions.shape[1] > self.threshold))
        elif self.what == "exact number of tokens":
            hidden_states = hidden_states * (1 + (positions.shape[1] == self.threshold))
        elif self.what == "index in the pass":
            index = torch.arange(positions.shape[1]) // self.threshold
            hidden_states = hidden_states * (1 + index)[None, :, None]
        elif self.what == "scale":
            self.inner.scaling = 0.5 if positions.shape[1] > self.threshold else 0.25
        elif self.what == "longest position":
            hidden_states = hidden_states * (1 + (positions.max() >= self.threshold))
        elif self.what == "being the longest":
            is_longest = (positions == positions.max()) & (positions >= self.threshold)
            hidden_states = hidden_states * (1 + is_longest)[..., None]
        return self.inner(hidden_states=hidden_states, **kwargs)


@pytest.mark.parametrize("where", ["field", "nested", "hidden size"])
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("number of tokens", "number of tokens in a pass"),
        ("exact number of tokens", "number of tokens in a pass"),
        ("index in the pass", "number of tokens in a pass"),
        ("scale", "with .* tokens in a pass: its attention has scale = 0.5, not 0.25"),
        ("longest position", "longest position of the batch"),
        ("being the longest", "longest position of the batch"),
    ],
)
def test_refuses_behaviour_that_begins_at_a_threshold(what: str, reason: str, where: str) -> None:
    options: dict[str, Any] = {"max_position_embeddings": 4096}
    threshold = 48 if where == "hidden size" else 700
    if where == "field":
        options["attention_chunk"] = threshold
    elif where == "nested":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        options["rope_parameters"] = rope | {"original_max_position_embeddings": threshold}
    model = tiny_model("llama", **options)
    layer = model.model.layers[1]  # type: ignore[union-attr]
    layer.self_attn = Switching(layer.self_attn, what, threshold)
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM: .*{reason}"):
        probe_model(load_model(model))


def test_refuses_models_that_change_with_length() -> None:
    with pytest.raises(UnsupportedModelError, match=r"keys for the 12[89] tokens .*compress_rates"):
        probe_model(load_model(tiny_model("deepseek_v4")))


@pytest.mark.parametrize("floor_scale", [100, 8192])
def test_tokens_counted_from_a_cache_on_are_at_their_positions(floor_scale: int) -> None:
    model = tiny_model("llama4_text", floor_scale=floor_scale)
    specs = probe_model(load_model(model))
    assert [spec.chunk for spec in specs] == [WINDOW, 0]
    assert not any("forward" in vars(part) for part in model.modules())


def test_slopes_of_written_out_attention() -> None:
    config = AutoConfig.for_model("bloom", n_layer=2, n_head=6, hidden_size=48, vocab_size=96)
    loaded = load_model(AutoModelForCausalLM.from_config(config), max_model_len=128)
    slopes = [spec.alibi_slopes for spec in probe_model(loaded)]
    powers = [2 ** (-2 * i) for i in range(1, 5)] + [2 ** -(2 * i - 1) for i in range(1, 3)]
    assert slopes == [tuple(powers)] * 2


def test_refuses_a_bias_that_is_put_into_the_mask() -> None:
    config = AutoConfig.for_model(
        "falcon", num_hidden_layers=1, num_attention_heads=4, hidden_size=32, alibi=True
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="a bias or a mask of its own"):
        probe_model(load_model(model))


def test_layers_alike_are_run_once_and_those_that_are_not_are_run() -> None:
    model = tiny_model("llama", num_hidden_layers=8, max_position_embeddings=4096, chunk=700)
    specs = probe_model(load_model(model))
    assert len(specs) == 8
    assert not any("forward" in vars(part) or part._forward_hooks for part in model.modules())
    layer = model.model.layers[6]  # type: ignore[union-attr]
    layer.self_attn = Switching(layer.self_attn, "number of tokens", 700)
    with pytest.raises(UnsupportedModelError, match=r"number of tokens in a pass.*chunk = 700"):
        probe_model(load_model(model))
    assert not any("forward" in vars(part) or part._forward_hooks for part in model.modules())


def test_a_layer_of_each_kind_is_run() -> None:
    """Of gemma's as well, whose activation is a function with an option."""
    types = ["sliding_attention", "full_attention"] * 4
    loaded = load_model(tiny_model("gemma3_text", num_hidden_layers=8, layer_types=types))
    specs = probe_model(loaded)
    layers = list(loaded.module.model.layers)  # type: ignore[union-attr, arg-type]
    found = twins(loaded.module, specs)
    assert found == {layer: layers[i % 2] for i, layer in enumerate(layers) if i > 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_names_a_weight_that_is_not_finite(name: str, value: float) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter(name)[3, 5] = value
    with pytest.raises(InvalidInputError, match=f"finite weights; 1 of .* {name!r}"):
        probe_model(load_model(model))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_refuses_rope_that_depends_on_the_batch(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope["original_max_position_embeddings"] = 64
    model = tiny_model("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match=rope_type):
        probe_model(load_model(model))


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("rwkv", {"attention_hidden_size": 32}),
        ("xlstm", {}),
    ],
)
def test_refuses_other_families(arch: str, options: dict[str, Any]) -> None:
    common = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    config = AutoConfig.for_model(arch, **common, **heads, **options)
    with pytest.raises(UnsupportedModelError):
        probe_model(load_model(AutoModelForCausalLM.from_config(config), max_model_len=512))
