"""The whole engine on a GPU: no compilation or capture after start-up, no leak, same tokens.

Tokens must not depend on the size of the pool or on overlapped steps. The model has two layers, so
that the engine starts in seconds.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pagespec import LLM, EngineError, InvalidInputError, RequestOutput, SamplingParams
from pagespec.engine.request import Request
from tests.golden.harness import mixed_prompts
from tests.support.models import tiny_model

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCAB_SIZE = 2048


@functools.cache
def small_model() -> PreTrainedModel:
    """Qwen3 of two layers with heads of 64, float32; every caller copies it."""
    model = tiny_model(
        "qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
    )
    return model.to(DEVICE)


def small_engine(dtype: str = "bfloat16", **settings: Any) -> LLM:
    return LLM(copy.deepcopy(small_model()), dtype=dtype, device=DEVICE, **settings)


def mixed_params(num_outputs: list[int]) -> list[SamplingParams]:
    """Greedy, seeded, top-p, and top-k with min-p, in turn."""
    kinds: Iterator[dict[str, Any]] = itertools.cycle(
        [
            {"temperature": 0.0},
            {"temperature": 0.8},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 0.7, "top_k": 20, "min_p": 0.05},
        ]
    )
    return [
        SamplingParams(max_tokens=n, ignore_eos=True, seed=seed, **next(kinds))
        for seed, n in enumerate(num_outputs)
    ]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def num_preemptions(outputs: list[RequestOutput]) -> int:
    return sum(output.metrics.num_preemptions for output in outputs)


# After start-up -------------------------------------------------------------------------------


@pytest.fixture
def late_work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Triton kernels compiled and CUDA graphs captured since the test cleared the
    list. The test counts them itself, independently of the engine's counters."""
    import triton

    seen: list[str] = []
    before = triton.knobs.compilation.listener
    capture_begin = torch.cuda.CUDAGraph.capture_begin

    def listen(**event: Any) -> None:
        seen.append(f"kernel {event['metadata'].get('name')}")
        if before is not None:
            before(**event)

    def begin(graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
        seen.append("CUDA graph")
        capture_begin(graph, *args, **kwargs)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)
    return seen


def test_continuations_are_those_of_separate_requests(late_work: list[str]) -> None:
    llm = small_engine(max_num_seqs=16, max_num_batched_tokens=128, num_blocks=128)
    prompts = mixed_prompts([1, 5, 16, 33, 200], VOCAB_SIZE)
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}]
    late_work.clear()
    for kind in kinds:

        def sampling(kind: dict[str, Any] = kind, **more: Any) -> SamplingParams:
            return SamplingParams(max_tokens=40, ignore_eos=True, **kind, **more)

        several = llm.generate(prompts, sampling(n=4, seed=1), use_tqdm=False)
        singles = [
            tokens_of(llm.generate(prompts, sampling(seed=1 + i), use_tqdm=False)) for i in range(4)
        ]
        for number, output in enumerate(several):
            answers = [answer.token_ids for answer in output.outputs]
            assert answers == [tokens[number] for tokens in singles]
    assert late_work == [], "the kernel that copies blocks is built at start-up"


def num_dynamo_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def watch_widths(llm: LLM) -> set[int]:
    """The number of requests that ran in each later step."""
    widths: set[int] = set()
    step = llm.engine.step

    def watched() -> list[Request]:
        widths.add(len(llm.engine.scheduler.queues.running))
        return step()

    llm.engine.step = watched  # type: ignore[method-assign]
    return widths


def test_nothing_is_compiled_or_captured_after_start_up(late_work: list[str]) -> None:
    llm = small_engine(
        max_num_seqs=40, max_num_batched_tokens=128, num_blocks=128, max_model_len=1024
    )
    stats = llm.stats()
    counts = (stats.num_captures, stats.num_compilations, stats.num_graphs)
    assert min(counts) >= 1, f"nothing was counted at start-up: {counts}"
    assert "CUDA graph" in late_work, "this test would not notice a capture"
    late_work.clear()
    dynamo_graphs = num_dynamo_graphs()
    widths = watch_widths(llm)
    rng = random.Random(0)
    preempted = cached = chunked = 0
    for num_requests in (1, 2, 3, 7, 12, 25, 40, 1):
        # Many short ones beside a long one fill every batch size and, as they grow, the pool.
        lengths = [rng.randint(1, 900 if num_requests < 25 else 40) for _ in range(num_requests)]
        lengths[-1] = 900
        prompts = mixed_prompts(lengths, VOCAB_SIZE)
        params = mixed_params([rng.randint(1, 64) for _ in prompts])
        outputs = llm.generate(prompts, params, use_tqdm=False)
        preempted += num_preemptions(outputs)
        cached += sum(output.metrics.num_cached_tokens for output in outputs)
        chunked += sum(length > 128 for length in lengths)
    assert min(preempted, cached, chunked) > 0, "the run was not mixed"
    assert max(widths) >= 36
    assert len(widths) >= 20
    stats = llm.stats()
    assert (stats.num_captures, stats.num_compilations, stats.num_graphs) == counts
    assert late_work == []
    assert num_dynamo_graphs() == dynamo_graphs


def device_memory() -> tuple[int, int]:
    """Bytes allocated and bytes reserved."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_a_thousand_requests_leave_memory_as_it_was() -> None:
    llm = small_engine(max_num_seqs=64, max_num_batched_tokens=512, num_blocks=512)
    rng = random.Random(1)
    lengths = [rng.randint(1, 64) for _ in range(1000)]
    params = mixed_params([rng.randint(1, 8) for _ in lengths])

    def run(seed: int) -> None:
        outputs = llm.generate(mixed_prompts(lengths, VOCAB_SIZE, seed), params, use_tqdm=False)
        assert len(outputs) == 1000

    run(seed=0)  # the allocator's own caches fill
    before = device_memory()
    run(seed=1)
    assert device_memory() == before
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work
    assert scheduler.blocks.num_available == llm.num_blocks
    assert not any(scheduler.blocks.ref_counts)


# Same tokens ----------------------------------------------------------------------------------

NUM_BLOCKS_TINY = 60
NUM_BLOCKS_AMPLE = 2000


def hostile_run(
    dtype: str, num_blocks: int, overlap: bool | None = None
) -> tuple[list[list[int]], int]:
    """Tokens and preemptions of 24 requests, half greedy and half sampled. Together they need about
    500 blocks."""
    llm = small_engine(
        dtype,
        max_num_seqs=24,
        max_num_batched_tokens=256,
        num_blocks=num_blocks,
        max_model_len=512,
        overlap=overlap,
        check_invariants=True,
    )
    if overlap is not None:
        assert llm.engine.scheduler.pipeline_depth == int(overlap)
    rng = random.Random(2)
    prompts = mixed_prompts([rng.randint(1, 400) for _ in range(24)], VOCAB_SIZE)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), max_tokens=48, ignore_eos=True, seed=i)
        for i in range(24)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return tokens_of(outputs), num_preemptions(outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_full_pool_preempts_and_changes_no_token(dtype: str) -> None:
    """In float32 no two logits are close enough for the order of a sum to matter. In bfloat16 they
    are; equal tokens then depend on ``transparent=True``, the default."""
    expected, num_preempted = hostile_run(dtype, NUM_BLOCKS_AMPLE)
    assert num_preempted == 0
    tokens, num_preempted = hostile_run(dtype, NUM_BLOCKS_TINY)
    assert num_preempted > 0
    assert tokens == expected


def test_overlap_changes_no_token() -> None:
    alone, num_preempted = hostile_run("float32", NUM_BLOCKS_TINY, overlap=False)
    assert num_preempted > 0
    overlapped, num_preempted = hostile_run("float32", NUM_BLOCKS_TINY, overlap=True)
    assert num_preempted > 0
    assert overlapped == alone


# Out of memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        # Less than the weights take; then more than any card has.
        ({"memory_utilization": 1e-5}, ["memory_utilization"]),
        ({"num_blocks": 1 << 30}, ["num_blocks"]),
    ],
    ids=["too-little", "too-much"],
)
def test_out_of_memory_names_the_settings_to_change(
    settings: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        small_engine(**settings)
    for name in names:
        assert name in str(caught.value)


# After a failed step --------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_step_leaves_an_engine_that_answers_the_same(
    overlap: bool, error: type[BaseException]
) -> None:
    """Steps are queued on the device when one is interrupted; the next call takes their blocks."""
    state = {"fails_in": -1}

    def see(_plan: object, _logits: torch.Tensor) -> None:
        state["fails_in"] -= 1
        if state["fails_in"] == 0:
            raise error("from the hook")

    llm = small_engine(
        num_blocks=60, overlap=overlap, max_num_seqs=8, on_logits=see, check_invariants=True
    )
    prompts = mixed_prompts([5, 17, 33, 64, 3, 90, 41, 12, 70, 26], VOCAB_SIZE)
    params = mixed_params([12] * len(prompts))
    expected = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    for fails_in in (1, 2, 5, 9, 14):
        state["fails_in"] = fails_in
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else EngineError):
            llm.generate(prompts, params, use_tqdm=False)
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == expected
