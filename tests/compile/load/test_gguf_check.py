"""GGUF files with tensors and settings that transformers does not read: refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pagespec.compile.load import gguf
from pagespec.compile.load.load import load_model
from pagespec.errors import UnsupportedModelError
from tests.support.models import tiny_model

VOCAB = 320
HEADS, KV_HEADS = 4, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
}
# By the name in files: the type of transformers, and of its config what files of llama.cpp name or
# transformers' reader takes for granted.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 24}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 24}),
    "qwen2moe": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}),
}
BIAS = "blk.0.attn_output.bias"


def _permuted(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """As llama.cpp orders the rows of queries and keys."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _tensors(model: PreTrainedModel, arch: str) -> dict[str, NDArray[np.float32]]:
    [number] = [key for key, name in MODEL_ARCH_NAMES.items() if name == arch]
    names = get_tensor_name_map(number, model.config.num_hidden_layers)
    found: dict[str, NDArray[np.float32]] = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if "gate_up_proj" in name:
            layer = name.split(".")[2]
            halves = np.split(values, 2, axis=1)
            for kind, half in zip(("gate", "up"), halves, strict=True):
                found[f"blk.{layer}.ffn_{kind}_exps.weight"] = half
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = _permuted(values, HEADS if "q_proj" in name else KV_HEADS)
        if arch.startswith("gemma") and "norm" in name:
            values = values + 1
        if "shared_expert_gate" in name:
            values = values[0]
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = name, "weight"
        found[f"{names.get_name(stem)}.{suffix}"] = values
    return found


def _write(
    path: Path,
    arch: str = "llama",
    settings: dict[str, Any] | None = None,
    tensors: dict[str, NDArray[np.float32]] | None = None,
    model: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """A file as llama.cpp writes it. Keys of ``settings`` are without the architecture."""
    kind, own = MODELS[arch]
    if model is None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **own))
    config = model.config
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    if "num_experts" in own:
        writer.add_expert_count(own["num_experts"])
        writer.add_expert_used_count(own["num_experts_per_tok"])
    if "head_dim" in own:
        writer.add_key_length(own["head_dim"])
    if "sliding_window" in own:
        writer.add_sliding_window(own["sliding_window"])
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (settings or {}).items():
        add[type(value)](f"{arch}.{key}", value)
    words = ["<unk>", "<s>", "</s>"] + [f"▁w{i}" for i in range(3, VOCAB)]
    if arch.startswith("qwen"):  # its tokenizer has merges
        words[3:7] = ["a", "b", "ab", "aba"]
        writer.add_token_merges(["a b", "ab a"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([2, 3, 3] + [1] * (VOCAB - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, values in {**_tensors(model, arch), **(tensors or {})}.items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("arch", MODELS)
def test_a_file_that_is_read_whole_is_that_model(tmp_path: Path, arch: str) -> None:
    model = _write(tmp_path / "a.gguf", arch)
    loaded = load_model(tmp_path / "a.gguf", cache_dir=tmp_path)
    state = loaded.module.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("tensors", "settings", "name"),
    [
        ({"rope_freqs.weight": np.full(8, 2.0)}, {}, "rope_freqs.weight"),
        ({BIAS: np.ones(64)}, {}, BIAS),
        ({"blk.1.ffn_up.bias": np.ones(96)}, {}, "blk.1.ffn_up.bias"),
        ({}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "rope.scaling.factor"),
        ({}, {"rope.scale_linear": 4.0}, "rope.scale_linear"),
        ({}, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope.scaling.type"),
        ({}, {"rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor"),
        ({}, {"attention.sliding_window": 24}, "attention.sliding_window"),
    ],
)
def test_what_would_be_left_out_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], settings: dict[str, Any], name: str
) -> None:
    _write(tmp_path / "a.gguf", tensors=tensors, settings=settings)
    for quantization in (None, "gguf"):
        with pytest.raises(UnsupportedModelError, match=name):
            load_model(tmp_path / "a.gguf", cache_dir=tmp_path, quantization=quantization)
    assert not list((tmp_path / "gguf").iterdir())


@pytest.mark.parametrize(
    ("tensors", "settings"),
    [
        ({"rope_freqs.weight": np.ones(8)}, {}),
        ({BIAS: np.zeros(64)}, {}),
        ({}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        ({}, {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}),
        ({}, {"rope.scaling.original_context_length": 512}),
        ({}, {"attention.sliding_window": 0}),
        ({}, {"attention.sliding_window": 512}),
    ],
)
def test_what_does_nothing_may_be_left_out(
    tmp_path: Path, tensors: dict[str, Any], settings: dict[str, Any]
) -> None:
    _write(tmp_path / "a.gguf", tensors=tensors, settings=settings)
    load_model(tmp_path / "a.gguf", cache_dir=tmp_path)


def test_a_rotary_scale_of_some_layers_is_refused(tmp_path: Path) -> None:
    settings = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    _write(tmp_path / "a.gguf", "gemma3", settings)
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.factor"):
        load_model(tmp_path / "a.gguf", cache_dir=tmp_path)


def test_a_conversion_made_without_the_check_is_not_used(tmp_path: Path) -> None:
    """Version 1 had none."""
    path = tmp_path / "a.gguf"
    _write(path, tensors={BIAS: np.ones(64)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "_CONVERSION_VERSION", 1)
        patch.setattr(gguf, "_convert", lambda _, made: tiny_model("llama").save_pretrained(made))
        load_model(path, cache_dir=tmp_path)
    with pytest.raises(UnsupportedModelError, match=BIAS):
        load_model(path, cache_dir=tmp_path)
