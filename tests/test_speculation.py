"""``speculative_config`` in whole engines: every output is equal to the bit with and without it."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pagespec import LLM, AsyncLLM, InvalidInputError, SamplingParams
from pagespec.distributed import launch
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.plan import StepPlan
from pagespec.runner.cpu import platform as cpu_platform
from tests.support.captures import capture_once
from tests.support.content_llm import content_llm
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.tiny_configs import RECURRENT

NUM_OUTPUTS = 24
METHODS = ("ngram", "suffix", "prediction")
# Each method drafts first from the prediction, by the same code: so all predictions with one
# method, and with each other method one that it must draft behind.
RUNS = [("ngram", "right"), ("ngram", "partly"), ("ngram", "wrong")]
RUNS += [("suffix", "partly"), ("prediction", "wrong")]


@pytest.fixture
def _one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_once(monkeypatch)
    monkeypatch.setattr(cpu_platform, "_packing_bytes", lambda **_: 0)
    # The number of draft tokens would follow the load of this machine.
    monkeypatch.setattr(cpu_platform, "measure_costs", lambda *_: StepCosts([(1, 1.0), (99, 1.0)]))


class Bits:
    """The bits of all logits that tokens of an answer are sampled from."""

    def __init__(self) -> None:
        self.found: defaultdict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))

    def __call__(self, plan: StepPlan, logits: torch.Tensor) -> None:
        rows = iter(logits.detach().clone())
        drafts = plan.drafts() if plan.has_drafts else {}
        for index, (info, start, n, num_samples) in enumerate(plan.rows()):
            for i in range(num_samples):
                position = start + n - num_samples + 1 + i
                digest = hashlib.blake2b(next(rows).numpy().tobytes(), digest_size=16).digest()
                before = list(drafts.get(index, ())[:i])
                self.found[info.request_id][position].append((digest, before))

    def of(self, request_id: str, tokens: Sequence[int], begin: int) -> dict[int, set[bytes]]:
        """By position of the answer, the digests behind the request's own tokens."""
        tokens = list(tokens)
        found = {}
        for position in range(begin, len(tokens)):
            there = self.found[request_id][position]
            found[position] = {d for d, b in there if tokens[position - len(b) : position] == b}
        return found


def make_prompts() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    found = []
    for i in range(9):
        piece = [rng.randrange(VOCAB_SIZE) for _ in range(3 + i % 4)]
        asked: dict[str, Any] = {"temperature": (0.0, 0.8, 1.2)[i % 3], "seed": i}
        if i % 3 == 1:
            asked |= {"n": 2, "top_p": 0.9}
        if i % 4 == 0:
            asked["logprobs"] = 2
        if i == 6:
            asked |= {"prompt_logprobs": 1, "top_k": 5}
        params = SamplingParams(max_tokens=NUM_OUTPUTS - i, ignore_eos=True, **asked)
        found.append((piece * (1 + i % 3), params))
    return found


def outcome(llm: LLM, bits: Bits, predictions: Sequence[Any]) -> tuple[list[Any], Any]:
    """What callers see of each request, and the statistics."""
    pairs = make_prompts()
    prompts = [
        {"prompt_token_ids": ids, "prediction": prediction}
        for (ids, _), prediction in zip(pairs, predictions, strict=True)
    ]
    outputs = llm.generate(prompts, [params for _, params in pairs], use_tqdm=False)
    seen = []
    for output in outputs:
        prompt = output.prompt_token_ids
        for answer in output.outputs:
            name = str(int(output.request_id) + answer.index)
            digests = bits.of(name, [*prompt, *answer.token_ids], len(prompt))
            assert all(len(found) == 1 for found in digests.values())
            rows = None if answer.logprobs is None else list(answer.logprobs)
            seen.append((answer.token_ids, answer.finish_reason, answer.cumulative_logprob))
            seen.append((rows, digests))
        seen.append(output.prompt_logprobs and list(output.prompt_logprobs))
    return seen, (llm.stats(), outputs)


WORLDS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "preempting": {"num_blocks": 12, "max_model_len": 44, "max_num_seqs": 4},
    "overlap": {"overlap": True},
    "no cache": {"enable_prefix_caching": False},
    "processed": {"logprobs_mode": "processed_logprobs"},
}


HYBRIDS = {
    "roomy": "qwen3_next",
    "chunks": "granitemoehybrid",
    "preempting": "lfm2",
    "overlap": "qwen3_5_text",
    "no cache": "jamba",
    "checkpoints": "kimi_linear",
}
WORLDS["checkpoints"] = {"state_interval": 4, "num_state_slots": 40}


@pytest.mark.usefixtures("_one_capture")
@pytest.mark.parametrize(
    ("arch", "world"),
    [*(("llama", world) for world in WORLDS), *((arch, w) for w, arch in HYBRIDS.items())],
)
def test_every_output_is_equal_to_the_bit(arch: str, world: str) -> None:
    """Predictions that are right, partly right and wrong; n-grams of repeating prompts; greedy and
    sampled; several continuations; log-probabilities of samples and prompts."""
    model = tiny_model(arch, num_hidden_layers=2) if arch == "llama" else tiny_model(arch)
    settings = {"block_size": 4, "num_blocks": 120, "max_num_seqs": 6, "max_model_len": 60}
    settings |= WORLDS[world]

    def made(config: Any) -> tuple[LLM, Bits]:
        bits = Bits()
        llm = LLM(
            model, check_invariants=True, on_logits=bits, speculative_config=config, **settings
        )
        bits.found.clear()
        return llm, bits

    plain, (stats, outputs) = outcome(*made(None), [None] * 9)
    assert stats.num_draft_tokens == 0
    assert stats.accepted_per_position == []
    rng = random.Random(world)
    right = [output.outputs[0].token_ids for output in outputs]
    partly = [
        [t if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE) for t in ids] for ids in right
    ]
    wrong = [[rng.randrange(VOCAB_SIZE) for _ in ids] for ids in right]
    predictions = {"right": right, "partly": partly, "wrong": wrong}
    num_accepted = []
    for method, kind in RUNS:
        llm, bits = made({"method": method, "num_speculative_tokens": 4})
        drafted, (stats, outputs) = outcome(llm, bits, predictions[kind])
        assert drafted == plain, (method, kind)
        num_accepted.append(stats.num_accepted_tokens)
        metrics = [output.metrics for output in outputs]
        assert sum(m.num_draft_tokens for m in metrics) == stats.num_draft_tokens > 0
        assert sum(m.num_accepted_tokens for m in metrics) == stats.num_accepted_tokens
        assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
        assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
        if world == "preempting":
            assert any(m.num_preemptions for m in metrics)
    # A right prediction is mostly accepted.
    assert num_accepted[0] > 50
    assert num_accepted[0] > num_accepted[1] > num_accepted[2]


@pytest.mark.usefixtures("_one_capture")
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "deepseek_v3", *RECURRENT])
def test_other_models(arch: str, dtype: torch.dtype) -> None:
    model = tiny_model(arch).to(dtype)
    settings: dict[str, Any] = {"num_blocks": 60, "max_model_len": 80, "check_invariants": True}
    plain = LLM(model, **settings)
    drafting = LLM(model, speculative_config={"method": "prediction"}, **settings)
    params = SamplingParams(temperature=0.8, max_tokens=20, seed=1, logprobs=1, ignore_eos=True)
    prompts = [[5, 6, 7], [8] * 20, [1]]
    expected = plain.generate(prompts, params, use_tqdm=False)
    given = [
        {"prompt_token_ids": ids, "prediction": output.outputs[0].token_ids}
        for ids, output in zip(prompts, expected, strict=True)
    ]
    found = drafting.generate(given, params, use_tqdm=False)
    for a, b in zip(expected, found, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert list(a.outputs[0].logprobs) == list(b.outputs[0].logprobs)
    stats = drafting.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 30
    assert stats.num_steps < plain.stats().num_steps


@pytest.mark.usefixtures("_one_capture")
@pytest.mark.parametrize("arch", ["qwen3_next", "granitemoehybrid"])
def test_conversations_found_in_the_cache_of_hybrids(arch: str) -> None:
    """Drafts beside the prefix cache lowered the accuracy of hybrids in another engine (vLLM
    issues 43559 and 53912): there, checkpoints held states behind rejected draft tokens."""
    model = tiny_model(arch)
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 200, "max_model_len": 120}
    settings |= {"state_interval": 4, "num_state_slots": 80, "check_invariants": True}
    config = {"method": "prediction", "num_speculative_tokens": 5}
    plain = LLM(model, enable_prefix_caching=False, **settings)
    drafting = LLM(model, speculative_config=config, **settings)
    rng = random.Random(arch)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(5 + i)] for i in range(6)]
    num_cached = 0
    for turn in range(4):
        params = [
            SamplingParams(
                temperature=(0.0, 0.8, 1.2)[i % 3],
                max_tokens=15,
                seed=i,
                logprobs=1,
                ignore_eos=True,
            )
            for i in range(len(prompts))
        ]
        expected = plain.generate(prompts, params, use_tqdm=False)
        given = []
        for ids, output in zip(prompts, expected, strict=True):
            right = output.outputs[0].token_ids
            guess = [t if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE) for t in right]
            given.append({"prompt_token_ids": ids, "prediction": guess})
        found = drafting.generate(given, params, use_tqdm=False)
        for a, b in zip(expected, found, strict=True):
            assert a.outputs[0].token_ids == b.outputs[0].token_ids
            assert list(a.outputs[0].logprobs) == list(b.outputs[0].logprobs)
            num_cached += b.num_cached_tokens
        # The next turn finds states that steps with drafts computed.
        prompts = [
            [*ids, *output.outputs[0].token_ids, turn]
            for ids, output in zip(prompts, expected, strict=True)
        ]
    stats = drafting.stats()
    assert num_cached > 600
    assert stats.num_draft_tokens > stats.num_accepted_tokens + 40 > 100


@pytest.mark.nightly
def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "measure_costs", lambda *_: StepCosts([(1, 1.0), (99, 1.0)]))
    tiny_model("qwen3").save_pretrained(tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "tensor_parallel_size": 2, "num_blocks": 80}
    params = [
        SamplingParams(temperature=t, max_tokens=24, seed=3, logprobs=1, ignore_eos=True)
        for t in (0.0, 0.8, 1.2)
    ]
    prompts = [[5, 6, 7], [8, 9] * 20, [1] * 9]
    plain = LLM(tmp_path, **settings)
    expected = plain.generate(prompts, params, use_tqdm=False)
    del plain
    llm = LLM(tmp_path, speculative_config={"method": "ngram"}, **settings)
    given = [
        {"prompt_token_ids": ids, "prediction": output.outputs[0].token_ids}
        for ids, output in zip(prompts, expected, strict=True)
    ]
    found = llm.generate(given, params, use_tqdm=False)
    for a, b in zip(expected, found, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert list(a.outputs[0].logprobs) == list(b.outputs[0].logprobs)
    assert llm.stats().num_accepted_tokens > 40


def test_step_costs_are_measured_without_a_call_of_on_logits() -> None:
    calls: list[object] = []
    llm = LLM(
        tiny_model("llama", num_hidden_layers=1),
        num_blocks=40,
        max_num_seqs=4,
        on_logits=lambda *given: calls.append(given),
        speculative_config={"method": "ngram", "num_speculative_tokens": 7},
    )
    drafter: Any = llm.engine.scheduler.drafter
    assert [size for size, _ in drafter.other.mode.costs.measured] == [1, 2, 4, 8, 16, 32]
    assert calls == []
    params = SamplingParams(temperature=0.0, max_tokens=6)
    (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
    plain = LLM(tiny_model("llama", num_hidden_layers=1), num_blocks=40)
    (expected,) = plain.generate([1, 2, 3], params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


# Over the content runner --------------------------------------------------------------------------


def letter_llm(config: Any, *, depth: int = 0, **settings: Any) -> LLM:
    runner = ContentRunner(
        num_blocks=60, block_size=2, vocab_size=3, pipeline_depth=depth, max_draft_tokens=16
    )
    return content_llm(
        runner=runner, num_blocks=60, speculative_config=config, check_invariants=True, **settings
    )


STOPS: list[dict[str, Any]] = [
    {"stop": "ab"},
    {"stop": ["ba", "cc"], "include_stop_str_in_output": True},
    {"stop": "aab", "ignore_eos": True},
    {"stop_token_ids": [TOKEN_STRIDE], "ignore_eos": True},
    {"stop_token_ids": [0], "include_stop_str_in_output": True},
    {"ignore_eos": True},
    {"n": 3},
    {"n": 2, "best_of": 4},
]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_texts_and_ends_are_equal(method: str, depth: int) -> None:
    """Stop strings, stop tokens and lengths in the middle of drafts."""
    prompts = ["ab", "abcab", "c", "aaaa", "bcbcbc"]
    plain = letter_llm(None, depth=depth)
    drafting = letter_llm({"method": method}, depth=depth)
    num_accepted = 0
    for seed, asked in enumerate(STOPS * 3):
        if "best_of" in asked:
            continue  # the content runner gives no log-probabilities
        params = SamplingParams(max_tokens=8 + seed, seed=seed, **asked)
        expected = plain.generate(prompts, params, use_tqdm=False)
        given = [
            {"prompt": p, "prediction": o.outputs[-1].token_ids}
            for p, o in zip(prompts, expected, strict=True)
        ]
        found = drafting.generate(given, params, use_tqdm=False)
        for a, b in zip(expected, found, strict=True):
            for x, y in zip(a.outputs, b.outputs, strict=True):
                assert (x.text, x.token_ids) == (y.text, y.token_ids)
                assert (x.finish_reason, x.stop_reason) == (y.finish_reason, y.stop_reason)
        streamed = list(drafting.stream_all(given[1], params))
        for answer in expected[1].outputs:
            assert "".join(t for i, t in streamed if i == answer.index) == answer.text
        num_accepted = drafting.engine.scheduler.draft_counts.num_accepted_tokens
    assert num_accepted > 20


def test_a_paused_and_an_aborted_request() -> None:
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    plain = letter_llm(None).generate(["abab", "b"], params, use_tqdm=False)
    llm = letter_llm({"method": "ngram"})
    engine, inputs = llm.engine, llm.reader.read_all(["abab", "b", "ca"])
    requests = [llm.factory.make(prompt, params)[0] for prompt in inputs]
    for request in requests:
        engine.add(request)
    for i in range(40):
        engine.step()
        if i % 2 == 0 and requests[0].finish_reason is None:
            engine.pause(requests[0].request_id)
            engine.step()
            engine.resume(requests[0].request_id)
        if i == 3:
            engine.abort(requests[2].request_id)
    assert requests[2].finish_reason == "abort"
    for request, output in zip(requests, plain, strict=False):
        assert request.output_token_ids == output.outputs[0].token_ids


def test_a_failed_step_leaves_a_working_drafter() -> None:
    llm = letter_llm({"method": "suffix"})
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    (first,) = llm.generate("abab", params, use_tqdm=False)
    drafter: Any = llm.engine.scheduler.drafter
    assert len(drafter.corpus) == 1
    propose, drafter.propose = drafter.propose, lambda _: 1 / 0
    with pytest.raises(Exception, match="division"):
        llm.generate("abab", params, use_tqdm=False)
    drafter.propose = propose
    assert len(drafter.corpus) == 0
    (again,) = llm.generate("abab", params, use_tqdm=False)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_an_earlier_answer_is_drafted_from_under_its_salt_only() -> None:
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    accepted = []
    for salts in (("a", "a"), ("a", "b")):
        llm = letter_llm({"method": "suffix"})
        for salt in salts:
            (output,) = llm.generate({"prompt": "c", "cache_salt": salt}, params, use_tqdm=False)
        accepted.append(output.metrics.num_accepted_tokens)
    assert accepted[0] > accepted[1]


# Doors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "prediction = 3: must be text"),
        ({"type": "content"}, "prediction = .*must be {'type': 'content'"),
        ({"type": "text", "content": "a"}, "must be {'type': 'content', 'content': text}"),
        ({"type": "content", "content": 3}, "prediction.content = 3: must be text, or a list"),
        (
            {"type": "content", "content": [{"type": "image"}]},
            r"prediction.content\[0\] = 'image': only parts of type 'text'",
        ),
        ([-1], "prediction = -1: out of vocabulary: token ids must be integers"),
        ([1 << 20], "token ids must be integers from 0"),
        ([0] * 200, "prediction = .200 tokens.: must be at most"),
    ],
)
def test_a_prediction_of_another_form_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        letter_llm(None).generate({"prompt": "a", "prediction": value}, use_tqdm=False)


@pytest.mark.parametrize(
    "value",
    [
        "ab",
        [0, TOKEN_STRIDE],
        {"type": "content", "content": "ab"},
        {"type": "content", "content": [{"type": "text", "text": c} for c in "ab"]},
    ],
)
def test_the_forms_of_a_prediction_have_the_same_tokens(value: Any) -> None:
    reader = letter_llm(None).reader
    assert reader.read_prediction(value) == (0, TOKEN_STRIDE)
    assert reader.read({"prompt": "a", "prediction": value}).prediction == (0, TOKEN_STRIDE)
    assert reader.marked(reader.read("a"), prediction=value).prediction == (0, TOKEN_STRIDE)
    assert reader.read_prediction(None) == reader.read_prediction("") == ()


def test_async_requests_have_predictions() -> None:
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    (plain,) = letter_llm(None).generate("c", params, use_tqdm=False)
    llm = letter_llm({"method": "prediction"})

    async def answer() -> Any:
        engine = AsyncLLM(llm)
        try:
            text = plain.outputs[0].text
            generation = await engine.submit("c", params, prediction=text)
            output = await generation.result()
            return output, generation.prediction_counts
        finally:
            await engine.shutdown()

    output, counts = asyncio.run(answer())
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.num_accepted_tokens > 5
    assert counts == (output.metrics.num_accepted_tokens, 0)
