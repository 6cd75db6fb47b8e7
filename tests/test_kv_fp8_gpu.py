"""Whole engines with ``kv_cache_dtype="fp8"`` on a GPU: schedules, scores, shared prompts.

Also tests the memory of the cache.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagespec import LLM, SamplingParams
from pagespec.verify import GateSize, run_gate
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no instruction converts e4m3",
    ),
]

SIZE = GateSize(
    max_batch=9,
    neighbour_lengths=(1, 3, 65, 129, 300),
    cuts=(1, 2, 16, 23, 50, 63),
    budgets=(1, 2, 5, 33),
    num_tokens=6,
)
WIDE = {"hidden_size": 576, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}


def make_llm(arch: str = "qwen3", **settings: Any) -> LLM:
    model = tiny_model(arch, **WIDE).to("cuda")
    settings = {"dtype": "bfloat16", "device": "cuda", "kv_cache_dtype": "fp8"} | settings
    return LLM(model, **settings)


@pytest.mark.parametrize("arch", ["qwen3", pytest.param("mistral", marks=pytest.mark.nightly)])
def test_answers_do_not_depend_on_the_schedule(arch: str) -> None:
    model = tiny_model(arch, **WIDE).to("cuda")

    def make(**arguments: Any) -> LLM:
        return LLM(
            model, dtype="bfloat16", device="cuda", kv_cache_dtype="fp8", check_invariants=True,
            **arguments,
        )  # fmt: skip

    report = run_gate(make, vocabulary=VOCAB_SIZE, block_size=16, size=SIZE, with_control=False)
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert all(group.num_cases > 0 for group in report.groups)
    assert report.num_preemptions
    assert report.num_hit_blocks > 10


def test_logits_are_those_of_the_reference() -> None:
    """The logits equal those of the reference attention on the same bytes, and differ from those of
    a bfloat16 cache."""
    prompts = [list(range(3, 3 + n)) for n in (1, 5, 40, 130)]
    found: dict[str, list[torch.Tensor]] = {}
    kinds: dict[str, dict[str, Any]] = {
        "triton": {},
        "reference": {"attention": "reference"},
        "plain": {"kv_cache_dtype": "auto"},
    }
    for name, settings in kinds.items():
        seen = found[name] = []
        llm = make_llm(
            num_blocks=64,
            on_logits=lambda _, x, seen=seen: seen.append(x.float().cpu()),
            **settings,
        )
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    triton, other, plain = (torch.cat(found[name]) for name in kinds)
    largest = triton.abs().max()
    assert (triton - other).abs().max() <= 0.05 * largest
    assert (triton - plain).abs().max() > 0


def test_samples_of_one_prompt_copy_its_last_block() -> None:
    """Four answers to a prompt with a partly filled last block equal those of four requests."""
    llm = make_llm(num_blocks=128)
    prompt = list(range(5, 42))
    sampling = SamplingParams(temperature=0.8, seed=7, max_tokens=24, n=4)
    together = [out.token_ids for out in llm.generate([prompt], sampling)[0].outputs]
    assert len({tuple(ids) for ids in together}) > 1
    other = make_llm(num_blocks=128, enable_prefix_caching=False, max_num_seqs=1)
    alone = [out.token_ids for out in other.generate([prompt], sampling)[0].outputs]
    assert together == alone


def test_memory_is_what_was_planned() -> None:
    found = {}
    for kind in ("auto", "fp8"):
        llm = make_llm(kv_cache_dtype=kind, num_blocks=64)
        caches = [cache for pair in llm._runner.kv_caches for cache in pair]
        found[kind] = sum(cache.nbytes for cache in caches)
        assert found[kind] == llm.stats().memory_bytes["kv_cache"]
    assert found["fp8"] * 128 == found["auto"] * 68  # bytes of a head of 64
