"""The gate on a GPU, with CUDA graphs: dense, sliding-window and mixture-of-experts models.

The gate's controls need their own process; ``pagespec verify`` runs them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagespec import LLM
from pagespec.verify import GateSize, run_gate
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.gpu

SIZE = GateSize(
    max_batch=17,
    neighbour_lengths=(1, 2, 3, 16, 65, 129, 300),
    cuts=(1, 2, 3, 16, 23, 32, 50, 62, 63),
    budgets=(1, 2, 5, 16, 33),
    num_tokens=6,
)
# Hidden sizes of 513 to 1,024 elements, for which a norm is fused into the next matmul.
WIDE = {"hidden_size": 576, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("qwen3", torch.bfloat16),
        ("qwen3", torch.float32),
        ("mistral", torch.bfloat16),
        ("qwen3_moe", torch.bfloat16),
        ("qwen3_moe", torch.float32),
    ],
)
def test_answers_do_not_depend_on_the_schedule(arch: str, dtype: torch.dtype) -> None:
    changes = {} if arch == "qwen3_moe" else WIDE
    model = tiny_model(arch, **changes).to("cuda")
    name = str(dtype).removeprefix("torch.")

    def make_llm(**arguments: Any) -> LLM:
        llm = LLM(model, dtype=name, device="cuda", check_invariants=True, **arguments)
        has_joined = llm._runner.captured.rewrites["fuse_norm_linear"] > 0
        assert has_joined == (dtype == torch.bfloat16 and arch != "qwen3_moe")
        return llm

    report = run_gate(make_llm, vocabulary=VOCAB_SIZE, block_size=16, size=SIZE, with_control=False)
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert all(group.num_cases > 0 for group in report.groups)
    assert report.num_preemptions >= SIZE.num_tokens
    assert report.num_hit_blocks > 50


def test_without_transparency_answers_differ(tmp_path: Path) -> None:
    """Otherwise the gate would show nothing. A wide down projection, in which the library splits
    K at few rows."""
    wide = {**WIDE, "intermediate_size": 8192}
    model = tiny_model("qwen3", **wide)
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(tmp_path)
    arguments = ["--load-format", "dummy", "--device", "cuda", "--dtype", "bfloat16", "--quick"]
    command = [sys.executable, "-m", "pagespec.cli", "verify", "--model", str(tmp_path)]
    result = subprocess.run(
        [*command, *arguments, "--only-control"], capture_output=True, text=True, check=True
    )
    controls = json.loads(result.stdout.strip().splitlines()[-1])
    assert controls[-1]["num_different"] > 0, controls
