"""The whole engine on a GPU with state slots: no compilation after start-up, no leak, same tokens.

Also tests the statistics about states. Tokens must not depend on preemption or on steps in flight.
Prompts are longer than the state interval of 256 tokens.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from pagespec import LLM, SamplingParams
from tests.golden.harness import mixed_prompts
from tests.golden.test_engine_gpu import (
    device_memory,
    late_work,
    mixed_params,
    num_preemptions,
    tokens_of,
)
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.gpu
assert late_work  # a fixture


def engine(arch: str, dtype: str = "bfloat16", **settings: Any) -> LLM:
    longest: dict[str, Any] = {} if arch == "mamba2" else {"max_position_embeddings": 2048}
    model = tiny_model(arch, **longest).to("cuda")
    settings = {"max_model_len": 1024, **settings}
    return LLM(copy.deepcopy(model), dtype=dtype, device="cuda", check_invariants=True, **settings)


@pytest.mark.parametrize("arch", ["mamba2"])
def test_nothing_is_compiled_after_start_up_and_no_memory_is_lost(
    arch: str, late_work: list[str]
) -> None:
    llm = engine(arch, max_num_seqs=24, max_num_batched_tokens=128, num_blocks=160)
    memory = llm.stats().memory_bytes
    states = llm._runner.states.tensors
    assert memory["states"] == sum(tensor.nbytes for tensor in states) > 0
    assert all(len(tensor) == 2 * 24 + 2 for tensor in states)
    assert "CUDA graph" in late_work, "this test would not notice a capture"
    rng = random.Random(0)

    def run(num_requests: int) -> int:
        lengths = [rng.randint(1, 600 if num_requests < 13 else 40) for _ in range(num_requests)]
        lengths[-1] = 700
        params = mixed_params([rng.randint(1, 32) for _ in lengths])
        outputs = llm.generate(mixed_prompts(lengths, VOCAB_SIZE), params, use_tqdm=False)
        return sum(output.metrics.num_cached_tokens for output in outputs)

    run(24)
    late_work.clear()
    before, _ = device_memory()
    assert sum(run(n) for n in (1, 3, 7, 24)) > 0
    assert late_work == []
    assert device_memory()[0] == before
    slots = llm.engine.scheduler.blocks.states
    assert slots is not None
    assert not any(slots.ref_counts)


def outputs_of(arch: str, **settings: Any) -> tuple[list[list[int]], int]:
    """(tokens, preemptions) of requests that share long prefixes, served twice."""
    llm = engine(arch, max_num_seqs=8, max_num_batched_tokens=256, **settings)
    prompts = mixed_prompts([1, 300, 17, 120, 310, 40, 257, 64, 3, 512], VOCAB_SIZE)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), max_tokens=80, ignore_eos=True, seed=i)
        for i in range(len(prompts))
    ]
    outputs = [o for _ in "ab" for o in llm.generate(prompts, params, use_tqdm=False)]
    return tokens_of(outputs), num_preemptions(outputs)


@pytest.mark.parametrize("arch", ["qwen3_next"])
def test_preemption_and_overlap_change_no_token(arch: str) -> None:
    """In bfloat16, where equal tokens need equal bits."""
    expected, num_preempted = outputs_of(arch, enable_prefix_caching=False, overlap=False)
    assert num_preempted == 0
    tokens, num_preempted = outputs_of(arch, num_blocks=90, num_state_slots=12)
    assert num_preempted > 0
    assert tokens == expected
