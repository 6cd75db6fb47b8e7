"""Constrained rows with draft tokens on a CPU: output as without them, whatever the drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pagespec import StructuredOutputs
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.drafting.drafters import NgramDrafter, PredictionDrafter
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from pagespec.structured import matchers
from pagespec.structured.forced import ForcedDrafter
from pagespec.structured.matchers import MAX_DRAFT_MASKS
from tests.runner.test_structured import (
    BLOCK_SIZE,
    MAX_NUM_SEQS,
    make_runner,
    mixed_requests,
    run_out,
)
from tests.runner.test_structured_reasoning import mixed as mixed_with_reasoning
from tests.support.structured import END, NUM_TOKENS, make_request

pytestmark = pytest.mark.usefixtures("small_chunks")

X, Z = (3 + ord(letter) for letter in "xz")
FREE_STEPS = StepCosts([(1, 1.0), (1000, 1.0)])
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 8))]


class Guesses:
    """A drafter that is right about a token with some probability. Behind the end of an answer it
    proposes more tokens.

    Args:
        answers: the outputs by request.
    """

    def __init__(self, answers: dict[str, list[int]], is_right: float, most: int = 5) -> None:
        self._answers, self._is_right, self.max_draft_tokens = answers, is_right, most

    def serves(self, request: Request) -> bool:
        return int(request.request_id) % 5 > 0

    def propose(self, request: Request) -> Sequence[int]:
        done = len(request.output_token_ids)
        rng = random.Random(f"{request.request_id}, {done}")
        answer = [*self._answers[request.request_id][done:], END, 7, END]
        return [t if rng.random() < self._is_right else rng.randrange(NUM_TOKENS) for t in answer]


def serve(
    requests: list[Request],
    drafter: Any = None,
    *,
    overlap: bool = True,
    num_blocks: int = 200,
    budget: int = 24,
    max_draft_masks: int = MAX_DRAFT_MASKS,
) -> Engine:
    runner = make_runner("cpu", num_blocks, overlap)
    if isinstance(drafter, PredictionDrafter):
        drafter = ForcedDrafter(runner.grammars, drafter, max_draft_masks)
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=budget,
        pipeline_depth=runner.pipeline_depth,
        drafter=drafter,
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    for request in requests:
        engine.add(request)
    run_out(engine)
    return engine


def seen(engine: Engine, requests: list[Request]) -> dict[str, Any]:
    """What a caller sees of each request."""
    return {
        r.request_id: (r.output_token_ids, r.finish_reason, str(engine.error(r) or ""))
        for r in requests
    }


def ngram(most: int = 8) -> NgramDrafter:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=most)
    return NgramDrafter(config, FREE_STEPS)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_constrained_answer_depends_on_draft_tokens(seed: int) -> None:
    """Rows with a schema, a regex or a grammar, some with penalties, among free ones. The bugs of
    others: garbage beside a JSON schema (vLLM issue 43338), answers changed by n-grams (41758,
    56077)."""
    requests, _ = mixed_requests(seed, 24, 30, share=0.7)
    plain = seen(serve(requests), requests)
    answers = {name: tokens for name, (tokens, *_) in plain.items()}
    num_steps = {}
    for name in (1.0, 0.8, 0.0, "forced"):
        for overlap, num_blocks, budget in ((False, 200, 24), (True, 200, 24), (True, 16, 12)):
            requests, _ = mixed_requests(seed, 24, 30, share=0.7)
            drafter = Guesses(answers, name) if isinstance(name, float) else ngram()
            engine = serve(requests, drafter, overlap=overlap, num_blocks=num_blocks, budget=budget)
            assert seen(engine, requests) == plain
            num_steps[name, num_blocks, overlap] = engine.scheduler.num_steps
    assert num_steps[1.0, 200, False] < 0.75 * num_steps[0.0, 200, False]
    assert num_steps["forced", 200, False] < num_steps[0.0, 200, False]


@pytest.mark.parametrize("seed", SEEDS)
def test_content_behind_reasoning_does_not_depend_on_draft_tokens(seed: int) -> None:
    """Draft tokens that open or close the reasoning, or begin the content, are among them."""
    requests, _ = mixed_with_reasoning(seed, 16)
    plain = seen(serve(requests), requests)
    answers = {name: tokens for name, (tokens, *_) in plain.items()}
    for is_right in (1.0, 0.7, None):
        requests, _ = mixed_with_reasoning(seed, 16)
        drafter = ngram() if is_right is None else Guesses(answers, is_right)
        assert seen(serve(requests, drafter), requests) == plain


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("regex", "allowed", "answer"),
    [("xxz", (X,), [X, X]), ("xxz", (X, Z), [X, X, Z]), ("z", (X,), [])],
)
def test_a_sample_behind_draft_tokens_fails_as_it_does_without(
    regex: str, allowed: tuple[int, ...], answer: list[int], overlap: bool
) -> None:
    """``allowed_token_ids`` leaves nothing of the mask at some position."""

    def requests() -> list[Request]:
        others, _ = mixed_requests(5, 4, 12)
        doomed = make_request("11", StructuredOutputs(regex=regex), random.Random(0), 12)
        doomed.info = replace(doomed.info, edits=LogitEdits(allowed=allowed))
        return [*others, doomed]

    alone = requests()
    plain = seen(serve(alone, overlap=overlap), alone)
    tokens, reason, error = plain["11"]
    assert (tokens, reason) == (answer, "error")
    assert "structured_outputs: token" in error
    answers = {name: found for name, (found, *_) in plain.items()}
    for drafts in ([X, X, Z, END], [X, X, X, X], [X, Z, X], [0, 0, 0], [END, END]):
        answers["11"] = drafts
        again = requests()
        assert seen(serve(again, Guesses(answers, 1.0), overlap=overlap), again) == plain


def test_masks_behind_draft_tokens_are_given_back() -> None:
    requests, _ = mixed_requests(2, 30, 30, share=1.0)
    plain = seen(serve(requests), requests)
    answers = {name: tokens for name, (tokens, *_) in plain.items()}
    requests, _ = mixed_requests(2, 30, 30, share=1.0)
    engine = serve(requests, Guesses(answers, 0.8))
    found = engine.runner._matchers  # type: ignore[attr-defined]
    kept = [text.mask for text in found._texts.values()]
    assert sorted([*found._free, *found._leaving, *kept]) == list(range(len(found._bits)))
    assert len(found._bits) <= max(64, 2 * 2 * MAX_NUM_SEQS * 6)


def test_memory_of_masks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two masks per running request, and those behind draft tokens of two steps."""
    monkeypatch.setattr(matchers, "_FEW_MASKS", 1)
    bound = 12
    requests, _ = mixed_requests(2, 30, 30, share=1.0)
    plain = seen(serve(requests), requests)
    requests, _ = mixed_requests(2, 30, 30, share=1.0)
    engine = serve(requests, ngram(), max_draft_masks=bound)
    assert seen(engine, requests) == plain
    assert engine.scheduler.draft_counts.num_accepted_tokens > 20
    num_masks = len(engine.runner._matchers._bits)  # type: ignore[attr-defined]
    most = 2 * MAX_NUM_SEQS + 2 * bound
    assert num_masks < 2 * most, "the memory doubles when it is full"


def test_forced_tokens_are_accepted_without_another_drafter() -> None:
    outputs = StructuredOutputs(regex="[ab]: (yes, of course|no, never)")
    plain = make_request("1", outputs, random.Random(1), 40)
    num_plain = serve([plain]).scheduler.num_steps
    request = make_request("1", outputs, random.Random(1), 40)
    engine = serve([request], PredictionDrafter(SpeculativeConfig(method="prediction"), FREE_STEPS))
    assert request.output_token_ids == plain.output_token_ids
    assert request.output_token_ids[-1] == END
    assert request.num_drafted == request.num_accepted > 5
    assert engine.scheduler.num_steps < 0.7 * num_plain


def test_ignored_ends_behind_a_complete_text_may_be_draft_tokens() -> None:
    for drafts in (None, ["x", *[END] * 5], ["x", END, END, 7]):
        request = make_request("1", StructuredOutputs(choice=["x"]), random.Random(0), 8)
        request.stop_token_ids = frozenset()
        answer = [X if token == "x" else token for token in drafts or ()]
        serve([request], None if drafts is None else Guesses({"1": answer}, 1.0))
        assert request.output_token_ids == [X, *[END] * 7]
        assert request.finish_reason == "length"
