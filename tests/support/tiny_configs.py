"""Configs of tiny models with latent attention, an indexer or recurrent layers.

Each entry has only the fields beside those that all tiny models share.
"""

from __future__ import annotations

from typing import Any

_LATENT: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_LATENT, **_ROUTED, "q_lora_rank": None},
    "axk1": {**_LATENT, **_ROUTED},
    "glm4_moe_lite": {**_LATENT, **_ROUTED},
    "minicpm3": _LATENT,
    "youtu": _LATENT,
}
"""Beside "deepseek_v3" and, with recurrent layers, "kimi_linear"."""

# Sixteen index heads, so that practically no score is 0: among equal scores transformers' choice
# follows the length of the prompt.
TOPK = 12
_SPARSE: dict[str, Any] = {
    **LATENT["axk1"],
    "index_topk": TOPK,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SPARSE: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**_SPARSE, "n_group": 2},
    # The last layer sees what the indexer of the second chose.
    "glm_moe_dsa": {
        **_SPARSE,
        "num_hidden_layers": 3,
        "indexer_types": ["full", "full", "shared"],
    },
    "axk2": {**_SPARSE, "n_group": None, "topk_group": None},
    "hy_v4": {**_SPARSE, "num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]},
}

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_DELTA: dict[str, Any] = {
    "num_attention_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_CONVS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_attention_heads": 4,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": _CONVS,
    "lfm2_moe": {**_CONVS, **_EXPERTS, "num_dense_layers": 1},
    "qwen3_next": {
        **_DELTA,
        **_EXPERTS,
        "head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {**_DELTA, "head_dim": 16},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {
        **_EXPERTS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*-M",
        "num_attention_heads": 4,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1], "num_attention_heads": 4},
    # Layers with attention and a scan beside each other.
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 96, "num_attention_heads": 4, "head_dim": 16},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_attention_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 12,
        "mamba_ngroups": 2,
        "chunk_size": 16,
        "num_mem_blocks": 2,
        "adapter_rank": 8,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
    },
    # No attention at all, and no longest context.
    "mamba2": {
        "max_position_embeddings": None,
        "num_heads": 8,
        "head_dim": 12,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "mamba": {"max_position_embeddings": None, "state_size": 8},
    "falcon_mamba": {"max_position_embeddings": None, "state_size": 8},
}
