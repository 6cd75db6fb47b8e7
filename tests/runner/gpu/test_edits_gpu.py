"""Rows that edit their logits, on a GPU: CUDA graphs, overlapped steps, and two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagespec import LLM, SamplingParams
from pagespec.kernels.device import count_triton_variants
from tests.runner.edited_requests import Asked, LogitsByPosition, check_tokens, mixed_cases
from tests.support.models import tiny_model

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 40,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "num_blocks": 400,
}


def serve_all(llm: LLM, asked: list[Asked], prefix: str) -> list[Any]:
    requests = [case.request(f"{prefix}{i}", seed=i) for i, case in enumerate(asked)]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    return requests


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_is_one_of_the_edited_row(overlap: bool, dtype: torch.dtype) -> None:
    """40 rows are more than a chunk. Serving compiles nothing, and a row alone has its tokens."""
    seen = LogitsByPosition()
    model = tiny_model("llama").to(dtype)
    llm = LLM(model, device="cuda", overlap=overlap, on_logits=seen, **SIZES)
    asked = [case for seed in range(4) for case in mixed_cases(seed)]
    num_variants = count_triton_variants()
    requests = serve_all(llm, asked, "together ")
    assert check_tokens(asked, requests, seen) > 40
    num_cached_tokens = 0
    for i in range(0, len(asked), 3):
        request = asked[i].request(f"alone {i}", seed=i)
        llm.engine.add(request)
        while llm.engine.has_work:
            llm.engine.step()
        assert request.output_token_ids == requests[i].output_token_ids, asked[i]
        num_cached_tokens += request.num_cached_tokens
    assert num_cached_tokens
    assert count_triton_variants() == num_variants


def test_functions_are_called_with_the_output() -> None:
    llm = LLM(tiny_model("llama"), device="cuda", **SIZES)

    def count_up(output: list[int], row: torch.Tensor) -> torch.Tensor:
        assert row.device.type == "cpu"
        return row.index_fill(0, torch.tensor([100 + len(output)]), 1e4)

    plain = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    params = SamplingParams(max_tokens=5, ignore_eos=True, logits_processors=[count_up])
    results = llm.generate([[5, 6], [9, 8], [5, 6]], [plain, params, plain], use_tqdm=False)
    first, counted, last = (result.outputs[0].token_ids for result in results)
    assert counted == [100, 101, 102, 103, 104]
    assert first == last


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_ranks_give_the_tokens_of_the_edited_rows(tmp_path: Path) -> None:
    seen = LogitsByPosition()
    tiny_model("llama", num_attention_heads=4).save_pretrained(tmp_path)
    llm = LLM(tmp_path, device="cuda", tensor_parallel_size=2, on_logits=seen, **SIZES)
    asked = [case for seed in range(4) for case in mixed_cases(seed)]
    assert check_tokens(asked, serve_all(llm, asked, ""), seen) > 40
