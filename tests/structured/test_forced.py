"""The drafter that adds tokens which a grammar forces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pagespec import StructuredOutputs
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.drafting.drafters import PredictionDrafter
from pagespec.engine.request import Request
from pagespec.engine.text.reasoning import Reasoning
from pagespec.structured.forced import ForcedDrafter
from pagespec.structured.grammars import Grammars
from tests.support.structured import END, make_request, tokenizer

GRAMMARS = Grammars(tokenizer(), 320, {END})
X, Y, Z, B = (3 + ord(letter) for letter in "xyzb")
FREE = StepCosts([(1, 1.0), (1000, 1.0)])
MOST = 6


class Scripted(PredictionDrafter):
    """Proposes the given tokens, and records the counts that it receives."""

    def __init__(self, guesses: Sequence[int] = ()) -> None:
        config = SpeculativeConfig(method="prediction", num_speculative_tokens=MOST)
        super().__init__(config, FREE)
        self.guesses = guesses
        self.noted: list[tuple[int, int]] = []
        self.ended: list[str] = []
        self.num_resets = 0

    def propose(self, _: Request) -> Sequence[int]:
        return self.guesses

    def note(self, _: Request, num_drafts: int, num_accepted: int) -> None:
        self.noted.append((num_drafts, num_accepted))

    def end(self, request: Request) -> None:
        self.ended.append(request.request_id)

    def reset(self) -> None:
        self.num_resets += 1


def make(regex: str | None, reasoning: Reasoning | None = None) -> Request:
    outputs = None if regex is None else StructuredOutputs(regex=regex)
    request = make_request("1", outputs, random.Random(0))
    request.info = replace(request.info, reasoning=reasoning)
    return request


def proposed(drafter: ForcedDrafter, request: Request) -> list[int]:
    drafter.begin([request], 1, True)
    return list(drafter.propose(request))


@pytest.mark.parametrize(
    ("regex", "guesses", "expected"),
    [
        ("xyzb", [], [X, Y, Z, B]),
        ("xyzb", [X], [X, Y, Z, B]),
        ("xyzb", [X, X, Z], [X, Y, Z, B]),  # cut before the forbidden one
        ("[xy]zb", [], []),
        ("[xy]zb", [Y], [Y, Z, B]),
        ("x{20}", [], [X] * MOST),
        ("x{20}", [X, X], [X] * MOST),
        ("[xyz]*", [X, Y, END, Z], [X, Y]),  # nothing is sampled behind an end
        (None, [X, Y], [X, Y]),
    ],
)
def test_forced_tokens_follow_the_allowed_ones(
    regex: str | None, guesses: list[int], expected: list[int]
) -> None:
    assert proposed(ForcedDrafter(GRAMMARS, Scripted(guesses)), make(regex)) == expected


def test_the_matcher_follows_settled_tokens_only() -> None:
    drafter, request = ForcedDrafter(GRAMMARS, Scripted([X, Y, Z])), make("x[yz]zb")
    for _ in range(2):  # its proposals are not consumed
        assert proposed(drafter, request) == [X, Y, Z, B]
    request.token_ids += [X, Z]
    drafter.other.guesses = ()  # type: ignore[attr-defined]
    for _ in range(2):
        assert proposed(drafter, request) == [Z, B]
    request.token_ids += [Z]
    assert proposed(drafter, request) == [B]


def test_the_content_behind_reasoning_is_followed() -> None:
    drafter = ForcedDrafter(GRAMMARS, Scripted())
    request = make("xyzb", Reasoning(b"(", b"b", is_open=True))
    assert proposed(drafter, request) == []
    request.token_ids += [X, Y]
    assert proposed(drafter, request) == []
    request.token_ids += [B, X]  # the reasoning ends, and the content begins
    assert proposed(drafter, request) == [Y, Z, B]
    request.token_ids += [Y]
    assert proposed(drafter, request) == [Z, B]


def test_content_without_reasoning_is_followed_from_its_first_token() -> None:
    drafter = ForcedDrafter(GRAMMARS, Scripted())
    request = make("xyzb", Reasoning(b"(", b")", is_open=False))
    assert proposed(drafter, request) == []
    request.token_ids += [X]
    assert proposed(drafter, request) == [Y, Z, B]


@pytest.mark.parametrize(
    ("guesses", "num_drafts", "num_accepted", "noted"),
    [
        ([], 4, 3, []),  # forced tokens alone
        ([X, Y], 4, 4, [(2, 2)]),
        ([X, Y], 4, 1, [(2, 1)]),
        ([X, X, X], 4, 4, [(2, 1)]),  # the first forbidden one counts as wrong
        ([X, X, X], 4, 0, [(2, 0)]),
        ([X, Y], 1, 1, [(1, 1)]),  # the row had space for one
    ],
)
def test_the_other_drafter_receives_the_counts_of_its_own_tokens(
    guesses: list[int], num_drafts: int, num_accepted: int, noted: list[tuple[int, int]]
) -> None:
    other = Scripted(guesses)
    drafter, request = ForcedDrafter(GRAMMARS, other), make("xyzb")
    proposed(drafter, request)
    drafter.note(request, num_drafts, num_accepted)
    assert other.noted == noted


def test_counts_of_a_request_without_a_constraint_are_passed_on() -> None:
    other = Scripted([X])
    drafter, request = ForcedDrafter(GRAMMARS, other), make(None)
    proposed(drafter, request)
    drafter.note(request, 3, 2)
    assert other.noted == [(3, 2)]


def test_a_matcher_is_dropped_when_its_request_ends() -> None:
    other = Scripted()
    drafter, request = ForcedDrafter(GRAMMARS, other), make("xyzb")
    proposed(drafter, request)
    assert list(drafter._followed) == ["1"]
    drafter.end(request)
    assert not drafter._followed
    assert other.ended == ["1"]
    proposed(drafter, request)
    drafter.reset()
    assert not drafter._followed
    assert other.num_resets == 1


def test_tokens_that_the_grammar_forbids_end_the_following_not_the_request() -> None:
    drafter, request = ForcedDrafter(GRAMMARS, Scripted([X])), make("xyzb")
    request.token_ids += [Z]
    for _ in range(2):
        assert proposed(drafter, request) == [X]


def test_an_error_of_the_grammar_ends_the_following_not_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, request = ForcedDrafter(GRAMMARS, Scripted([X])), make("xyzb")

    def failing(_: Any) -> Any:
        raise ValueError("too many items")

    monkeypatch.setattr(Grammars, "matcher", lambda *_: failing(None))
    assert proposed(drafter, request) == [X]
    monkeypatch.undo()
    assert proposed(drafter, request) == [X], "it is not tried again"


def test_an_interrupt_is_no_error_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, request = ForcedDrafter(GRAMMARS, Scripted([X])), make("xyzb")

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Grammars, "matcher", interrupted)
    with pytest.raises(KeyboardInterrupt):
        proposed(drafter, request)


def test_no_forced_token_is_proposed_where_none_pays() -> None:
    other = Scripted()
    costly = StepCosts([(1, 1.0), (2, 9.0)])
    other.mode.costs = costly
    drafter = ForcedDrafter(GRAMMARS, other)
    assert proposed(drafter, make("xyzb")) == []
    assert not drafter._followed, "no matcher is made"


def test_draft_tokens_of_constrained_requests_are_bounded_per_step() -> None:
    """Each needs a mask, so they would be gigabytes for many requests and a large vocabulary."""
    drafter = ForcedDrafter(GRAMMARS, Scripted([X]), max_draft_masks=10)
    requests = [make("xyzb") for _ in range(4)]
    for i, request in enumerate(requests):
        request.info = replace(request.info, request_id=str(i))
    for _ in range(2):  # the bound is per step
        drafter.begin(requests, 4, True)
        found = [list(drafter.propose(request)) for request in requests]
        assert found == [[X, Y, Z, B], [X, Y, Z, B], [X, Y], []]
    drafter.other.guesses = [X, Y, Z]  # type: ignore[attr-defined]
    drafter.begin(requests, 4, True)
    assert [len(drafter.propose(request)) for request in requests] == [4, 4, 2, 0]
    assert len(drafter.propose(make(None))) == 3, "others are not"


def test_an_error_of_the_grammar_does_not_exceed_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any) -> Any:
        raise ValueError("too many items")

    monkeypatch.setattr(Grammars, "matcher", failing)
    drafter = ForcedDrafter(GRAMMARS, Scripted([X, Y, Z]), max_draft_masks=4)
    drafter.begin([make("xyzb") for _ in range(2)], 2, True)
    assert [len(drafter.propose(make("xyzb"))) for _ in range(3)] == [3, 1, 0]
