"""Structured output on a GPU: graphs, overlap, and nothing compiled after start-up."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, RequestOutput, SamplingParams
from tests.support.models import tiny_model
from tests.support.structured import END, check_output, random_outputs, tokenizer

pytestmark = pytest.mark.gpu

NUM_REQUESTS = 96


@functools.cache
def folder() -> str:
    """Qwen3 of two layers with heads of 64; its logits have more columns than there are tokens."""
    path = tempfile.mkdtemp(prefix="structured-")
    model = tiny_model(
        "qwen3",
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        head_dim=64,
        max_position_embeddings=1024,
    )
    model.generation_config.eos_token_id = END
    model.save_pretrained(Path(path))
    tokenizer().save_pretrained(path)
    return path


def engine(**settings: Any) -> LLM:
    given = {"max_num_seqs": 48, "max_model_len": 256, "num_blocks": 2000} | settings
    return LLM(folder(), dtype="bfloat16", device="cuda", check_invariants=True, **given)


Load = tuple[list[list[int]], list[SamplingParams], dict[int, Callable[[str], bool]]]


@functools.cache
def load() -> Load:
    """Prompts and parameters, half of them constrained, and what those texts must meet."""
    rng = random.Random(0)
    prompts, params, checks = [], [], {}
    for i in range(NUM_REQUESTS):
        outputs = None
        if rng.random() < 0.5:
            outputs, checks[i] = random_outputs(rng)
        kind = rng.choice([{"temperature": 0.0}, {}, {"top_p": 0.9}, {"repetition_penalty": 1.2}])
        prompts.append(rng.choices(range(3, 266), k=rng.choice([1, 20, 90])))
        params.append(
            SamplingParams(
                max_tokens=64,
                ignore_eos=outputs is None,
                seed=i,
                structured_outputs=outputs,
                logprobs=rng.choice([None, 2]),
                **kind,
            )
        )
    return prompts, params, checks


def results(outputs: list[RequestOutput]) -> list[tuple[list[int], Any]]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@functools.cache
def expected() -> list[tuple[list[int], Any]]:
    prompts, params, _ = load()
    return results(engine().generate(prompts, params, use_tqdm=False))


def test_complete_answers_meet_what_was_asked() -> None:
    _, _, checks = load()
    tokens = [ids for ids, _ in expected()]
    complete = [
        check_output(tokens[i], "stop" if tokens[i][-1] == END else "length", is_met)
        for i, is_met in checks.items()
    ]
    assert sum(complete) > 0.8 * len(complete)


@pytest.mark.parametrize(
    "settings",
    [{"overlap": False}, {"num_blocks": 60}, {"graph_batch_sizes": []}, {"max_num_seqs": 3}],
    ids=str,
)
def test_tokens_do_not_depend_on_the_schedule(settings: dict[str, Any]) -> None:
    prompts, params, _ = load()
    outputs = engine(**settings).generate(prompts, params, use_tqdm=False)
    assert results(outputs) == expected()
    if "num_blocks" in settings:
        assert any(output.metrics.num_preemptions for output in outputs)


def test_neighbours_are_those_of_a_run_without_schemas() -> None:
    prompts, params, checks = load()
    others = [i for i in range(NUM_REQUESTS) if i not in checks]
    outputs = engine().generate(
        [prompts[i] for i in others], [params[i] for i in others], use_tqdm=False
    )
    assert results(outputs) == [expected()[i] for i in others]


def test_nothing_is_compiled_or_captured_once_it_serves() -> None:
    prompts, params, _ = load()
    llm = engine()
    before = llm.stats()
    llm.generate(prompts, params, use_tqdm=False)
    after = llm.stats()
    assert after.num_compilations == before.num_compilations
    assert after.num_graphs == before.num_graphs
    assert after.host_s["masks"] > 0


def test_an_interrupted_run_leaves_a_whole_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params, _ = load()
    llm = engine()
    matchers = llm.engine.runner._sampler.matchers  # type: ignore[attr-defined]
    masks, calls = matchers.masks, []

    def interrupted(rows: Any) -> Any:
        calls.append(rows)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return masks(rows)

    with monkeypatch.context() as patch:
        patch.setattr(matchers, "masks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params, use_tqdm=False)
    assert results(llm.generate(prompts, params, use_tqdm=False)) == expected()
