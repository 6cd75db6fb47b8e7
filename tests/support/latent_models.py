"""Configs of tiny models with multi-head latent attention: fields beside those that all share."""

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
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_LATENT, **_EXPERTS, "q_lora_rank": None},
    "axk1": {**_LATENT, **_EXPERTS},
    "glm4_moe_lite": {**_LATENT, **_EXPERTS},
    "minicpm3": _LATENT,
    "youtu": _LATENT,
}
"""Beside "deepseek_v3" and, with recurrent layers, "kimi_linear"."""
