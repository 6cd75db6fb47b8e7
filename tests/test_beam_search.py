"""Beam search: beside transformers' ``generate(num_beams=...)``, and against all sequences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from pagespec import LLM, InvalidInputError
from pagespec.compat.vllm.sampling_params import BeamSearchParams as ByItsPath
from pagespec.engine.beam_search import BeamSearcher, BeamSearchParams
from pagespec.engine.inputs import PromptInput
from pagespec.engine.logprob_lists import Logprob
from pagespec.engine.outputs import CompletionOutput, RequestOutput
from tests.support.content_llm import content_llm
from tests.support.models import tiny_model

END, VOCAB = 0, 3
Given = list[PromptInput]


def test_beside_transformers() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    prompts = [[5, 6, 7, 8], [40, 3]]
    generated = {"max_new_tokens": 7, "num_beams": 3, "num_return_sequences": 3}
    ends: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    expected = [
        model.generate(torch.tensor([prompt]), **generated, **ends).tolist() for prompt in prompts
    ]
    llm = LLM(model, device="cpu", num_blocks=64, max_model_len=64)
    params = ByItsPath(beam_width=3, max_tokens=7, ignore_eos=True)
    for limit in (None, 1):
        found = llm.beam_search(prompts, params, concurrency_limit=limit)
        assert [[beam.tokens for beam in output.sequences] for output in found] == expected
    (beam, *_) = found[1].sequences
    (score,) = llm.score([beam.tokens], use_tqdm=False)
    assert beam.cum_logprob == pytest.approx(sum(score.logprobs[2:]))  # type: ignore[arg-type]
    assert [len(beam.logprobs), beam.finish_reason, beam.text] == [7, "length", None]


def logprob_of(tokens: list[int]) -> list[float]:
    """Any distribution of the next token that depends on all tokens."""
    weights = [1 + (7 * sum(tokens) + 5 * len(tokens) + 3 * i * i) % 11 for i in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def extend(given: Given, params: list[Any], _: bool) -> list[RequestOutput]:
    outputs = []
    for prompt, one in zip(given, params, strict=True):
        found = logprob_of(prompt.token_ids)
        ranked = sorted(range(VOCAB), key=lambda i: -found[i])[: one.logprobs]
        answer = CompletionOutput(0, "", ranked[:1])
        answer.logprobs = [{i: Logprob(found[i], rank + 1) for rank, i in enumerate(ranked)}]
        outputs.append(RequestOutput("", None, prompt.token_ids, None, [answer]))
    return outputs


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_wide_search_finds_the_best_of_all_sequences(penalty: float) -> None:
    """81 beams hold every sequence of four tokens."""
    scored = {}
    for tokens in itertools.product(range(VOCAB), repeat=4):
        cut = tokens[: tokens.index(END) + 1] if END in tokens else tokens
        total = sum(logprob_of([1, *cut[:i]])[token] for i, token in enumerate(cut))
        kept = [1, *cut[: len(cut) - (END in cut)]]
        scored[cut] = (total / len(kept) ** penalty, kept, "stop" if END in cut else "length")
    searcher = BeamSearcher(extend, frozenset({END}), 9, None)
    params = BeamSearchParams(beam_width=81, max_tokens=4, length_penalty=penalty)
    (output,) = searcher.search([PromptInput(None, [1])], params)
    found = [
        (beam.cum_logprob / len(beam.tokens) ** penalty, beam.tokens, beam.finish_reason)
        for beam in output.sequences
    ]
    assert len(found) == len(scored)
    assert [score for score, *_ in found] == pytest.approx(
        sorted((score for score, *_ in scored.values()), reverse=True)
    )
    assert sorted(map(repr, (tokens for _, tokens, _ in found))) == sorted(
        map(repr, (tokens for _, tokens, _ in scored.values()))
    )
    narrow = BeamSearchParams(3, 4, length_penalty=penalty, include_stop_str_in_output=True)
    (few,) = searcher.search([PromptInput(None, [1])], narrow)
    assert all(
        (beam.tokens[-1] == END) == (beam.stop_reason == END) == (beam.finish_reason == "stop")
        for beam in few.sequences
    )


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"temperature": 0.5}, "temperature"),
        ({"structured_outputs": 1}, "structured_outputs"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"beam_width": 11}, "logprobs"),
    ],
)
def test_what_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field} = "):
        content_llm().beam_search(
            [[0]], BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **given})
        )
