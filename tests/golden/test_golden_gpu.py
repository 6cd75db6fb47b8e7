"""The golden tests on a GPU: float32 models match Hugging Face's tokens on the same GPU."""

from __future__ import annotations

import pytest

from tests.golden.harness import Condition, check
from tests.golden.subjects import TINY_CONDITIONS, tiny
from tests.support.models import ARCHITECTURES

CONDITIONS = [
    *(c for c in TINY_CONDITIONS if c.name in ("plain", "tiny pool+cache", "budget 16")),
    # The Triton kernels and captured steps take blocks of 16 and more.
    Condition(
        "tiny pool of 16s",
        {"block_size": 16, "num_blocks": 9, "max_model_len": 128},
        must_preempt=True,
        must_hit=True,
        num_rounds=2,
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: c.name.replace(" ", "-"))
def test_tiny_models_equal_generate_on_the_gpu(arch: str, condition: Condition) -> None:
    subject, reference = tiny(arch, "cuda")
    check(subject.run(condition, reference), condition)
