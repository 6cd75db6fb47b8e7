"""Log-probabilities through ``LLM``: against Hugging Face, and bit-identical in every schedule."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import shutil
from typing import Any
from unittest import mock

import pytest
import torch

from pagespec import LLM, InvalidInputError, Logprob, SamplingParams, ScoreOutput
from pagespec.compile import captured_model
from pagespec.engine.logprob_lists import FlatLogprobs
from pagespec.engine.outputs import RequestOutput
from tests.support.captures import capture_once
from tests.support.content_llm import content_llm
from tests.support.driving import hf_logits
from tests.support.models import BY_DAY, VOCAB_SIZE, tiny_model

NUM_TOKENS = 6


class NumberTokenizer:
    """One integer per token."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(f" {token}" for token in token_ids)


@pytest.fixture(autouse=True)
def _shares_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most engines in this file have equal models."""
    capture_once(monkeypatch)


def make_llm(arch: str = "llama", **settings: Any) -> LLM:
    settings = {"device": "cpu", "num_blocks": 64, "max_model_len": 128, **settings}
    return LLM(tiny_model(arch, num_hidden_layers=2), **settings)


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def generate(llm: LLM, given: list[list[int]], **params: Any) -> list[RequestOutput]:
    settings = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "seed": 5, **params}
    return llm.generate(given, SamplingParams(**settings), use_tqdm=False)


def own_logprobs(output: RequestOutput) -> list[float]:
    answer = output.outputs[0]
    assert answer.logprobs is not None
    own = zip(answer.token_ids, answer.logprobs, strict=True)
    found = [entries[token].logprob for token, entries in own]
    assert answer.cumulative_logprob == sum(found)
    return found


def exact_logprobs(arch: str, token_ids: list[int]) -> tuple[torch.Tensor, float]:
    """Log-probabilities ``[tokens, V]`` of a float64 forward pass, and how far those of a float32
    pass may be from them.

    Hugging Face's own float32 pass measures the rounding noise of the model: its largest distance,
    of all tokens. The engine rounds as often, in another order, so it may be twice as far.
    """
    module = tiny_model(arch, num_hidden_layers=2)
    logits = hf_logits(module, token_ids).float()
    exact = copy.deepcopy(module).double()
    exact.set_experts_implementation("eager")  # the grouped matmul has no float64
    with mock.patch.object(torch, "float32", torch.float64):  # of norms and softmax
        expected = hf_logits(exact, token_ids).log_softmax(-1)
    assert expected.dtype == torch.float64
    noise = float((logits.double().log_softmax(-1) - expected).abs().max())
    # A sum of so many terms as the model is wide has not more than this.
    num_roundings = 2 * module.config.get_text_config().hidden_size
    assert noise < num_roundings * float(logits.abs().max()) * torch.finfo(torch.float32).eps
    return expected, 2 * noise


@pytest.mark.parametrize("arch", BY_DAY)
def test_beside_hugging_face(arch: str) -> None:
    llm = make_llm(arch)
    for output in generate(llm, prompts(9, 1, 30), logprobs=3, prompt_logprobs=2):
        answer, prompt = output.outputs[0], output.prompt_token_ids
        token_ids = [*prompt, *answer.token_ids]
        expected, limit = exact_logprobs(arch, token_ids)
        assert output.prompt_logprobs is not None
        assert answer.logprobs is not None
        assert output.prompt_logprobs[0] is None
        places = [(*pair, 2) for pair in enumerate(output.prompt_logprobs[1:])]
        places += [(len(prompt) - 1 + i, entries, 3) for i, entries in enumerate(answer.logprobs)]
        for position, entries, count in places:
            assert entries is not None
            assert next(iter(entries)) == token_ids[position + 1]
            assert len(entries) in (count, count + 1)
            for token, entry in entries.items():
                assert abs(entry.logprob - float(expected[position, token])) < limit
                assert entry.decoded_token is None
        own = zip(answer.token_ids, answer.logprobs, strict=True)
        assert [entries[token].rank for token, entries in own] == [1] * NUM_TOKENS


CONDITIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preempted": {"num_blocks": 20, "block_size": 4, "max_model_len": 76},
    "overlap": {"overlap": True},
    "inductor": {"compile": "inductor"},
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_score_is_the_float_that_was_sampled(condition: str) -> None:
    if condition == "inductor" and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    llm = make_llm(**CONDITIONS[condition])
    given = prompts(3, 25, 17, 40, 1)
    asked = {"temperature": 0.8, "top_p": 0.95, "logprobs": 4, "prompt_logprobs": 1}
    outputs = generate(llm, given, **asked, max_tokens=20)
    assert (sum(o.metrics.num_preemptions for o in outputs) > 0) == (condition == "preempted")
    for output, prompt in zip(outputs, given, strict=True):
        answer = output.outputs[0].token_ids
        (score,) = llm.score([prompt + answer], use_tqdm=False)
        assert isinstance(score, ScoreOutput)
        assert score.logprobs[0] is None
        assert score.tokens is None
        assert score.logprobs[len(prompt) :] == own_logprobs(output)
        assert output.prompt_logprobs is not None
        for position, entries in enumerate(output.prompt_logprobs[1:], 1):
            assert entries is not None
            assert entries[prompt[position]].logprob == score.logprobs[position]
            assert entries[prompt[position]].rank == score.ranks[position]
        again = generate(llm, [prompt], **{**asked, "prompt_logprobs": None}, max_tokens=20)[0]
        assert again.outputs[0].logprobs == output.outputs[0].logprobs
        if len(prompt) > 16:
            assert again.metrics.num_cached_tokens > 0  # and a hit changes nothing
        assert again.prompt_logprobs is None
        assert score.total_logprob == sum(value for value in score.logprobs[1:] if value)


def test_all_of_the_vocabulary_up_to_max_logprobs() -> None:
    llm = make_llm(max_logprobs=-1)
    given = prompts(5, 12)
    whole = generate(llm, given, logprobs=-1, prompt_logprobs=-1)
    some = generate(llm, given, logprobs=20, prompt_logprobs=30)
    flat = generate(llm, given, logprobs=-1, prompt_logprobs=-1, flat_logprobs=True)
    for output, part, columns in zip(whole, some, flat, strict=True):
        answer = output.outputs[0]
        expected = hf_logits(
            tiny_model("llama", num_hidden_layers=2), output.prompt_token_ids + answer.token_ids
        ).log_softmax(-1)
        assert isinstance(answer.logprobs, list)
        assert isinstance(output.prompt_logprobs, list)
        found = [*output.prompt_logprobs[1:], *answer.logprobs]
        for entries, row in zip(found, expected[:-1], strict=True):
            assert entries is not None
            assert sorted(entries) == list(range(VOCAB_SIZE))
            assert sorted(e.rank or 0 for e in entries.values()) == [*range(1, VOCAB_SIZE + 1)]
            for token, entry in entries.items():
                assert abs(entry.logprob - float(row[token])) < 1e-4
        pairs = [(answer.logprobs, part.outputs[0].logprobs, 20)]
        pairs += [(output.prompt_logprobs[1:], (part.prompt_logprobs or [])[1:], 30)]  # type: ignore[list-item]
        for all_of, few_of, count in pairs:
            for entries, few in zip(all_of, few_of or (), strict=True):
                assert count <= len(few) <= count + 1
                assert few.items() <= entries.items()  # the same floats and ranks
        assert isinstance(columns.outputs[0].logprobs, FlatLogprobs)
        assert list(columns.outputs[0].logprobs) == answer.logprobs
        assert isinstance(columns.prompt_logprobs, FlatLogprobs)
        assert list(columns.prompt_logprobs)[1:] == output.prompt_logprobs[1:]
        assert columns.outputs[0].cumulative_logprob == answer.cumulative_logprob


def test_given_tokens_have_the_floats_of_the_whole_vocabulary() -> None:
    given, ids = prompts(5, 12), [7, 40, 2]
    asked: dict[str, Any] = {"temperature": 0.7, "n": 2, "logit_bias": {6: 4.0}}
    llm = make_llm(max_logprobs=-1)
    whole = generate(llm, given, **asked, logprobs=-1)
    outputs = generate(llm, given, **asked, logprob_token_ids=ids)
    for output, other in zip(outputs, whole, strict=True):
        for answer, all_of in zip(output.outputs, other.outputs, strict=True):
            assert answer.token_ids == all_of.token_ids
            assert answer.cumulative_logprob == all_of.cumulative_logprob
            assert answer.logprobs is not None
            pairs = zip(answer.token_ids, answer.logprobs, all_of.logprobs or (), strict=True)
            for token_id, entries, every in pairs:
                assert list(entries) == list(dict.fromkeys([token_id, *ids]))
                assert entries.items() <= every.items()
    (flat,) = generate(llm, given[:1], **asked, logprob_token_ids=ids, flat_logprobs=True)
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == outputs[0].outputs[0].logprobs


def test_given_tokens_are_refused_where_they_have_no_row() -> None:
    llm = content_llm(logprobs_mode="processed_logprobs")
    for engine, ids in ((llm, [0]), (content_llm(), [10**6])):
        with pytest.raises(InvalidInputError, match=r"^logprob_token_ids = "):
            generate(engine, [[0]], logprob_token_ids=ids)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_log_probabilities_than_max_logprobs_are_refused(name: str) -> None:
    llm = content_llm(max_logprobs=2)
    (request,) = llm.factory.make(llm.reader.read([0]), SamplingParams(**{name: 2}))
    assert getattr(request.sampling_params, name) == 2
    for value in (3, -1):
        with pytest.raises(InvalidInputError, match=f"^{name} = {value}: .* max_logprobs = 2"):
            generate(llm, [[0]], **{name: value})
    with pytest.raises(InvalidInputError, match=r"^max_logprobs = -2"):
        content_llm(max_logprobs=-2)
    with pytest.raises(InvalidInputError, match=r"^max_logprobs = 21"):
        content_llm(max_logprobs=21, logprobs_mode="processed_logprobs")


def test_a_request_may_read_nothing_from_the_prefix_cache() -> None:
    llm = content_llm()
    assert [generate(llm, [[0] * 9])[0].num_cached_tokens for _ in range(2)] == [0, 8]
    again = generate(llm, [[0] * 9], skip_reading_prefix_cache=True)[0]
    assert again.num_cached_tokens == 0
    assert generate(llm, [[0] * 9], skip_reading_prefix_cache=False)[0].num_cached_tokens == 8


def test_the_best_of_the_likeliest_is_the_greedy_token() -> None:
    """As in lm-eval: the token's own float is compared with the largest of the dict."""
    llm = make_llm()
    prompt = prompts(12)[0]
    answer = generate(llm, [prompt])[0].outputs[0].token_ids
    full = generate(llm, [prompt + answer], prompt_logprobs=1, max_tokens=1)[0].prompt_logprobs
    assert full is not None
    for token, entries in zip(answer, full[len(prompt) :], strict=True):
        assert entries is not None
        assert entries[token].logprob == max(e.logprob for e in entries.values())
        assert len(entries) == 1
        assert entries[token].rank == 1


def test_processed_logprobs_are_of_what_was_kept() -> None:
    llm = make_llm(logprobs_mode="processed_logprobs")
    (output,) = generate(llm, prompts(9), temperature=2.0, top_k=3, logprobs=5, prompt_logprobs=0)
    assert output.outputs[0].logprobs is not None
    for entries in output.outputs[0].logprobs:
        values = [entry.logprob for entry in entries.values()]
        kept = [value for value in values if value > -math.inf]
        assert len(kept) == 3
        assert sum(map(math.exp, kept)) == pytest.approx(1)
    raw = make_llm().score(prompts(9), use_tqdm=False)[0].logprobs
    assert output.prompt_logprobs is not None
    found = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    assert [entries and entries[token].logprob for token, entries in found] == raw
    (greedy,) = generate(llm, prompts(9), logprobs=0)
    expected = make_llm().score([prompts(9)[0] + greedy.outputs[0].token_ids], use_tqdm=False)
    assert own_logprobs(greedy) == pytest.approx(expected[0].logprobs[9:], abs=1e-5)


def test_only_tokens_of_the_answer_have_them() -> None:
    """With overlap a step is in flight when a stop string or token ends the request."""
    tokenizer = NumberTokenizer()
    llm = make_llm(overlap=True)
    llm.reader._tokenizer = llm._loop._factory._tokenizer = tokenizer
    first = generate(llm, prompts(5), logprobs=1)[0].outputs[0]
    assert first.logprobs is not None
    entry = first.logprobs[2][first.token_ids[2]]
    assert entry == Logprob(entry.logprob, 1, tokenizer.decode([first.token_ids[2]]))
    stops = [{"stop_token_ids": [first.token_ids[2]]}, {"stop": entry.decoded_token}]
    for stop in stops:
        answer = generate(llm, prompts(5), logprobs=1, **stop)[0].outputs[0]
        assert answer.finish_reason == "stop"
        assert answer.logprobs == first.logprobs[: len(answer.token_ids)]
        assert len(answer.token_ids) == 3
    score = llm.score("4 17", use_tqdm=False)[0]
    assert score.prompt == "4 17"
    assert score.tokens == [" 4", " 17"]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-2, False, 1.0, "3"])
def test_parameters_that_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_modes_that_are_refused_by_name() -> None:
    for mode in ("raw_logits", "processed_logits"):
        with pytest.raises(InvalidInputError, match="logprobs_mode"):
            content_llm(logprobs_mode=mode)


def test_a_graph_without_its_head_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_model, "expose_hidden", lambda *_: False)
    llm = make_llm()
    with pytest.raises(InvalidInputError, match="prompt_logprobs"):
        llm.score(prompts(5), use_tqdm=False)
    assert own_logprobs(generate(llm, prompts(5), logprobs=0)[0])
    assert dataclasses.asdict(Logprob(-1.0)) == {
        "logprob": -1.0,
        "rank": None,
        "decoded_token": None,
    }
