"""Models with recurrent layers on a GPU, float32: token-equal with Hugging Face on the same GPU,
through captured steps, under preemption, hits at checkpoints and chunks."""

from __future__ import annotations

import pytest

from tests.golden.harness import Condition, check
from tests.golden.subjects import RECURRENT_CONDITIONS, tiny
from tests.support.recurrent_models import RECURRENT

pytestmark = pytest.mark.gpu

CONDITIONS = [
    # The Triton kernels and captured steps take blocks of 16 and more.
    Condition(
        "tiny pool of 16s",
        {"block_size": 16, "num_blocks": 9, "max_model_len": 128, "state_interval": 16},
        must_preempt=True,
        must_hit=True,
        num_rounds=2,
    ),
    *(c for c in RECURRENT_CONDITIONS if c.name in ("overlap", "budget 16")),
]


@pytest.mark.parametrize("arch", RECURRENT)
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: c.name.replace(" ", "-"))
def test_recurrent_models_equal_generate_on_the_gpu(arch: str, condition: Condition) -> None:
    subject, reference = tiny(arch, "cuda")
    check(subject.run(condition, reference), condition)
