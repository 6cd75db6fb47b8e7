"""The schedule-transparency gate on models whose sizes are odd in every dimension.

Models with experts keep hidden sizes that are multiples of 8, which torch's grouped matmul needs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from pagespec import LLM
from pagespec.verify import run_gate
from tests.golden.subjects import GATE_SIZE
from tests.support.models import tiny_model

VOCABULARY = 319
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {
            "hidden_size": 63,
            "intermediate_size": 97,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 14,
        },
    ),
    "one narrow head": (
        "llama",
        {
            "hidden_size": 35,
            "intermediate_size": 7,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 2,
        },
    ),
    "mla of rank 17": ("deepseek_v3", {"kv_lora_rank": 17, "v_head_dim": 7}),
    "mla": (
        "deepseek_v3",
        {
            "hidden_size": 40,
            "intermediate_size": 31,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": 23,
            "kv_lora_rank": 5,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 9,
            "v_head_dim": 11,
            "moe_intermediate_size": 24,
        },
    ),
    "experts": (
        "qwen3_moe",
        {
            "hidden_size": 56,
            "head_dim": 14,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "delta rule": (
        "qwen3_next",
        {
            "hidden_size": 56,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 7,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
        },
    ),
    "sparse": ("deepseek_v32", {"kv_lora_rank": 17, "v_head_dim": 7, "index_head_dim": 13}),
}
_BY_DAY = [("mla of rank 17", torch.float32)]
_SIZE = replace(GATE_SIZE, neighbour_lengths=(1, 3), cuts=(3, 7), both_overlaps=False)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*case, marks=() if case in _BY_DAY else pytest.mark.nightly)
        for case in product(ODD, (torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_answers_do_not_depend_on_the_schedule(name: str, dtype: torch.dtype) -> None:
    arch, sizes = ODD[name]
    model = tiny_model(arch, vocab_size=VOCABULARY, **sizes).to(dtype)

    def make_llm(**settings: Any) -> LLM:
        return LLM(model, device="cpu", check_invariants=True, **settings)

    report = run_gate(make_llm, vocabulary=VOCABULARY, block_size=7, size=_SIZE, with_control=False)
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert sum(group.num_cases for group in report.groups) > 10
