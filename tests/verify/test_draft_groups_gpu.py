"""The groups of ``pagespec verify`` with draft tokens on a GPU: models and formats of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny_model
from tests.verify.test_draft_groups import check_equal, groups_of
from tests.verify.test_gate_gpu import WIDE

pytestmark = pytest.mark.gpu

FP8: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
FP8_WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("arch", "changes", "settings"),
    [
        ("qwen3", WIDE, {"dtype": "bfloat16"}),
        ("qwen3", {}, {"dtype": "float32"}),
        ("qwen3", FP8_WIDTHS, {"dtype": "bfloat16", **FP8}),
        ("mistral", {}, {"dtype": "bfloat16"}),
        ("qwen3_moe", {}, {"dtype": "bfloat16"}),
        ("qwen3_moe", {}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        ("deepseek_v3", {}, {"dtype": "bfloat16"}),
        ("qwen3_next", {}, {"dtype": "bfloat16", "state_interval": 16}),
        ("lfm2", {}, {"dtype": "bfloat16", "state_interval": 16}),
    ],
    ids=[
        "dense",
        "dense-float32",
        "dense-fp8",
        "window",
        "moe",
        "moe-fp8-cache",
        "latent",
        "delta-rule",
        "short-convolution",
    ],
)
def test_answers_do_not_depend_on_draft_tokens(
    arch: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(arch, **changes).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    check_equal(groups_of(tmp_path, device="cuda", block_size=16, **settings))
