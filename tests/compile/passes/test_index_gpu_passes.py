"""Indexers after the GPU passes: whole engines on interpreted Triton kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagespec import LLM, SamplingParams
from pagespec.kernels.mla import dispatch as mla
from pagespec.kernels.mla import launch
from pagespec.kernels.sparse import chosen, index_kernels
from tests.support.captures import use_gpu_passes
from tests.support.driving import hf_greedy
from tests.support.models import tiny_model

lower_gpu = pytest.importorskip("pagespec.compile.lowering.lower_gpu")


@pytest.mark.parametrize(
    ("arch", "has_latents"),
    [
        ("deepseek_v32", True),
        pytest.param("deepseek_v32", False, marks=pytest.mark.nightly),
        pytest.param("glm_moe_dsa", True, marks=pytest.mark.nightly),
        ("hy_v4", False),  # its sinks keep the heads in the cache
    ],
)
def test_tokens_are_those_of_hugging_face(
    arch: str, has_latents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(name)
            result: torch.Tensor = function(*args, **kwargs)
            return result

        call.__module__ = "pagespec.kernels.of_a_test"
        return call

    def attention(query: Any, kv: Any, scale: float, rank: int, indices: Any = None) -> Any:
        return launch.attention(query, kv, scale, rank, indices=indices)

    use_gpu_passes(monkeypatch)
    for module, name, function in (
        (mla, "attention", attention),
        (index_kernels, "index_topk", index_kernels.index_topk),
        (chosen, "chosen_attention", chosen.chosen_attention),
    ):
        monkeypatch.setattr(module, name, noted(name, function))
    model = tiny_model(arch)
    ways = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    llm = LLM(model, device="cpu", mla_latent_cache=has_latents, **ways)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [40, 3, 2], [*range(7, 40)]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.outputs[0].token_ids == hf_greedy(model, prompt, 4)
    assert set(calls) == {"index_topk", "attention" if has_latents else "chosen_attention"}
