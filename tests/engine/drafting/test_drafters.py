"""The drafters that look tokens up: what they propose, what they keep, and how many tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagespec import SamplingParams
from pagespec.engine.drafting import drafters, token_index
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.drafting.drafters import (
    NgramDrafter,
    PredictionDrafter,
    SuffixDrafter,
    make_drafter,
)
from pagespec.engine.drafting.token_index import TokenIndex
from pagespec.engine.request import Request

PARAMS = SamplingParams()
FLAT = StepCosts([(1, 1.0), (100_000, 1.0)])


def drafter_of(method: str, **given: Any) -> Any:
    return make_drafter(SpeculativeConfig(method=method, **given), FLAT)


def request_of(prompt: list[int], output: tuple[int, ...] = (), **given: Any) -> Request:
    request = Request("r", prompt, PARAMS, max_num_tokens=1000, **given)
    request.token_ids += output
    return request


def proposed(drafter: PredictionDrafter, request: Request) -> list[int]:
    drafter.begin([request], 1, True)
    return list(drafter.propose(request))


def test_the_index_finds_every_place_of_an_ngram() -> None:
    """As a search does, whatever pieces the tokens come in."""
    rng = random.Random(1)
    for key_length in (1, 2, 3):
        index, tokens = TokenIndex(key_length), []
        for _ in range(60):
            tokens += [rng.randrange(3) for _ in range(rng.randrange(4))]
            assert index.extend(tokens)
            key = tokens[-key_length:]
            there = [
                end
                for end in range(key_length, len(tokens))
                if tokens[end - key_length : end] == key
            ]
            wanted = there[::-1][: token_index.MAX_PLACES] if len(key) == key_length else []
            assert index.places(tokens, len(tokens)) == wanted


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_index, "_MAX_INDEXED", 10)
    request, drafter = request_of([*range(12), *range(12)]), drafter_of("ngram")
    found = [proposed(drafter, request) for _ in range(3)]
    assert found == [[], [], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_ngram_continues_the_longest_and_latest_match() -> None:
    drafter = drafter_of("ngram", num_speculative_tokens=2)
    #            the longest            the latest of two tokens
    prompt = [1, 2, 3, 4, 50, 51, 9, 9, 3, 4, 60, 61, 8, 1, 2, 3, 4]
    assert proposed(drafter, request_of(prompt)) == [50, 51]
    assert proposed(drafter, request_of([3, 4, 50, 7, 3, 4, 60, 8, 3, 4])) == [60, 8]
    assert proposed(drafter, request_of([4, 50, 7, 4])) == []  # one token is too short a match
    short = NgramDrafter(SpeculativeConfig(method="ngram", prompt_lookup_min=1), FLAT)
    assert proposed(short, request_of([4, 50, 7, 4]))[:2] == [50, 7]
    assert proposed(drafter, request_of([4])) == []


def test_a_repeating_text_is_continued_with_its_period() -> None:
    drafter = drafter_of("ngram", num_speculative_tokens=7)
    assert proposed(drafter, request_of([1, 2, 3, 1, 2, 3, 1, 2])) == [3, 1, 2, 3, 1, 2, 3]


def finished(drafter: SuffixDrafter, output: tuple[int, ...], salt: bytes = b"", reason="stop"):
    request = request_of([99], output, cache_salt=salt)
    request.finish_reason = reason
    drafter.end(request)


def test_suffix_proposes_the_most_frequent_continuation_of_earlier_answers() -> None:
    drafter = drafter_of("suffix", num_speculative_tokens=4)
    for last in (7, 8, 8):
        finished(drafter, (1, 2, 3, last, last, last))
    assert proposed(drafter, request_of([5, 1, 2])) == [3, 8, 8, 8]
    assert proposed(drafter, request_of([5, 2, 3])) == [8, 8, 8]
    assert proposed(drafter, request_of([5, 5])) == []


def test_a_draft_ends_where_earlier_answers_disagree() -> None:
    drafter = drafter_of("suffix")
    for last in range(20, 26):
        finished(drafter, (1, 2, 3, last, last))
    assert proposed(drafter, request_of([5, 1, 2])) == [3]


def test_suffix_prefers_the_longer_match() -> None:
    drafter = drafter_of("suffix", num_speculative_tokens=2)
    finished(drafter, (6, 1, 2, 40, 41, 42))
    assert proposed(drafter, request_of([1, 2, 30, 31, 5, 6, 1, 2])) == [40, 41]
    assert proposed(drafter, request_of([7, 1, 2, 30, 31, 7, 1, 2])) == [30, 31]


def test_answers_of_another_salt_are_never_proposed() -> None:
    drafter = drafter_of("suffix")
    finished(drafter, (1, 2, 3, 4, 5), salt=b"a")
    assert proposed(drafter, request_of([9, 1, 2], cache_salt=b"b")) == []
    assert proposed(drafter, request_of([9, 1, 2])) == []
    assert proposed(drafter, request_of([9, 1, 2], cache_salt=b"a")) == [3, 4, 5]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_without_an_end_is_not_kept(reason: str) -> None:
    drafter = drafter_of("suffix")
    finished(drafter, (1, 2, 3, 4), reason=reason)
    assert len(drafter.corpus) == 0


def test_kept_answers_are_bounded_and_the_least_recently_used_are_dropped() -> None:
    drafter = SuffixDrafter(SpeculativeConfig(method="suffix"), FLAT, max_corpus_tokens=20)
    finished(drafter, (1, 2, 3, 4, 5), salt=b"a")
    finished(drafter, (11, 12, 13, 14, 15), salt=b"b")
    for i in range(2, 20):
        assert proposed(drafter, request_of([9, 1, 2], cache_salt=b"a")) == [3, 4, 5]
        finished(drafter, tuple(range(100 * i, 100 * i + 5)))
        assert drafter.corpus.num_tokens <= 20
    assert proposed(drafter, request_of([9, 11, 12], cache_salt=b"b")) == []
    places = drafter.corpus._places
    assert set(places) == {b"a", b""}
    num_places = sum(len(there) for by_key in places.values() for there in by_key.values())
    assert num_places == 4 * 3
    drafter.reset()
    assert len(drafter.corpus) == 0
    assert proposed(drafter, request_of([9, 1, 2], cache_salt=b"a")) == []


# Predictions --------------------------------------------------------------------------------------

PREDICTED = tuple(range(100, 130))


@pytest.mark.parametrize("method", ["prediction", "ngram", "suffix"])
def test_a_prediction_is_proposed_from_its_start(method: str) -> None:
    drafter = drafter_of(method, num_speculative_tokens=3)
    request = request_of([1, 2, 3], prediction=PREDICTED)
    assert drafter.serves(request)
    assert proposed(drafter, request) == [100, 101, 102]
    request.token_ids += [100, 101]
    assert proposed(drafter, request) == [102, 103, 104]


def test_a_prediction_is_found_again_after_a_difference() -> None:
    drafter = drafter_of("prediction", num_speculative_tokens=3)
    request = request_of([1], prediction=PREDICTED)
    steps = [
        ([100, 7], []),  # another token
        ([103], []),  # one token is too short a match
        ([104], [105, 106, 107]),  # some tokens are left out
        ([105, 8, 9, 105, 106], [107, 108, 109]),  # some are inserted
        ([126, 127, 128], [129]),
        ([129], []),  # the end
        ([104, 105], [106, 107, 108]),  # said again
    ]
    for tokens, expected in steps:
        request.token_ids += tokens
        assert proposed(drafter, request) == expected


def test_the_next_place_is_preferred_to_earlier_ones() -> None:
    drafter = drafter_of("prediction", num_speculative_tokens=2)
    prediction = (1, 2, 10, 11, 3, 1, 2, 20, 21, 4, 1, 2, 30, 31)
    request = request_of([0], (1, 2, 10, 11, 99, 1, 2), prediction=prediction)
    assert proposed(drafter, request) == [20, 21]


def test_only_predictions_are_drafted_from_with_the_method_prediction() -> None:
    drafter = drafter_of("prediction")
    request = request_of([1, 2, 3] * 4)
    assert not drafter.serves(request)
    assert proposed(drafter, request) == []
    assert proposed(drafter_of("ngram"), request)


def test_a_lost_prediction_leaves_the_request_to_its_method() -> None:
    drafter = drafter_of("ngram", num_speculative_tokens=3)
    request = request_of([1, 2, 3, 1], (2,), prediction=PREDICTED)
    assert proposed(drafter, request) == [3, 1, 2]
    drafter.note(request, 3, 3)
    assert (request.num_predicted, request.num_accepted_predicted) == (0, 0)
    request = request_of([1, 2, 3, 1], prediction=PREDICTED)
    proposed(drafter, request)
    drafter.note(request, 3, 1)
    assert (request.num_predicted, request.num_accepted_predicted) == (3, 1)


# How many -----------------------------------------------------------------------------------------


def test_rejected_drafts_end_drafting_until_proposals_would_be_right() -> None:
    """Proposals that are only watched show it: no step is a trial."""
    costs = StepCosts([(1, 1.0), (1000, 300.0)])  # each token costs a third of a step
    drafter = make_drafter(SpeculativeConfig(method="ngram"), costs)
    request = request_of([1, 2, 3] * 4)
    lengths = []
    for _ in range(12):
        drafts = proposed(drafter, request)
        lengths.append(len(drafts))
        if drafts:
            drafter.note(request, len(drafts), 0)
    assert lengths[0] > 0
    assert lengths[-1] == 0
    assert lengths == sorted(lengths, reverse=True)
    for i in range(100):  # the text repeats, but each proposal is wrong
        request.token_ids += [1, 2, 3 + i]
        assert proposed(drafter, request) == []
    num_steps = 0
    while not proposed(drafter, request):
        request.token_ids.append((5, 6, 7)[num_steps % 3])
        num_steps += 1
    assert num_steps < 40
    assert request.drafts.rate > 0.3


def test_no_drafts_where_no_acceptance_could_pay() -> None:
    linear = StepCosts([(1, 1.0), (1000, 1000.0)])
    drafter = make_drafter(SpeculativeConfig(method="ngram"), linear)
    request = request_of([1, 2, 3] * 40)
    for _ in range(100):
        request.token_ids.append(request.token_ids[-3])
        assert proposed(drafter, request) == []
    assert not request.drafts.is_observed  # nor is anything watched


def test_a_proposal_ends_before_a_token_that_ends_the_request() -> None:
    request = request_of([1, 2, 3, 4, 5, 1], (2,), stop_token_ids=frozenset({4}))
    assert proposed(drafter_of("ngram"), request) == [3]
    request = request_of([1, 2, 4, 1, 2], stop_token_ids=frozenset({4}))
    assert proposed(drafter_of("ngram"), request) == []
    request = request_of([9], prediction=(1, 2, 4, 7), stop_token_ids=frozenset({4}))
    assert proposed(drafter_of("prediction"), request) == [1, 2]


def test_fewer_drafts_beside_more_rows() -> None:
    drafter = make_drafter(SpeculativeConfig(method="ngram"))
    request = request_of([1, 2, 3] * 4)
    lengths = []
    for num_rows in (1, 4, 16, 64):
        drafter.begin([request] * num_rows, num_rows, True)
        lengths.append(len(drafter.propose(request)))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


@pytest.mark.parametrize("method", ["ngram", "suffix", "prediction"])
def test_proposals_are_a_function_of_what_was_settled(method: str) -> None:
    """Preempted or not, and whatever else was proposed in between."""

    def run(extra: bool) -> list[list[int]]:
        rng = random.Random(4)
        drafter = drafter_of(method)
        request = request_of([1, 2, 3, 1, 2], prediction=(1, 2, 3, 1, 3, 2, 1, 1))
        other = request_of([3, 2, 1, 3, 2], prediction=(2, 2, 2))
        found = []
        for _ in range(60):
            if extra:
                proposed(drafter, other)
            drafts = proposed(drafter, request)
            found.append(drafts)
            if drafts:
                drafter.note(request, len(drafts), rng.randint(0, len(drafts)))
            request.token_ids += [rng.randrange(1, 4) for _ in range(rng.randint(1, 3))]
        return found

    assert run(extra=False) == run(extra=True)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_row_with_many_tokens_of_a_prompt_has_no_drafts(method: str) -> None:
    drafter = drafter_of(method, model="m") if method == "draft_model" else drafter_of(method)
    request = request_of([1, 2, 3, 4] * 30, prediction=(1, 2, 3))
    request.num_dispatched = len(request.token_ids)
    for num_own_tokens in (drafters._LONG_ROW + 1, drafters._LONG_ROW):
        request.num_computed = request.num_dispatched - num_own_tokens
        is_drafted = num_own_tokens == drafters._LONG_ROW
        assert (proposed(drafter, request) != []) == is_drafted
