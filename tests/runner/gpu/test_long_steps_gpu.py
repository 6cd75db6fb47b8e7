"""Long steps on a GPU compute only sampled tokens in the last layer, with the same bits."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pagespec import LLM, SamplingParams
from pagespec.runner.layout import StepShape
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.gpu

LENGTHS = (1900, 1030, 700, 40, 40, 3)
# Fused norm and rotation; a window; experts; latent attention.
ARCHS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {"layer_types": ["full_attention", "sliding_attention"]},
    "qwen3_moe": {},
    "deepseek_v3": {},
}
FP8 = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}


def outputs(model: PreTrainedModel | str, **settings: Any) -> tuple[list[Any], int]:
    """Tokens and log-probabilities, and the number of graphs of long steps."""
    rng = random.Random(5)
    prompts = [
        {"prompt_token_ids": [rng.randrange(2, VOCAB_SIZE) for _ in range(n)]} for n in LENGTHS
    ]
    llm = LLM(copy.deepcopy(model), device="cuda", max_num_seqs=16, num_blocks=600, **settings)
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)
    found = list(llm.generate(prompts, params))
    # The hidden states of all tokens are needed, in shapes whose graphs lack them.
    scored = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    found += [*llm.generate(prompts[:2], scored), *llm.generate(prompts, params)]
    runner: Any = llm._runner
    num_long = sum(shape.is_long for shape in runner._graphs._graphs)
    texts = [
        (o.outputs[0].token_ids, repr(o.outputs[0].logprobs), repr(o.prompt_logprobs))
        for o in found
    ]
    return texts, num_long


@pytest.mark.parametrize("arch", [*ARCHS, "fp8"])
def test_long_steps_have_the_bits_of_others(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_fp8 = arch == "fp8"
    sizes = FP8 if is_fp8 else ARCHS[arch]
    settings = {"dtype": "bfloat16", **({"quantization": "fp8"} if is_fp8 else {})}
    model = tiny_model("qwen3" if is_fp8 else arch, max_position_embeddings=2048, **sizes)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    subject = str(tmp_path) if is_fp8 else model.to("cuda")
    long, num_long = outputs(subject, **settings)
    assert num_long > 0
    monkeypatch.setattr(StepShape, "lengthened", lambda shape: shape)
    whole, none = outputs(subject, **settings)
    assert none == 0
    assert long == whole
