"""Complete GGUF files of tiny models: weights in llama.cpp's order and names, and a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.gguf_files import add_vocabulary

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
_WORDS: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>"] + [f"▁w{i}" for i in range(3, VOCAB)],
    "types": [2, 3, 3] + [1] * (VOCAB - 3),
    "scores": [0.0] * VOCAB,
    "keys": {
        f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("unknown", "bos", "eos"))
    },
}


def _permuted(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of queries and keys in llama.cpp's order."""
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


def write_whole(
    path: Path,
    arch: str = "llama",
    settings: dict[str, Any] | None = None,
    tensors: dict[str, NDArray[np.float32]] | None = None,
    model: PreTrainedModel | None = None,
    vocabulary: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A file as llama.cpp writes it. Keys of ``settings`` are without the architecture.

    Args:
        vocabulary: arguments of :func:`add_vocabulary`; None for one of words.
    """
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
    add: dict[type, Any] = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
    }
    for key, value in (settings or {}).items():
        add[type(value)](f"{arch}.{key}", value)
    add_vocabulary(writer, **(vocabulary or _WORDS))
    for name, values in {**_tensors(model, arch), **(tensors or {})}.items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
