"""Recurrent models after the GPU passes, run on a CPU, match Hugging Face's tokens.

Mamba's matmul from the left must be lowered to a call of ours.
"""

from __future__ import annotations

import pytest
import torch

from pagespec import LLM, SamplingParams
from pagespec.kernels.matmul import dispatch
from tests.support.captures import use_gpu_passes
from tests.support.driving import hf_greedy
from tests.support.models import tiny_model
from tests.support.tiny_configs import RECURRENT

lower_gpu = pytest.importorskip("pagespec.compile.lowering.lower_gpu")


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=() if arch in ("mamba", "lfm2") else pytest.mark.nightly)
        for arch in RECURRENT
    ],
)
def test_tokens_are_those_of_hugging_face(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu_passes(monkeypatch)
    model = tiny_model(arch)
    llm = LLM(model, device="cpu", max_model_len=512, max_num_seqs=4, state_interval=16)
    graph = llm._runner.captured.graph
    called = [node.target for node in graph.graph.nodes]
    has_columns = arch in ("mamba", "falcon_mamba", "jamba")
    assert (called.count(dispatch.left_matmul) > 0) == has_columns
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [40, 3, 2], [7] * 33]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == hf_greedy(model, prompt, 8)


def test_a_matmul_from_the_left_is_contiguous() -> None:
    weight, columns = torch.randn(6, 5), torch.randn(1, 7, 5).mT
    product = dispatch.left_matmul(weight, columns, 0)
    assert product.is_contiguous()
    torch.testing.assert_close(product, weight @ columns)
