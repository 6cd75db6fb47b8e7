"""Configs of tiny models with a top-k indexer: fields beside those that all share.

Sixteen index heads, so that practically no score is 0: among equal scores transformers' choice
follows the length of the prompt.
"""

from __future__ import annotations

from typing import Any

from tests.support.latent_models import LATENT

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
