"""Truncated sampling on a GPU: against the torch sampler with a real vocabulary, and in CUDA
graphs.

Also tests an engine in which no step may wait for the device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec import LLM, SamplingParams
from pagespec.kernels.sampling.sampler import sample
from tests.kernels.sampling.kept import Row, draw, kept, reference_inputs, reference_kept, staged
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.gpu

VOCAB = 151_936
NUM_ROWS = 64
KINDS: list[dict[str, Any]] = [
    {"top_k": 50},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.99},
    {"min_p": 0.05},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 2.0, "top_k": 5000, "top_p": 0.999},
    {"top_p": 0.5, "min_p": 1e-6},
    {"temperature": 0.3, "top_p": 0.1},
    {"temperature": 10.0, "top_p": 0.97},
]


def make_rows() -> list[Row]:
    return [
        Row(**KINDS[i % len(KINDS)], seed=1000 + i, position=7 * i)  # any parameters by turns
        for i in range(NUM_ROWS)
    ]


def make_logits(dtype: torch.dtype) -> Tensor:
    logits = torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    logits[::4, 100:400] += 9.0  # some rows are peaked
    logits[3, ::2] = float("-inf")
    logits[5] = 1.25
    return logits.to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_and_draws_what_the_torch_sampler_does(dtype: torch.dtype) -> None:
    rows, logits = make_rows(), make_logits(dtype)
    inputs = reference_inputs(rows, "cuda")
    num_off = (kept(logits, rows, tile=4096, num_warps=16) != reference_kept(logits, inputs)).sum(1)
    # Weights are float32 here and float64 there: where the sum comes to p on the edge between two
    # tokens, these few may differ. Nothing else does.
    for i, row in enumerate(rows):
        assert num_off[i] <= (0 if row.top_p == 1.0 else 4), row
    tokens = draw(logits, rows)
    assert (tokens != sample(logits, inputs)).sum() <= 1
    for i in range(0, NUM_ROWS, 7):
        alone = draw(logits, rows, only=[i])
        assert alone[i] == tokens[i]


def test_a_captured_launch_draws_what_an_uncaptured_one_does() -> None:
    from pagespec.kernels.sampling.top_k_top_p import sample_truncated

    rows, logits = make_rows(), make_logits(torch.bfloat16)
    expected = draw(logits, rows)
    inputs, fields = reference_inputs(rows, "cuda"), staged(rows).reshape(-1).cuda()
    sampled = torch.full((NUM_ROWS,), -1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_truncated(
            logits, fields, inputs.temperature, inputs.seeds, inputs.positions, sampled
        )
    graph.replay()
    assert torch.equal(sampled, expected)


def test_no_step_waits_for_the_device() -> None:
    llm = LLM(
        tiny_model(
            "qwen3", hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=64
        ).to("cuda"),
        dtype="bfloat16",
        device="cuda",
        max_num_seqs=12,
        max_model_len=256,
        num_blocks=128,
    )
    runner = llm.engine.runner
    dispatch = runner.dispatch
    num_steps = 0

    def watched(plan: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return dispatch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.dispatch = watched  # type: ignore[method-assign]
    params = [
        SamplingParams(max_tokens=8 + i, ignore_eos=True, seed=i, **KINDS[i % len(KINDS)])
        for i in range(12)
    ]
    prompts = [[(7 * i + j) % VOCAB_SIZE for j in range(3 + 9 * i)] for i in range(12)]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert num_steps >= 19
    alone = [
        llm.generate([prompts[i]], [params[i]])[0].outputs[0].token_ids for i in range(0, 12, 5)
    ]
    assert alone == together[::5]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
