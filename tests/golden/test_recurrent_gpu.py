"""Recurrent models in float32 on a GPU match Hugging Face's tokens on the same GPU.

Conditions include CUDA graphs, preemption and cache hits at state checkpoints.
"""

from __future__ import annotations

import pytest

from tests.golden.harness import Condition, check
from tests.golden.subjects import MAX_RELATIVE_ERRORS, tiny
from tests.support.tiny_configs import RECURRENT

pytestmark = pytest.mark.gpu

# The Triton kernels and captured steps take blocks of 16 and more. A pool that is too small has
# steps of all kinds: prompts beside decoding rows, requests computed again, prefixes found.
CONDITION = Condition(
    "tiny pool of 16s",
    {"block_size": 16, "num_blocks": 9, "max_model_len": 128, "state_interval": 16},
    must_preempt=True,
    must_hit=True,
    num_rounds=2,
)


@pytest.mark.parametrize("arch", RECURRENT)
def test_recurrent_models_equal_generate_on_the_gpu(arch: str) -> None:
    subject, reference = tiny(arch, "cuda")
    row = subject.run(CONDITION, reference)
    check(row, CONDITION, MAX_RELATIVE_ERRORS[arch])
