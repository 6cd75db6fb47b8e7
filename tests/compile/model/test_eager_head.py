"""An eager module's output head, softcaps included; the module is restored afterwards."""

from __future__ import annotations

import pytest
import torch

from pagespec import LLM
from tests.support.driving import hf_logits
from tests.support.models import VOCAB_SIZE, tiny_model


@pytest.mark.parametrize("arch", ["gemma2", "gpt2"])
def test_scores_beside_hugging_face(arch: str) -> None:
    model = tiny_model(arch)
    prompt = [(37 * i + 5) % VOCAB_SIZE for i in range(21)]
    expected = hf_logits(tiny_model(arch), prompt).float().log_softmax(-1)
    llm = LLM(model, device="cpu", compile="eager", num_blocks=20, max_model_len=64)
    score = llm.score(prompt, use_tqdm=False)[0]
    for position, logprob in enumerate(score.logprobs[1:]):
        assert logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)
    assert "forward" not in vars(model.base_model)
    assert not model.base_model._forward_hooks
    assert torch.isfinite(torch.tensor(score.total_logprob))
