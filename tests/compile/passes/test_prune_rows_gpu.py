"""The pruned form on a GPU: the bits of the whole form, in captured steps and in others."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec import LLM, SamplingParams
from pagespec.compile import captured_model
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.gpu

SIZES = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}


def answers(arch: str, sizes: dict[str, Any], **settings: Any) -> tuple[list[Any], list[Tensor]]:
    """Tokens and log-probabilities, prompts' too, and the logits of all sampled rows."""
    seen: list[Tensor] = []
    llm = LLM(
        copy.deepcopy(tiny_model(arch, **sizes)).to("cuda"),
        dtype="bfloat16",
        device="cuda",
        max_num_seqs=12,
        max_num_batched_tokens=160,
        max_model_len=512,
        num_blocks=160,
        enable_prefix_caching=False,
        **settings,
    )
    captured = llm.engine.runner.captured  # type: ignore[attr-defined]
    llm.engine.runner._on_logits = lambda _, logits: seen.append(logits.cpu())  # type: ignore[attr-defined]
    assert captured.head is not None
    rng = random.Random(11)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(3 + 37 * i)] for i in range(10)]
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2,
            prompt_logprobs=1 if number % 4 == 0 else None,
        )
        for number in range(len(prompts))
    ]  # fmt: skip
    before = llm.stats().num_compilations
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        entries = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
        values = [{t: (e.logprob, e.rank) for t, e in each.items()} for each in entries if each]
        found.append((output.outputs[0].token_ids, values))
    if "graph_batch_sizes" not in settings:
        assert llm.stats().num_compilations == before
    return found, seen


@pytest.mark.parametrize("settings", [{}, {"graph_batch_sizes": []}], ids=["captured", "plain"])
@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        ("qwen3", SIZES),
        ("gemma3_text", SIZES),
        ("qwen3_moe", {"head_dim": 64, "hidden_size": 256, "moe_intermediate_size": 128}),
        ("deepseek_v3", {}),
    ],
)
def test_bits_are_those_of_the_whole_form(
    arch: str, sizes: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prune, made = captured_model.prune_rows, []

    def kept(*args: Any) -> Any:
        made.append(prune(*args))
        return made[-1]

    monkeypatch.setattr(captured_model, "prune_rows", kept)
    found, logits = answers(arch, sizes, **settings)
    assert made[0] is not None
    monkeypatch.setattr(captured_model, "prune_rows", lambda *_: None)
    expected, expected_logits = answers(arch, sizes, **settings)
    assert found == expected
    assert len(logits) == len(expected_logits)
    assert all(map(torch.equal, logits, expected_logits))
