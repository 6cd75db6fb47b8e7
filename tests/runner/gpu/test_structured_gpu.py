"""Structured output on a GPU: CUDA graphs, overlapped steps, no compilation after start-up."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pagespec import LLM, RequestOutput, SamplingParams
from pagespec.engine.inputs import PromptInput
from tests.runner.test_structured_reasoning import LIKELY, MAY_OPEN, OPEN, content_of, text_of
from tests.support.structured import END, check_output, random_outputs, saved_qwen3

pytestmark = pytest.mark.gpu

NUM_REQUESTS = 96


@functools.cache
def folder() -> str:
    """Qwen3 with two layers and heads of 64; its logits have more columns than there are tokens."""
    return saved_qwen3()


def engine(**settings: Any) -> LLM:
    given = {"max_num_seqs": 48, "max_model_len": 256, "num_blocks": 2000} | settings
    return LLM(folder(), dtype="bfloat16", device="cuda", check_invariants=True, **given)


Load = tuple[list[list[int]], list[SamplingParams], dict[int, Callable[[str], bool]]]


@functools.cache
def load() -> Load:
    """Prompts and parameters, half of them constrained, and the checks of those texts."""
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


def test_complete_answers_match_their_constraints() -> None:
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


# Behind reasoning -------------------------------------------------------------------------------

_REASONINGS = (OPEN, OPEN, MAY_OPEN)


@functools.cache
def reasoned_load() -> tuple[list[PromptInput], list[SamplingParams], list[Callable[[str], bool]]]:
    """Constrained answers that begin after reasoning."""
    rng = random.Random(1)
    prompts, params, checks = [], [], []
    for i in range(NUM_REQUESTS):
        outputs, is_met = random_outputs(rng)
        ids = rng.choices(range(3, 266), k=rng.choice([1, 20, 90]))
        prompts.append(PromptInput(None, ids, reasoning=_REASONINGS[i % len(_REASONINGS)]))
        params.append(
            SamplingParams(
                max_tokens=96, seed=i, structured_outputs=outputs, logit_bias=LIKELY, logprobs=1
            )
        )
        checks.append(is_met)
    return prompts, params, checks


def reasoned_results(**settings: Any) -> list[RequestOutput]:
    prompts, params, _ = reasoned_load()
    outputs = list(engine(**settings).generate_iter(zip(prompts, params, strict=True)))
    assert all(isinstance(output, RequestOutput) for output in outputs), outputs
    return outputs  # type: ignore[return-value]


@functools.cache
def reasoned_expected() -> list[tuple[list[int], Any]]:
    return results(reasoned_results())


def _contents() -> list[bytes | None]:
    prompts, _, _ = reasoned_load()
    answers = [ids for ids, _ in reasoned_expected()]
    return [
        content_of(
            SimpleNamespace(output_token_ids=ids, info=SimpleNamespace(reasoning=p.reasoning))
        )  # type: ignore[arg-type]
        for ids, p in zip(answers, prompts, strict=True)
    ]


def test_content_behind_reasoning_meets_its_constraint() -> None:
    _, _, checks = reasoned_load()
    num_complete = num_reasoned = 0
    rows = zip(reasoned_expected(), _contents(), checks, strict=True)
    for (ids, _), content, is_met in rows:
        if content is None or ids[-1] != END:
            continue
        text = content.decode()
        assert is_met(text) or is_met(text.lstrip()), text
        num_complete += 1
        num_reasoned += len(content) < len(text_of(ids))
    assert num_complete > NUM_REQUESTS // 4
    assert num_reasoned > NUM_REQUESTS // 8


def test_reasoning_is_that_of_a_run_without_constraints() -> None:
    prompts, params, _ = reasoned_load()
    free = [
        SamplingParams(max_tokens=96, seed=p.seed, logit_bias=LIKELY, logprobs=1) for p in params
    ]
    plain = results(list(engine().generate_iter(zip(prompts, free, strict=True))))  # type: ignore[arg-type]
    num_equal = 0
    rows = zip(prompts, reasoned_expected(), plain, _contents(), strict=True)
    for prompt, (ids, _), (others, _), content in rows:
        if prompt.reasoning is not OPEN:
            continue
        closed = [n for n in range(len(ids)) if OPEN.closing in text_of(ids[: n + 1])]
        # The token that closes the reasoning has nothing behind: it may be another.
        before = closed[0] if closed else len(ids)
        assert ids[:before] == others[:before]
        assert bool(closed) == (content is not None)
        num_equal += before
    assert num_equal > NUM_REQUESTS


@pytest.mark.parametrize("settings", [{"overlap": False}, {"num_blocks": 60}], ids=str)
def test_answers_behind_reasoning_do_not_depend_on_the_schedule(settings: dict[str, Any]) -> None:
    outputs = reasoned_results(**settings)
    assert results(outputs) == reasoned_expected()
    if "num_blocks" in settings:
        assert any(output.metrics.num_preemptions for output in outputs)
