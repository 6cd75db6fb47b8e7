"""The gate on a GPU, with CUDA graphs, for models with recurrent layers.

Models have a short convolution, the gated delta rule, Mamba-1 or Mamba-2, with attention and
without any.
"""

from __future__ import annotations

from typing import Any

import pytest

from pagespec import LLM
from pagespec.verify import GateSize, run_gate
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.gpu

SIZE = GateSize(
    max_batch=6,
    neighbour_lengths=(1, 65, 300),
    cuts=(1, 16, 50),
    budgets=(5, 33),
    num_tokens=4,
    both_overlaps=False,
)


@pytest.mark.parametrize("arch", ["qwen3_next", "mamba2", "jamba", "lfm2"])
def test_answers_do_not_depend_on_the_schedule(arch: str) -> None:
    model = tiny_model(arch).to("cuda")

    def make_llm(**arguments: Any) -> LLM:
        states = {"state_interval": 16, "num_state_slots": 64}
        settings = {"device": "cuda", "check_invariants": True, **states}
        return LLM(model, dtype="bfloat16", **settings, **arguments)

    report = run_gate(make_llm, vocabulary=VOCAB_SIZE, block_size=16, size=SIZE, with_control=False)
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert all(group.num_cases > 0 for group in report.groups)
    assert not report.idle
