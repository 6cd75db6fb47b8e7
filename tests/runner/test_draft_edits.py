"""Draft tokens of requests that edit their logits: the same bits with and without, on both
runners."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.logprob_output import add_logprobs
from pagespec.engine.outputs import CompletionOutput, RequestOutput
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from tests.runner.both_runners import BLOCK_SIZE, RUNNERS, make_runner
from tests.runner.edited_requests import END_TOKEN_IDS, LogitsByPosition, mixed_cases
from tests.runner.test_edits import captured
from tests.support.models import VOCAB_SIZE

MOST = 5
NUM_OUTPUTS = 12


class World(NamedTuple):
    budget: int = 40
    num_blocks: int = 200
    overlap: bool = False
    caching: bool = True
    kind: str = "cpu"


KINDS = [pytest.param(kind, id=kind) for kind in RUNNERS]
WORLDS = {
    "roomy": World(),
    "chunks": World(budget=9),
    "preempting": World(budget=24, num_blocks=18),
    "overlap": World(overlap=True),
    "overlap, preempting, without cache": World(24, 18, overlap=True, caching=False),
}

if "gpu" in RUNNERS:
    WORLDS["gpu"] = World(overlap=True, kind="gpu")
    WORLDS["gpu, preempting"] = World(24, 18, kind="gpu")

# The token proposed where this one is right.
Guess = Callable[[random.Random, int], int]
GUESSES: dict[str, Guess] = {
    "right": lambda _, token: token,
    "wrong": lambda _, token: (token + 1) % VOCAB_SIZE,
    "random": lambda rng, _: rng.randrange(VOCAB_SIZE),
    "partly right": lambda rng, token: token if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE),
}


class Scripted:
    """A drafter with the outputs of each request, to guess from. It goes on behind their end."""

    max_draft_tokens = MOST

    def __init__(self, answers: dict[str, list[int]], guess: Guess) -> None:
        self._answers, self._guess = answers, guess
        self.num_asked = 0

    def propose(self, request: Request) -> Sequence[int]:
        self.num_asked += 1
        done = len(request.output_token_ids)
        rng = random.Random(f"{request.request_id}, {done}")
        rest = [*self._answers[request.request_id], *[7] * MOST][done : done + MOST]
        return [self._guess(rng, token) for token in rest]


class Served(NamedTuple):
    """What callers see of a request, without what depends on the schedule."""

    token_ids: list[int]
    finish_reason: str | None
    cumulative_logprob: float | None
    logprobs: list[Any] | None
    prompt_logprobs: list[Any] | None
    error: str


class Run(NamedTuple):
    served: dict[str, Served]
    seen: LogitsByPosition
    num_steps: int
    num_preemptions: int

    def answers(self) -> dict[str, list[int]]:
        return {name: served.token_ids for name, served in self.served.items()}

    def logits(self) -> dict[tuple[str, int], torch.Tensor]:
        """Of each position of each output."""
        rows = self.seen.rows
        firsts: dict[str, int] = {}
        for name, position in sorted(rows):
            firsts.setdefault(name, position)
        return {
            (name, firsts[name] + i): rows[name, firsts[name] + i]
            for name, served in self.served.items()
            for i in range(len(served.token_ids))
        }


def serve(
    requests: Sequence[Request],
    drafter: Scripted | None,
    world: World,
    *,
    processed_logprobs: bool = False,
    siblings: Sequence[Request] = (),
) -> Run:
    """Serve requests that arrive together; ``siblings``: of the first."""
    seen = LogitsByPosition()
    runner = make_runner(
        captured(),
        world.kind,
        world.num_blocks,
        max_num_tokens=world.budget,
        max_num_seqs=5 if world.kind == "cpu" else min(world.budget, 5 * (1 + MOST)),
        max_num_blocks=20,
        overlap=world.overlap,
        processed_logprobs=processed_logprobs,
        on_logits=seen,
    )
    scheduler = Scheduler(
        BlockManager(world.num_blocks, BLOCK_SIZE, enable_prefix_caching=world.caching),
        max_num_seqs=5,
        max_num_batched_tokens=world.budget,
        pipeline_depth=runner.pipeline_depth,
        drafter=drafter,
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    for i, request in enumerate(requests):
        engine.add(request, siblings=siblings if i == 0 else ())
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    served = {}
    for request in (*requests, *siblings):
        answer = CompletionOutput(
            0, "", request.output_token_ids, finish_reason=request.finish_reason
        )
        output = RequestOutput(request.request_id, None, request.token_ids, None, [answer])
        add_logprobs(output, [request], None)
        served[request.request_id] = Served(
            answer.token_ids,
            answer.finish_reason,
            answer.cumulative_logprob,
            None if answer.logprobs is None else list(answer.logprobs),
            output.prompt_logprobs and list(output.prompt_logprobs),
            str(engine.error(request) or ""),
        )
    return Run(served, seen, num_steps, sum(request.num_preemptions for request in requests))


def check_equal(drafted: Run, plain: Run) -> None:
    assert drafted.served == plain.served
    logits, expected = drafted.logits(), plain.logits()
    assert logits.keys() == expected.keys()
    assert all(torch.equal(row, expected[at]) for at, row in logits.items())


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    words: Sequence[tuple[int, ...]] = (),
    on_token: Callable[[int], bool] | None = None,
    seed: int = 0,
    **asked: Any,
) -> Request:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": NUM_OUTPUTS, "ignore_eos": True} | asked
    )
    stops = frozenset(params.stop_token_ids or ())
    return Request(
        name,
        list(prompt),
        params,
        max_num_tokens=len(prompt) + (params.max_tokens or 1),
        stop_token_ids=stops,
        on_token=on_token,
        seed=seed,
        edits=LogitEdits.of(params, stops | set(END_TOKEN_IDS), words),
    )


def mixed_requests() -> list[Request]:
    """All kinds of edits (penalties, bias, allowed ids, bad words of one token and of two,
    ``min_tokens`` with likely stop tokens, functions), greedy and random, half of them with
    log-probabilities."""
    requests = []
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    names += ("frequency_penalty", "logit_bias", "allowed_token_ids", "min_tokens")
    for i, case in enumerate(mixed_cases(3, num_tokens=NUM_OUTPUTS)):
        asked = {name: getattr(case.params, name) for name in names}
        asked["stop_token_ids"] = case.params.stop_token_ids
        if i % 2:
            asked |= {"logprobs": 3, "prompt_logprobs": 1 if i % 4 == 3 else None}
        if i == 4:
            asked["logits_processors"] = [lambda output, row: row.roll(len(output))]
        requests.append(make_request(str(i), case.prompt, words=case.bad_words, seed=i, **asked))
    return requests


@cache
def plain_run(world: str, processed_logprobs: bool) -> Run:
    return serve(mixed_requests(), None, WORLDS[world], processed_logprobs=processed_logprobs)


EDITED = [
    pytest.param(name, processed, guess, marks=[pytest.mark.nightly] if name == "overlap" else [])
    for name in WORLDS
    if WORLDS[name].kind == "cpu"
    for processed, guess in itertools.product((False, True), GUESSES)
]
if "gpu" in RUNNERS:  # the interpreter is slow; by day test_drafting.py edits behind drafts there
    EDITED += [
        pytest.param("gpu", True, "partly right", marks=pytest.mark.nightly),
        pytest.param("gpu, preempting", False, "random", marks=pytest.mark.nightly),
    ]


@pytest.mark.parametrize(("world", "processed_logprobs", "guess"), EDITED)
@pytest.mark.usefixtures("small_chunks")
def test_edits_follow_the_history_of_each_sample(
    world: str, processed_logprobs: bool, guess: str
) -> None:
    plain = plain_run(world, processed_logprobs)
    drafter = Scripted(plain.answers(), GUESSES[guess])
    drafted = serve(mixed_requests(), drafter, WORLDS[world], processed_logprobs=processed_logprobs)
    check_equal(drafted, plain)
    assert drafter.num_asked
    if guess == "right" and world == "roomy":
        assert drafted.num_steps < plain.num_steps * 0.6
    if "preempting" in world:
        assert drafted.num_preemptions
    # The world is one in which the edits matter.
    assert plain.answers() == plain_run("roomy", False).answers()
    assert len(plain.served["8"].token_ids) == 5, "a likely stop token, banned for four tokens"


@pytest.mark.parametrize("guess", GUESSES)
def test_siblings_have_histories_of_their_own(guess: str) -> None:
    asked = {"temperature": 1.0, "repetition_penalty": 1.6, "frequency_penalty": 0.4, "n": 3}

    def family() -> tuple[list[Request], list[Request]]:
        leader = make_request("0", range(5, 22), logprobs=1, seed=3, **asked)
        return [leader], [leader.sibling(str(i), 3 + i, None) for i in (1, 2)]

    leaders, siblings = family()
    plain = serve(leaders, None, World(), siblings=siblings)
    assert len(set(map(tuple, plain.answers().values()))) == 3
    drafter = Scripted(plain.answers(), GUESSES[guess])
    leaders, siblings = family()
    check_equal(serve(leaders, drafter, World(), siblings=siblings), plain)


@pytest.mark.parametrize("min_tokens", range(1, 8))
def test_min_tokens_ends_in_the_middle_of_the_drafts(min_tokens: int) -> None:
    """The samples before it ban the stop token, those behind it do not."""
    asked = {
        "stop_token_ids": [9],
        "logit_bias": {9: 80.0, 11: 60.0},
        "min_tokens": min_tokens,
        "logprobs": 1,
    }
    plain = serve([make_request("a", [3, 4], **asked)], None, World())
    assert plain.answers()["a"] == [11] * min_tokens + [9]
    assert plain.served["a"].finish_reason == "stop"
    for guess in GUESSES.values():
        drafter = Scripted(plain.answers(), guess)
        check_equal(serve([make_request("a", [3, 4], **asked)], drafter, World()), plain)
    # One that expects the stop token at each place.
    early = Scripted({"a": [9] * NUM_OUTPUTS}, GUESSES["right"])
    check_equal(serve([make_request("a", [3, 4], **asked)], early, World()), plain)


def test_bad_words_span_accepted_drafts_and_rejected_ones_leave_no_trace() -> None:
    """After 10 and 11 comes no 12; the drafts try each order."""
    asked = {"allowed_token_ids": [10, 11, 12], "temperature": 1.5, "max_tokens": 24}
    words = [(10, 11, 12), (12, 12), (11, 10)]

    def requests() -> list[Request]:
        return [make_request(str(i), [3, 10, 11], words=words, seed=i, **asked) for i in range(4)]

    plain = serve(requests(), None, World())
    for output in plain.answers().values():
        text = "".join(chr(token) for token in output)
        assert not any("".join(map(chr, word)) in text for word in words)
    for wrong in itertools.product((10, 11, 12), repeat=3):
        answers = {name: list(wrong) * 8 for name in plain.answers()}
        check_equal(serve(requests(), Scripted(answers, GUESSES["right"]), World()), plain)
    check_equal(serve(requests(), Scripted(plain.answers(), GUESSES["right"]), World()), plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.usefixtures("small_chunks")
def test_a_function_is_called_once_for_each_token_of_the_answer(guess: str, kind: str) -> None:
    """In order and with the tokens before it: never with a rejected draft token. Only the answer's
    end is unknown to it."""
    calls: list[list[int]] = []

    def recorded(output: list[int], row: torch.Tensor) -> torch.Tensor:
        calls.append(output)
        return row + 0.01 * len(calls)  # not even a function of its arguments

    asked = {"logits_processors": [recorded], "temperature": 0.9, "logprobs": 2}
    plain = serve([make_request("a", [3, 4], **asked)], None, World(kind=kind))
    answer = plain.answers()["a"]
    assert calls == [answer[:i] for i in range(NUM_OUTPUTS)]
    expected = calls.copy()
    calls.clear()
    drafter = Scripted(plain.answers(), GUESSES[guess])
    check_equal(serve([make_request("a", [3, 4], **asked)], drafter, World(kind=kind)), plain)
    assert calls == expected


def failing_at(place: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def function(output: list[int], row: torch.Tensor) -> torch.Tensor:
        if len(output) == place:
            raise KeyError(f"token {place}")
        return row

    return function


FAILING = [
    (place, guess, overlap, kind)
    for kind in RUNNERS
    for place in (range(7) if kind == "cpu" else (3,))
    for guess, overlap in itertools.product(GUESSES, (False, True))
    if kind == "cpu" or (overlap and guess in ("right", "partly right"))
]


@pytest.mark.parametrize(("place", "guess", "overlap", "kind"), FAILING)
@pytest.mark.usefixtures("small_chunks")
def test_a_function_that_fails_ends_its_request_at_that_token(
    place: int, guess: str, overlap: bool, kind: str
) -> None:
    """The tokens before it are the request's, and the others continue."""

    def requests() -> list[Request]:
        failing = [failing_at(place)]
        asked = {"temperature": 0.9, "logprobs": 1, "logits_processors": failing}
        others = [make_request(str(i), [3 + i], seed=i, presence_penalty=1.0) for i in range(3)]
        return [*others, make_request("a", [3, 4], **asked)]

    whole = serve([make_request("a", [3, 4], temperature=0.9)], None, World(kind=kind)).answers()
    world = World(overlap=overlap, kind=kind)
    plain = serve(requests(), None, world)
    assert plain.served["a"].token_ids == whole["a"][:place]
    assert f"KeyError: 'token {place}'" in plain.served["a"].error
    drafter = Scripted(plain.answers() | whole, GUESSES[guess])
    check_equal(serve(requests(), drafter, world), plain)


@pytest.mark.parametrize("end", ["token", "text", "length"])
def test_a_failure_behind_the_end_is_none(end: str) -> None:
    """The draft tokens go on behind it, and the function is called for one of them."""
    whole = serve([make_request("a", [3, 4], temperature=0.9)], None, World()).answers()["a"]
    assert whole[3] not in whole[:3]

    def request() -> Request:
        return make_request(
            "a",
            [3, 4],
            temperature=0.9,
            logits_processors=[failing_at(4)],
            stop_token_ids=[whole[3]] if end == "token" else None,
            on_token=(lambda token: token == whole[3]) if end == "text" else None,
            max_tokens=4 if end == "length" else NUM_OUTPUTS,
        )

    plain = serve([request()], None, World())
    assert plain.served["a"].token_ids == whole[:4]
    assert plain.served["a"].finish_reason == ("length" if end == "length" else "stop")
    check_equal(serve([request()], Scripted({"a": whole}, GUESSES["right"]), World()), plain)


@pytest.mark.parametrize("num_left", range(1, 5))
def test_no_token_left_ends_a_request_where_it_would_alone(num_left: int) -> None:
    """Each allowed token can only be followed by the next one, the last by none."""
    allowed = list(range(10, 10 + num_left))
    words = [(a, b) for a in allowed for b in allowed if b != a + 1]
    asked = {"allowed_token_ids": allowed, "logit_bias": {10: 50.0}, "logprobs": 1}
    plain = serve([make_request("a", [3, 4], words=words, **asked)], None, World())
    assert plain.answers()["a"] == allowed
    assert "leave no token to sample" in plain.served["a"].error
    for answer in ([*allowed, 0, 0], [*allowed[:2], 0], [0] * MOST, [10, 11, 12, 13, 0, 0]):
        drafter = Scripted({"a": answer}, GUESSES["right"])
        request = make_request("a", [3, 4], words=words, **asked)
        check_equal(serve([request], drafter, World()), plain)


@pytest.mark.parametrize("place", range(4))
def test_a_text_that_cannot_be_read_ends_its_request_at_that_token(place: int) -> None:
    def request() -> Request:
        count = itertools.count()

        def reads(_: int) -> bool:
            if next(count) == place:
                raise UnicodeError("no text")
            return False

        return make_request("a", [3, 4], temperature=0.9, on_token=reads, max_tokens=4)

    whole = serve([make_request("a", [3, 4], temperature=0.9)], None, World()).answers()
    plain = serve([request()], None, World())
    assert plain.served["a"].finish_reason == "error"
    assert "its text could not be read: no text" in plain.served["a"].error
    assert plain.answers()["a"] == whole["a"][: place + 1]
    check_equal(serve([request()], Scripted(whole, GUESSES["right"]), World()), plain)
