"""Defects of other engines with draft tokens, each by the number of its report.

Answers with draft tokens are compared with answers without them. The draft tokens are right up to a
chosen place, so that stop conditions lie in the middle of accepted ones.

Others are tested elsewhere: vLLM 43338, 56077 and 40875 (structured output, tool calls) in
``test_structured_drafts``, vLLM 44297 (end of the reasoning) in ``structured/test_reasoning``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, RequestOutput, SamplingParams, StructuredOutputs
from pagespec.engine.drafting.costs import StepCosts
from pagespec.runner.cpu import platform as cpu_platform
from tests.support.captures import capture_once
from tests.support.structured import save_byte_model

BLOCK_SIZE = 4
LETTERS = [3 + ord(letter) for letter in "abcd"]
TEMPERATURES = (0.0, 0.8, 1.2)
WORDS = ("dc", "cb", "aa")  # two tokens each
PROMPTS = ["abcdabcd", "dd", "abc" * 9, "bca bca bca", "c"]


class Engines:
    """One engine without draft tokens, and others by method and number of draft tokens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Any, LLM] = {}

    def get(self, method: str | None = None, num_drafts: int = 16, **settings: Any) -> LLM:
        key = method, num_drafts, *sorted(settings.items())
        if key not in self._made:
            config = {"method": method, "num_speculative_tokens": num_drafts}
            given: dict[str, Any] = {"num_blocks": 200, "max_model_len": 96, **settings}
            self._made[key] = LLM(
                self._folder,
                device="cpu",
                block_size=BLOCK_SIZE,
                speculative_config=config if method else None,
                check_invariants=True,
                **given,
            )
        return self._made[key]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with pytest.MonkeyPatch.context() as patched:
        capture_once(patched)
        costs = StepCosts([(1, 1.0), (99, 1.0)])  # draft tokens are free, so each is proposed
        patched.setattr(cpu_platform, "measure_costs", lambda *_: costs)
        folder = tmp_path_factory.mktemp("model")
        save_byte_model(folder)
        yield Engines(folder)


def lettered(**asked: Any) -> SamplingParams:
    """Parameters of a request whose answer consists of few letters."""
    given = {"max_tokens": 40, "seed": 5, "allowed_token_ids": LETTERS, "ignore_eos": True}
    return SamplingParams(**{**given, **asked})


def seen(outputs: Sequence[RequestOutput]) -> list[Any]:
    """What a caller sees of each answer."""
    return [
        (
            answer.token_ids,
            answer.text,
            answer.finish_reason,
            answer.stop_reason,
            answer.cumulative_logprob,
            None if answer.logprobs is None else list(answer.logprobs),
            output.prompt_logprobs and list(output.prompt_logprobs),
        )
        for output in outputs
        for answer in output.outputs
    ]


def compare(
    engines: Engines,
    params: SamplingParams | list[SamplingParams],
    *,
    prompts: Sequence[Any] = PROMPTS,
    least_accepted: int = 1,
    num_drafts: int = 16,
    **settings: Any,
) -> list[RequestOutput]:
    """Outputs without draft tokens, after a comparison with those with draft tokens.

    Args:
        least_accepted: fewest accepted draft tokens with which equal outputs count.
    """
    plain = engines.get(**settings).generate(prompts, params, use_tqdm=False)
    given = [
        {"prompt": prompt, "prediction": list(output.outputs[0].token_ids) + LETTERS}
        for prompt, output in zip(prompts, plain, strict=True)
    ]
    llm = engines.get("prediction", num_drafts, **settings)
    found = llm.generate(given, params, use_tqdm=False)
    assert seen(found) == seen(plain)
    num_accepted = sum(output.metrics.num_accepted_tokens for output in found)
    assert num_accepted >= least_accepted
    ngram = engines.get("ngram", num_drafts, **settings)
    assert seen(ngram.generate(prompts, params, use_tqdm=False)) == seen(plain)
    return plain


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_ngrams_do_not_change_an_answer(engines: Engines, temperature: float) -> None:
    """vLLM 41758: n-grams changed 20 of 20 greedy answers. 54506 requests equal ones."""
    prompts = [prompt * times for prompt in PROMPTS for times in (1, 2, 3, 4)]
    params = lettered(temperature=temperature)
    ngram = engines.get("ngram", 4, max_num_seqs=20)
    found = ngram.generate(prompts, params, use_tqdm=False)
    plain = engines.get(max_num_seqs=20).generate(prompts, params, use_tqdm=False)
    assert seen(found) == seen(plain)
    assert len(found) == 20
    assert ngram.stats().num_accepted_tokens > 20


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_log_probabilities_are_those_without_draft_tokens(
    engines: Engines, temperature: float
) -> None:
    """vLLM 17876: 0.0 beside n-grams; 34497: those of other tokens; 8047: prompts."""
    params = lettered(temperature=temperature, logprobs=2, prompt_logprobs=1)
    for output in compare(engines, params, least_accepted=100):
        (answer,) = output.outputs
        assert answer.logprobs is not None
        pairs = zip(answer.logprobs, answer.token_ids, strict=True)
        found = [row[token].logprob for row, token in pairs]
        assert len(found) == 40
        assert any(value < -0.1 for value in found)
        assert answer.cumulative_logprob == pytest.approx(sum(found))


def stops_of(engines: Engines, temperature: float, first: int) -> list[SamplingParams]:
    """For each prompt a stop string that first ends in its answer behind ``first`` tokens."""
    asked = []
    plain = engines.get().generate(PROMPTS, lettered(temperature=temperature), use_tqdm=False)
    for output in plain:
        text = output.outputs[0].text
        ends = (n for n in range(first, len(text)) if text.find(text[n - 3 : n]) == n - 3)
        end = next(ends, first)
        asked.append(lettered(temperature=temperature, stop=text[end - 3 : end], logprobs=1))
    return asked


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("first", [3, 9])
def test_nothing_is_left_behind_a_stop_string(
    engines: Engines, temperature: float, first: int
) -> None:
    """vLLM 47616: ids and log-probabilities behind it were returned. SGLang 23802: one
    that came early among many accepted tokens was missed. ArcticInference 161: it was ignored."""
    params = stops_of(engines, temperature, first)
    plain = compare(engines, params)
    for output, asked in zip(plain, params, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop"
        assert answer.stop_reason == asked.stop_strings[0]
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids) < 40
        assert asked.stop_strings[0] not in answer.text
    suffix = engines.get("suffix")
    for _ in range(2):  # the second time earlier answers are drafted
        assert seen(suffix.generate(PROMPTS, params, use_tqdm=False)) == seen(plain)


@pytest.mark.parametrize("num_less", [-1, 0, 1, 2])
def test_the_earlier_of_a_stop_string_and_the_length_ends_a_request(
    engines: Engines, num_less: int
) -> None:
    """SGLang 31599, 33758: the length hid a stop string before it, and tokens behind it leaked."""
    params = stops_of(engines, 0.0, 6)
    plain = engines.get().generate(PROMPTS, params, use_tqdm=False)
    lengths = [len(output.outputs[0].token_ids) - num_less for output in plain]
    again = [
        lettered(temperature=0.0, stop=asked.stop, logprobs=1, max_tokens=length)
        for asked, length in zip(params, lengths, strict=True)
    ]
    reasons = [o.outputs[0].finish_reason for o in compare(engines, again)]
    assert reasons == ["length" if num_less > 0 else "stop"] * len(PROMPTS)


def test_min_tokens_counts_tokens_not_steps(engines: Engines) -> None:
    """vLLM 32642, 21987: drafted end tokens ended a request too early. SGLang 33643: they were
    banned for too long, by the number of accepted tokens per step."""
    end = LETTERS[0]
    params = [
        lettered(
            temperature=temperature,
            stop_token_ids=[end],
            min_tokens=num,
            logit_bias={end: 60.0},
            max_tokens=30,
        )
        for temperature, num in zip((0.0, 0.8, 1.2, 0.0, 0.8), (0, 1, 5, 9, 20), strict=True)
    ]
    plain = compare(engines, params)
    lengths = [len(output.outputs[0].token_ids) for output in plain]
    assert lengths == [num + 1 for num in (0, 1, 5, 9, 20)]
    # One that expects the end at each place.
    llm = engines.get("prediction")
    given = [{"prompt": prompt, "prediction": [end] * 30} for prompt in PROMPTS]
    assert seen(llm.generate(given, params, use_tqdm=False)) == seen(plain)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_penalties_count_each_accepted_token(engines: Engines, temperature: float) -> None:
    """vLLM 18902: without effect. SGLang 33643: one count per step. vLLM 20247: accepted tokens
    were missing from the history."""
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    plain = {}
    for name in names:
        params = [lettered(temperature=temperature, **{name: 1.5}) for _ in PROMPTS]
        plain[name] = [o.outputs[0].token_ids for o in compare(engines, params)]
    without = engines.get().generate(PROMPTS, lettered(temperature=temperature), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in without] != plain["frequency_penalty"]


def test_bad_words_are_found_across_accepted_tokens(engines: Engines) -> None:
    """vLLM 19482: sequences that ended among draft tokens were not banned."""
    params = [lettered(temperature=t, bad_words=list(WORDS)) for t in (0.0, 0.8, 1.2, 2.0, 3.0)]
    for output in compare(engines, params):
        assert not any(word in output.outputs[0].text for word in WORDS)


def test_seeds_decide_beside_requests_without_one(engines: Engines) -> None:
    """vLLM 6038, 13196: the seed was ignored. 11123, 10863, 9441: requests without a seed beside
    others got garbage."""

    def answers(llm: LLM, seeds: Sequence[int | None], prediction: Any) -> list[Any]:
        params = [lettered(temperature=1.0, seed=seed) for seed in seeds]
        given = [{"prompt": "abab", "prediction": prediction}] * len(seeds)
        return [o.outputs[0].token_ids for o in llm.generate(given, params, use_tqdm=False)]

    seeds = [1, None, 2, 1, None, 3]
    plain = answers(engines.get(seed=7), seeds, None)
    assert plain[0] == plain[3]
    assert len(set(map(tuple, plain))) == 5
    # New engines, since the seeds of requests without one follow the number of requests.
    for num_drafts in (3, 15):
        llm = engines.get("prediction", num_drafts, seed=7)
        assert answers(llm, seeds, plain[1]) == plain
        assert llm.stats().num_accepted_tokens > 20


def test_a_follow_up_finds_the_blocks_of_an_answer(engines: Engines) -> None:
    """vLLM 18668: fewer tokens than known were cached. SGLang 35694: tokens behind the stop were
    cached, which no follow-up repeats. SGLang 8726: repeated prompts got other draft tokens."""
    for asked in (*stops_of(engines, 0.8, 5), lettered(temperature=0.8)):
        found = []
        for llm in (engines.get(), engines.get("prediction")):
            llm.reset_prefix_cache()
            (first,) = engines.get().generate(PROMPTS[2], asked, use_tqdm=False)
            prediction = list(first.outputs[0].token_ids) + LETTERS
            given: Any = {"prompt": PROMPTS[2], "prediction": prediction}
            (again,) = llm.generate(given, asked, use_tqdm=False)
            assert seen([again]) == seen([first])
            (_, repeated) = (llm.generate(given, asked, use_tqdm=False) for _ in range(2))
            assert seen(repeated) == seen([first])
            whole = [*(again.prompt_token_ids or ()), *again.outputs[0].token_ids, *LETTERS]
            params = lettered(temperature=0.8, max_tokens=4, logprobs=1)
            (follow_up,) = llm.generate([{"prompt_token_ids": whole}], params, use_tqdm=False)
            found.append((follow_up.num_cached_tokens, seen([follow_up])))
        assert found[0] == found[1]
        assert found[0][0] >= len(whole) - len(LETTERS) - BLOCK_SIZE


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_preempted_requests_drop_their_draft_tokens(engines: Engines, temperature: float) -> None:
    """vLLM 31955: draft tokens of before a preemption came back and failed in the grammar. 49620:
    results of a preempted row were taken."""
    schema = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 3, "maxItems": 5}
    constraint = StructuredOutputs(json=schema, disable_any_whitespace=True)
    params = [
        SamplingParams(
            max_tokens=40,
            temperature=temperature,
            seed=i,
            structured_outputs=constraint if i % 2 else None,
            ignore_eos=not i % 2,
        )
        for i in range(len(PROMPTS))
    ]
    small = {"num_blocks": 20, "max_model_len": 72}
    plain = engines.get(num_blocks=200, max_model_len=72).generate(PROMPTS, params, use_tqdm=False)
    for text in (output.outputs[0].text for output in plain[1::2]):
        assert 3 <= len(json.loads(text)) <= 5
    for overlap in (False, True):
        for answer in (0, 1):  # right draft tokens, and those of another request
            llm = engines.get("prediction", 6, overlap=overlap, **small)
            given = [
                {"prompt": p, "prediction": plain[(i + answer) % 5].outputs[0].token_ids}
                for i, p in enumerate(PROMPTS)
            ]
            found = llm.generate(given, params, use_tqdm=False)
            assert seen(found) == seen(plain)
            assert sum(output.metrics.num_preemptions for output in found) > 0


@pytest.mark.parametrize("num_prompt_tokens", [27, 28, 29, 30, 31])
def test_draft_tokens_end_at_the_longest_length(engines: Engines, num_prompt_tokens: int) -> None:
    """ArcticInference 151, vllm-ascend 2280: a crash near ``max_model_len``."""
    params = lettered(temperature=0.8, max_tokens=None, logprobs=1)
    prompts = ["a" * num_prompt_tokens] * 2
    small = {"max_model_len": 32, "num_blocks": 16}
    plain = compare(engines, params, prompts=prompts, least_accepted=0, **small)
    for output in plain:
        assert len(output.outputs[0].token_ids) == 32 - num_prompt_tokens
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_grammar_that_is_complete_among_draft_tokens_ends_the_request(
    engines: Engines, temperature: float
) -> None:
    """SGLang 21723, 9187: generation went on behind the end of the grammar."""
    params = SamplingParams(
        max_tokens=40,
        temperature=temperature,
        seed=2,
        structured_outputs=StructuredOutputs(regex="[ab]{3}"),
    )
    plain = engines.get().generate(PROMPTS, params, use_tqdm=False)
    for output in plain:
        assert len(output.outputs[0].text) == 3
        assert output.outputs[0].finish_reason == "stop"
    for behind in (LETTERS, [], [2, 2, 2]):
        given = [
            {"prompt": prompt, "prediction": [*output.outputs[0].token_ids, *behind]}
            for prompt, output in zip(PROMPTS, plain, strict=True)
        ]
        llm = engines.get("prediction")
        assert seen(llm.generate(given, params, use_tqdm=False)) == seen(plain)
    assert llm.stats().num_accepted_tokens > 10


@pytest.mark.parametrize("temperature", TEMPERATURES[1:])
def test_continuations_of_a_prompt_have_their_own_draft_tokens(
    engines: Engines, temperature: float
) -> None:
    """vLLM 9441: requests with several seeds beside each other got garbage."""
    params = lettered(temperature=temperature, n=3, logprobs=1)
    for output in compare(engines, params):
        texts = [answer.text for answer in output.outputs]
        assert len(set(texts)) == 3
