"""Models with indexers on a GPU: the tokens of `generate`, and bits that no schedule changes.

Also tests that nothing is compiled after start-up.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagespec import LLM, InvalidInputError, SamplingParams
from pagespec.verify import run_gate
from tests.golden.harness import Condition, check, mixed_prompts
from tests.golden.partings import first_partings
from tests.golden.subjects import BEYOND_CONDITIONS, GATE_SIZE, beyond, tiny
from tests.golden.test_engine_gpu import device_memory, late_work, mixed_params
from tests.golden.test_golden_gpu import CONDITIONS
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.tiny_configs import SPARSE

pytestmark = pytest.mark.gpu
assert late_work  # a fixture
# Two engines a gate: with overlap, and one for pauses and preemptions.
_GATE_SIZE = replace(GATE_SIZE, both_overlaps=False)


_nightly = pytest.mark.nightly
# By day the condition that preempts and hits, of the two models that differ most.
_BY_DAY = CONDITIONS[-1]
_RUNS = [
    pytest.param(
        arch,
        condition,
        id=f"{arch}-{condition.name.replace(' ', '-')}",
        marks=() if condition is _BY_DAY and arch in ("deepseek_v32", "glm_moe_dsa") else _nightly,
    )
    for arch in SPARSE
    for condition in CONDITIONS
]


@pytest.mark.parametrize(("arch", "condition"), _RUNS)
def test_sparse_models_equal_generate(arch: str, condition: Condition) -> None:
    subject, reference = tiny(arch, "cuda")
    check(subject.run(condition, reference), condition)


@pytest.mark.nightly
def test_sparse_models_equal_generate_beyond_every_threshold() -> None:
    subject, reference = beyond("deepseek_v32", "cuda")
    for condition in BEYOND_CONDITIONS:
        check(subject.run(condition, reference), condition)


@pytest.mark.parametrize("arch", ["deepseek_v32", "glm_moe_dsa"])
def test_bfloat16_begins_as_generate_does(arch: str) -> None:
    """Not all tokens are equal: rounding may decide between two keys, and between two tokens."""
    model = tiny_model(arch).to("cuda", torch.bfloat16)
    judge = copy.deepcopy(model)
    judge.set_attn_implementation("eager")
    prompts = mixed_prompts([1, 2, 17, 40, 64, 90, 33, 48, 5, 70, 120, 26], VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm = LLM(model, device="cuda", max_model_len=128, max_num_seqs=16, max_num_batched_tokens=128)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    with torch.no_grad():
        expected = [
            int(
                judge(torch.tensor([prompt], device="cuda"), use_cache=False).logits[0, -1].argmax()
            )
            for prompt in prompts
        ]
    pairs = list(zip((o.outputs[0].token_ids[0] for o in outputs), expected, strict=True))
    print(f"{arch} in bfloat16: (ours, generate's) {pairs}")
    # On a CPU 1 and 3 of the 12 are others.
    assert 2 * sum(ours != theirs for ours, theirs in pairs) < len(pairs), pairs


@pytest.mark.parametrize(
    ("arch", "dtype", "has_latents"),
    [
        ("deepseek_v32", torch.bfloat16, True),
        ("deepseek_v32", torch.float32, True),
        ("glm_moe_dsa", torch.bfloat16, True),
        ("glm_moe_dsa", torch.float32, True),
        pytest.param("deepseek_v32", torch.bfloat16, False, marks=_nightly),
        pytest.param("glm_moe_dsa", torch.float32, False, marks=_nightly),
    ],
    ids=str,
)
def test_answers_do_not_depend_on_the_schedule(
    arch: str, dtype: torch.dtype, has_latents: bool
) -> None:
    """In float32, rounding hides no difference. It hid one for GLM-5 while cuBLAS computed its
    router's matmul (:mod:`tests.compile.passes.test_cleanup`)."""
    model = tiny_model(arch).to("cuda", dtype)

    def make_llm(**arguments: Any) -> LLM:
        ways = {"mla_latent_cache": has_latents, "check_invariants": True}
        llm = LLM(model, device="cuda", **ways, **arguments)
        assert all(s.is_latent == has_latents for s in llm._runner.captured.specs)
        assert (llm.stats().num_graphs > 0) == ("graph_batch_sizes" not in arguments)
        return llm

    sizes: dict[str, Any] = {"vocabulary": VOCAB_SIZE, "block_size": 16, "size": _GATE_SIZE}
    report = run_gate(make_llm, **sizes, with_control=False)
    for group in report.groups:
        counts = f"{group.num_different} of {group.num_cases} differ"
        print(f"{arch} {dtype} {group.name}: {counts} {group.first_difference}")
    if report.num_different:
        (prompt,) = mixed_prompts([70], VOCAB_SIZE)
        print("nodes that part:", *first_partings(make_llm, tuple(prompt)), sep="\n  ")
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert report.num_preemptions >= GATE_SIZE.num_tokens // 2
    assert report.num_hit_blocks > 20


@pytest.mark.nightly
def test_nothing_is_compiled_after_start_up_and_no_memory_is_lost(late_work: list[str]) -> None:
    model = tiny_model("deepseek_v32", max_position_embeddings=2048).to("cuda")
    sizes = {"max_num_seqs": 24, "max_num_batched_tokens": 128, "num_blocks": 160}
    llm = LLM(model, dtype="bfloat16", device="cuda", max_model_len=1024, **sizes)
    assert "CUDA graph" in late_work, "this test would not notice a capture"

    def run(num_requests: int) -> None:
        lengths = [(37 * i) % 300 + 1 for i in range(num_requests)]
        prompts = mixed_prompts([*lengths[:-1], 700], VOCAB_SIZE)
        llm.generate(prompts, mixed_params([9] * num_requests), use_tqdm=False)

    run(24)
    late_work.clear()
    before, _ = device_memory()
    for num_requests in (1, 3, 7, 24):
        run(num_requests)
    assert late_work == []
    assert device_memory()[0] == before


def test_caches_of_e4m3_numbers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no kernel for keys that an indexer chooses"):
        LLM(tiny_model("deepseek_v32"), device="cuda", kv_cache_dtype="fp8", max_model_len=64)
