"""Tiny models of many architectures with random weights, for golden tests.

The weights are large enough for attention to decide which token is chosen. So an error in a sliding
window, a softcap or attention sinks changes the output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from pagespec.compile.load.build_module import auto_class
from tests.support.tiny_configs import LATENT, RECURRENT, SPARSE

VOCAB_SIZE = 320
WINDOW = 24
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
_TWO_TYPES = ["sliding_attention", "full_attention"]
_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16, "num_attention_heads": 4},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
    },
    "mistral": {"sliding_window": WINDOW, "head_dim": 8},
    "gemma2": {
        "sliding_window": WINDOW,
        "layer_types": _TWO_TYPES,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 30.0,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": _TWO_TYPES,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    },
    "phi3": {"sliding_window": None},
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_positions": 512,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": None,
    },
    "gpt_neox": {"num_attention_heads": 4, "rotary_pct": 0.5},
    "gpt_oss": {
        "sliding_window": WINDOW,
        "layer_types": _TWO_TYPES,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_moe": {
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
ARCHITECTURES = list(_SPECIFIC)
# What these are made of is in others, too: tests that take long leave them to `nox -s nightly`.
_BY_NIGHT = ("qwen2", "qwen3", "mistral")
BY_DAY = [
    pytest.param(arch, marks=pytest.mark.nightly if arch in _BY_NIGHT else ())
    for arch in ARCHITECTURES
]
# For four ranks: heads that can be divided.
TP_OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen2": {"num_attention_heads": 4},
    "mistral": {"num_attention_heads": 4},
}
# transformers has no plan to share their layers over several ranks.
WITHOUT_PLAN = ("gpt2", "gpt_oss")
# Not in the golden table: what the probe refuses, and what has a test of its own.
_OTHERS: dict[str, dict[str, Any]] = {
    "falcon": {
        "ffn_hidden_size": 200,
        "multi_query": True,
        "new_decoder_architecture": False,
    },
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    "llama4_text": {
        "head_dim": 8,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "max_position_embeddings": 16384,
    },
    "deepseek_v4": {
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "hc_mult": 2,
        "layer_types": ["heavily_compressed_attention"] * 2,
        "mlp_layer_types": ["moe"] * 2,
    },
}


def tiny_model(arch: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 model of 2 or 3 layers with random weights from ``seed``, in evaluation mode.

    Architectures with two kinds of layers have both. ``generate`` runs to the full length.
    """
    options = (
        dict(_SPECIFIC[arch])
        if arch == "gpt2"
        else {
            **_COMMON,
            **_SPECIFIC.get(arch, {}),
            **_OTHERS.get(arch, {}),
            **RECURRENT.get(arch, {}),
            **LATENT.get(arch, {}),
            **SPARSE.get(arch, {}),
        }
    )
    config = AutoConfig.for_model(arch, **{**options, **overrides})
    return random_model(config, seed)


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """The causal language model of a config, as :func:`tiny_model` makes it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    # Wide enough for peaked attention, scaled by fan-in.
                    std = (
                        1.0
                        if "embed" in name or "wte" in name
                        else 1.6 / parameter.shape[-1] ** 0.5
                    )
                    parameter.normal_(0.0, std)
                elif "norm" in name or "ln_" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif _is_small_constant(parameter):
                    # It is multiplied up: much more of it, and float32's rounding grows to tokens.
                    parameter.mul_(1 + torch.randn_like(parameter) * 0.2)
                else:
                    parameter.normal_(0.0, 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _is_small_constant(parameter: Tensor) -> bool:
    first = parameter.flatten()[0]
    return parameter.numel() > 1 and 0 < first < 0.1 and bool((parameter == first).all())


def save_word_model(folder: Path) -> str:
    """A tiny model whose tokens are words."""
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    vocab = {"<unk>": 0} | {f"word{i}": i for i in range(1, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    return str(folder)
