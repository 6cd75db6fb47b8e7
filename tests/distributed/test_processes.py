"""Two rank processes on a CPU: serving, interrupts, and the loss of a rank."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pagespec.distributed
from pagespec import LLM, EngineError, InvalidInputError, SamplingParams
from pagespec.distributed import workers as workers_module
from pagespec.engine.plan import StepPlan
from pagespec.kernels.sampling.sampler import SamplingInputs, sample
from tests.distributed.rank_group import GREEDY, HOSTILE, Group, check_trace, is_there, lose
from tests.golden.harness import (
    Condition,
    Reference,
    check,
    compare,
    mixed_prompts,
    reference_of,
)
from tests.support import interrupts
from tests.support.driving import hf_logits
from tests.support.interrupts import LineRaiser
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.plain_sampling import edited_logits

LENGTHS, NUM_OUTPUTS = [1, 2, 17, 40, 64, 90, 33, 48], [16, 24, 12, 16, 24, 16, 8, 12]


@pytest.fixture(scope="module")
def reference() -> Reference:
    judge = tiny_model("qwen3")
    judge.set_attn_implementation("eager")
    return reference_of(judge, mixed_prompts(LENGTHS, VOCAB_SIZE), NUM_OUTPUTS)


# Serving ----------------------------------------------------------------------------------------


def test_continuations_of_one_prompt_are_those_of_separate_requests(group: Group) -> None:
    params = {"max_tokens": 8, "ignore_eos": True}
    several = SamplingParams(n=3, seed=5, **params)
    [output] = group.llm.generate([[7] * 21], several, use_tqdm=False)
    for i, answer in enumerate(output.outputs):
        alone = group.llm.generate([[7] * 21], SamplingParams(seed=5 + i, **params), use_tqdm=False)
        assert answer.token_ids == alone[0].outputs[0].token_ids


def test_a_hostile_run_equals_generate(group: Group, reference: Reference) -> None:
    llm = group.llm
    # Some are under way and are given up, in the middle.
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    items = [(prompt, long if i else GREEDY) for i, prompt in enumerate(reference.prompts[:4])]
    given_up = llm.generate_iter(items)
    next(given_up)
    given_up.close()
    watcher = group.watch()
    compare(llm, 2, reference, watcher)
    # The trace is of all that this engine ever did.
    verdict = watcher.row.trace = check_trace(group)
    watcher.row.num_steps = verdict.num_steps
    check(watcher.row, Condition("", {}, must_preempt=True, must_hit=True, must_chunk=True))
    assert llm.stats().num_steps >= verdict.num_steps
    assert llm.stats().startup_s["load"] > 0


def test_tokens_and_logits_are_the_same_in_any_company(group: Group, reference: Reference) -> None:
    prompts = [prompt for prompt in reference.prompts if len(prompt) < 50]
    first = group.watch()
    together = group.llm.generate(prompts, GREEDY, use_tqdm=False)
    second = group.watch()
    order = list(range(len(prompts)))
    random.Random(1).shuffle(order)
    shuffled = group.llm.generate([prompts[i] for i in order], GREEDY, use_tqdm=False)
    pairs = [(together[i], result) for i, result in zip(order, shuffled, strict=True)]
    third = group.watch()
    alone = [group.llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    for watcher, results in (
        (second, pairs),
        (third, list(zip(together, alone, strict=True))),
    ):
        for one, other in results:
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            for i in range(len(one.outputs[0].token_ids)):
                expected = first.logits[one.request_id, i]
                assert torch.equal(watcher.logits[other.request_id, i], expected)


def test_a_reset_of_the_prefix_cache_changes_no_token(group: Group, reference: Reference) -> None:
    prompts = reference.prompts[1:5]
    expected = group.tokens(prompts)
    first = replace(GREEDY, max_tokens=4)  # over while the others run
    params = [first, *[GREEDY] * 3]
    results = group.llm.generate_iter(zip(prompts, params, strict=True))
    found: list[Any] = [next(results)]
    assert group.llm.engine.scheduler.in_flight
    group.llm.reset_prefix_cache()
    for caches in group.llm._runner.local.kv_caches:
        for cache in caches:
            cache.fill_(1e4)  # of one rank is enough to see that a row reads it
    found += results
    expected[0] = expected[0][:4]
    assert [list(result.outputs[0].token_ids) for result in found] == expected
    assert not check_trace(group).property_id


def test_sampled_tokens_are_those_of_one_rank(group: Group, reference: Reference) -> None:
    params = [
        SamplingParams(
            temperature=(0.7, 1.0, 2.5)[i % 3],
            top_k=(0, 5, 40)[i % 3],
            top_p=(1.0, 0.8)[i % 2],
            min_p=(0.0, 0.0, 0.05)[i % 3],
            seed=7 * i - 3,
            max_tokens=10,
            ignore_eos=True,
        )
        for i in range(len(reference.prompts))
    ]
    watcher = group.watch()
    results = group.llm.generate(reference.prompts, params, use_tqdm=False)
    num_greedy = 0
    for prompt, one, result in zip(reference.prompts, params, results, strict=True):
        for i, token in enumerate(result.outputs[0].token_ids):
            logits = watcher.logits[result.request_id, i]
            inputs = SamplingInputs.from_lists(
                temperature=[one.temperature],
                top_k=[one.top_k],
                top_p=[one.top_p],
                min_p=[one.min_p],
                seeds=[one.seed],
                positions=[len(prompt) + i],
                device=torch.device("cpu"),
            )
            assert int(sample(logits[None], inputs)) == token
            num_greedy += int(logits.argmax()) == token
    assert num_greedy < 60  # of 80
    again = group.tokens(reference.prompts[::-1], params[::-1])[::-1]
    assert again == [list(result.outputs[0].token_ids) for result in results]


def test_scores_are_the_logprobs_of_sampled_tokens(group: Group, reference: Reference) -> None:
    prompts = [prompt for prompt in reference.prompts if len(prompt) < 70]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=9, ignore_eos=True, logprobs=2)
    group.watch()
    both = [params if i % 2 else GREEDY for i in range(len(prompts))]
    outputs = group.llm.generate(prompts, both, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    full = [p + list(a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    scores = group.llm.score(full, use_tqdm=False)
    judge = tiny_model("qwen3")
    for prompt, token_ids, answer, score in zip(prompts, full, answers, scores, strict=True):
        expected = hf_logits(judge, token_ids).log_softmax(-1)
        for position, logprob in enumerate(score.logprobs[1:], 1):
            assert logprob is not None
            assert abs(logprob - float(expected[position - 1, token_ids[position]])) < 2e-5
        if answer.logprobs is not None:
            own = zip(answer.token_ids, answer.logprobs, strict=True)
            found = [entries[token].logprob for token, entries in own]
            assert score.logprobs[len(prompt) :] == found


def test_edited_tokens_are_those_of_one_rank(group: Group, reference: Reference) -> None:
    """Only rank 0 has the plan, so only rank 0 edits logits."""
    params = [
        SamplingParams(
            temperature=(0.0, 1.0)[i % 2],
            seed=i,
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            allowed_token_ids=range(i, VOCAB_SIZE, 3),
            max_tokens=10,
            ignore_eos=True,
        )
        for i in range(len(reference.prompts))
    ]
    watcher = group.watch()
    results = group.llm.generate(reference.prompts, params, use_tqdm=False)
    num_changed = 0
    for prompt, one, result in zip(reference.prompts, params, results, strict=True):
        output = result.outputs[0].token_ids
        for i, token in enumerate(output):
            logits = watcher.logits[result.request_id, i].double().numpy()
            edited = edited_logits(logits, prompt, output[:i], one)
            assert edited[token] > (edited.max() - 1e-4 if one.temperature == 0 else -math.inf)
            num_changed += int(edited.argmax() != logits.argmax())
    assert num_changed > 40  # of 80
    again = group.tokens(reference.prompts[::-1], params[::-1])[::-1]
    assert again == [list(result.outputs[0].token_ids) for result in results]


def test_a_bad_prompt_disturbs_nothing(group: Group, reference: Reference) -> None:
    prompts = reference.prompts[2:6]
    expected = group.tokens(prompts)
    with pytest.raises(InvalidInputError, match=r"prompts\[1\]"):
        group.llm.generate([prompts[0], [VOCAB_SIZE], prompts[1]], GREEDY, use_tqdm=False)
    bad: list[Any] = [prompts[0], [-1], prompts[1], [2] * 128, prompts[2], prompts[3], []]
    found = list(group.llm.generate_iter([(prompt, GREEDY) for prompt in bad]))
    for i in (1, 3, 6):
        assert isinstance(found[i], InvalidInputError)
    good: list[Any] = [found[i] for i in (0, 2, 4, 5)]
    assert [list(result.outputs[0].token_ids) for result in good] == expected


@pytest.mark.parametrize("error", [ValueError("not wanted"), SystemExit("not wanted")])
def test_a_callback_that_raises_fails_its_step_alone(
    group: Group, reference: Reference, error: BaseException
) -> None:
    prompts = reference.prompts[:4]
    expected = group.tokens(prompts)

    def fail(plan: StepPlan) -> None:
        if any(plan.num_samples):
            raise error

    group.before_logits = fail
    with pytest.raises((EngineError, SystemExit), match="not wanted") as caught:
        group.tokens(prompts)
    assert "make a new engine" not in str(caught.value)
    group.before_logits = lambda _: None
    assert group.tokens(prompts) == expected


# Interrupts -------------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's default SIGINT handler, as in a terminal. A shell that starts the tests in the
    background makes them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_any_step_leaves_an_engine_that_answers(
    group: Group, reference: Reference
) -> None:
    prompts = reference.prompts[:4]
    expected = group.tokens(prompts)
    for at in (0, 1, 2, 5, 9):
        num_steps = 0

        def interrupt(_plan: StepPlan, at: int = at) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == at + 1:  # in the middle of the ranks' step
                os.kill(os.getpid(), signal.SIGINT)

        group.before_logits = interrupt
        with pytest.raises(KeyboardInterrupt):
            group.tokens(prompts)
        group.before_logits = lambda _: None
        assert group.tokens(prompts) == expected, at
    check_trace(group)
    assert all(map(is_there, group.pids))


def test_an_interrupt_at_any_line_leaves_an_engine_that_answers(
    group: Group, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(Path(pagespec.distributed.__file__).parent)
    monkeypatch.setattr(interrupts, "_OURS", (folder,))
    prompts = reference.prompts[:3]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    expected = group.tokens(prompts, params)
    places: set[str] = set()
    for first in range(1, 90):
        # A second one comes while the first is dealt with.
        with LineRaiser([first, 1 + first % 13][: 1 + first % 2], KeyboardInterrupt) as raiser:
            try:
                group.llm.generate(prompts, params, use_tqdm=False)
            except KeyboardInterrupt:
                places.update(raiser.raised_at)
        assert group.tokens(prompts, params) == expected, raiser.raised_at
    assert len(places) > 20
    check_trace(group)


def test_another_engine_is_refused_while_this_one_lives(group: Group, folder: Path) -> None:
    expected = group.tokens([[2, 3, 4]])
    with pytest.raises(InvalidInputError, match=r"tensor_parallel_size.*in use in this process"):
        LLM(folder, device="cpu", tensor_parallel_size=2, **HOSTILE)
    assert group.tokens([[2, 3, 4]]) == expected


# Faults -----------------------------------------------------------------------------------------


def test_a_killed_rank_is_named_and_a_new_engine_works(group: Group, reference: Reference) -> None:
    expected = group.tokens(reference.prompts[:3])
    (pid,) = group.pids
    lose(group, "rank 1 .*by signal 9.*make a new engine", lambda: os.kill(pid, signal.SIGKILL))
    assert group.tokens(reference.prompts[:3]) == expected
    assert group.pids != [pid]


def test_a_rank_that_hangs_is_named(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_STALL_S", 2.0)
    assert group.llm
    (pid,) = group.pids
    lose(group, "rank 1 has made no progress for 2 s", lambda: os.kill(pid, signal.SIGSTOP))
