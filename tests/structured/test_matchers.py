"""Grammar matchers, driven by plans and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagespec import SamplingParams, StructuredOutputs
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import RequestInfo
from pagespec.structured.grammars import Grammars
from pagespec.structured.matchers import ConstrainedRows, Matchers
from tests.support.structured import END, tokenizer

GRAMMARS = Grammars(tokenizer(), 320, {END})
X, Y, Z = (3 + ord(letter) for letter in "xyz")


def info(name: str, regex: str | None, num_prompt_tokens: int = 2) -> RequestInfo:
    outputs = None if regex is None else StructuredOutputs(regex=regex)
    params = SamplingParams(structured_outputs=outputs)
    return RequestInfo(name, num_prompt_tokens, params, 0, b"", outputs is not None)


def plan(
    requests: tuple[RequestInfo, ...],
    starts: Sequence[int],
    tokens: Sequence[Sequence[int]],
    *,
    sampled: Sequence[bool] | None = None,
    admitted: dict[int, tuple[int, ...]] | None = None,
    released: tuple[str, ...] = (),
) -> StepPlan:
    """``admitted``: the ids before each admitted row, by row."""
    lengths = tuple(map(len, tokens))
    all_sampled = tuple(sampled or [True] * len(requests))
    given = admitted or {}
    return StepPlan(
        0,
        requests,
        tuple(starts),
        lengths,
        all_sampled,
        tuple(i for ids in tokens for i in ids),
        tables=dict.fromkeys(given, (0,)),
        prefixes={row: ids for row, ids in given.items() if requests[row].needs_history},
        released=released,
        is_decode_only=set(lengths) == {1} and all(all_sampled),
    )


def allowed(matchers: Matchers, rows: ConstrainedRows | None) -> dict[int, list[int]]:
    assert rows is not None
    masks = matchers.masks(rows)
    return {row: ids_of(masks.bits[number]) for row, number in masks.numbers.items()}


def ids_of(mask: Any) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert len(bits) == 320
    return np.flatnonzero(bits).tolist()


def test_a_text_goes_on_with_each_collected_token_beside_steps_of_others() -> None:
    matchers = Matchers(GRAMMARS)
    requests = free, _ = (info("free", None), info("own", "xy?z"))
    first = matchers.take(plan(requests, [0, 0], [[7, 7], [Z, Z]], admitted={0: (), 1: ()}))
    assert allowed(matchers, first) == {1: [X]}
    # Dispatched before the first was collected, as with overlap.
    others = (free,)
    assert matchers.take(plan(others, [2], [[-1]])) is None
    assert first is not None
    assert matchers.settle(first, [5, X]) == ({}, {})
    second = matchers.take(plan(requests, [3, 2], [[-1], [X]]))
    assert matchers.take(plan(others, [4], [[-1]])) is None
    assert allowed(matchers, second) == {1: [Y, Z]}
    assert second is not None
    assert matchers.settle(second, [5, Z]) == ({}, {})
    third = matchers.take(plan(requests, [5, 3], [[-1], [Z]]))
    assert allowed(matchers, third) == {1: [END]}
    assert third is not None
    assert matchers.settle(third, [5, END]) == ({}, {})


def test_outputs_come_back_with_an_admission_in_chunks() -> None:
    matchers = Matchers(GRAMMARS)
    (own,) = requests = (info("own", "xyzxyz"),)
    # Positions 0 to 2 from the prefix cache, the outputs "xyzx" known, a chunk of two at a time.
    assert (
        matchers.take(plan(requests, [3], [[Y]], sampled=[False], admitted={0: (9, 9, X)})) is None
    )
    last = matchers.take(plan(requests, [4], [[Z, X]]))
    assert allowed(matchers, last) == {0: [Y]}
    # Taken back and admitted in the same plan; then it is known from the beginning.
    again = matchers.take(
        plan(requests, [2], [[X, Y, Z, X]], admitted={0: (9, 9)}, released=("own",))
    )
    assert allowed(matchers, again) == {0: [Y]}
    assert matchers.take(plan((), [], [], released=(own.request_id,))) is None
    assert not matchers._texts


def test_a_row_whose_matcher_failed_has_no_mask_and_says_why() -> None:
    matchers = Matchers(GRAMMARS)
    requests = (info("bad", "xy"), info("good", "xy"))
    rows = matchers.take(plan(requests, [0, 0], [[7, 7], [7, 7]], admitted={0: (), 1: ()}))
    assert allowed(matchers, rows) == {0: [X], 1: [X]}
    assert rows is not None
    failures, _ = matchers.settle(rows, [Z, X])
    assert list(failures) == ["bad"]
    assert "structured_outputs" in failures["bad"]
    assert "not allowed" in failures["bad"]
    (good,) = rest = (requests[1],)
    rows = matchers.take(plan(rest, [2], [[X]], released=("bad",)))
    assert allowed(matchers, rows) == {0: [Y]}
    assert good.request_id in matchers._texts


def test_what_the_sampler_was_not_to_take_ends_its_request() -> None:
    """As when ``allowed_token_ids`` leave no token of a bitmask."""
    matchers = Matchers(GRAMMARS)
    rows = matchers.take(plan((info("own", "x"),), [0], [[7, 7]], admitted={0: ()}))
    assert rows is not None
    masks = matchers.masks(rows)
    masks.bits[masks.numbers[0]] = 0
    assert list(matchers.settle(rows, [X])[0]) == ["own"]


def test_the_mask_of_a_row_in_flight_outlives_its_request() -> None:
    matchers = Matchers(GRAMMARS)
    (old,) = requests = (info("old", "x"),)
    rows = matchers.take(plan(requests, [0], [[7, 7]], admitted={0: ()}))
    assert allowed(matchers, rows) == {0: [X]}
    # It was aborted; the next step admits another.
    new = matchers.take(
        plan((info("new", "y"),), [0], [[7, 7]], admitted={0: ()}, released=(old.request_id,))
    )
    assert allowed(matchers, new) == {0: [Y]}
    assert allowed(matchers, rows) == {0: [X]}
    assert rows is not None
    assert matchers.settle(rows, [X]) == ({}, {})
    last = matchers.take(plan((info("last", "z"),), [0], [[7, 7]], admitted={0: ()}))
    assert allowed(matchers, last) == {0: [Z]}
    assert allowed(matchers, new) == {0: [Y]}
    assert last is not None
    assert last.texts[0].mask == rows.texts[0].mask, "its memory is used again"


def test_more_requests_than_there_is_memory_for_masks() -> None:
    matchers = Matchers(GRAMMARS)
    requests = tuple(info(str(i), "xyz"[i % 3]) for i in range(100))
    admitted = dict.fromkeys(range(100), ())
    rows = matchers.take(plan(requests, [0] * 100, [[7, 7]] * 100, admitted=admitted))
    assert allowed(matchers, rows) == {i: [(X, Y, Z)[i % 3]] for i in range(100)}


def test_after_a_reset_nothing_is_known() -> None:
    matchers = Matchers(GRAMMARS)
    requests = (info("own", "xy"),)
    rows = matchers.take(plan(requests, [0], [[7, 7]], admitted={0: ()}))
    assert rows is not None
    matchers.settle(rows, [X])
    matchers.reset()
    rows = matchers.take(plan(requests, [0], [[7, 7]], admitted={0: ()}))
    assert allowed(matchers, rows) == {0: [X]}


def test_a_step_whose_matchers_have_all_failed_makes_no_mask() -> None:
    matchers = Matchers(GRAMMARS)
    (own,) = requests = (info("own", "xy"),)
    rows = matchers.take(plan(requests, [0], [[7, 7]], admitted={0: ()}))
    assert allowed(matchers, rows) == {0: [X]}
    # Its outputs come back after a preemption, and the matcher does not take them.
    matchers.take(plan((), [], [], released=(own.request_id,)))
    again = matchers.take(plan(requests, [0], [[7, 7, Z, Z]], admitted={0: ()}))
    assert allowed(matchers, again) == {}
    assert again is not None
    assert list(matchers.settle(again, [0])[0]) == ["own"]
    free = (info("other", "y"),)
    rows = matchers.take(plan(free, [0], [[7, 7]], admitted={0: ()}, released=("own",)))
    assert allowed(matchers, rows) == {0: [Y]}


def drafted(
    matchers: Matchers, request: RequestInfo, start: int, tokens: Sequence[int], num_drafts: int
) -> ConstrainedRows:
    """A step of one request, whose last ``num_drafts`` tokens are draft tokens."""
    given = plan((request,), [start], [tokens], admitted={0: ()} if start == 0 else None)
    rows = matchers.take(replace(given, num_samples=(num_drafts + 1,), is_decode_only=False))
    assert rows is not None
    return rows


def test_a_row_has_a_mask_behind_each_draft_token_up_to_a_forbidden_one() -> None:
    matchers = Matchers(GRAMMARS)
    own = info("own", "xy?z")
    rows = drafted(matchers, own, 0, [7, 7, X, Y, Y, Z], 4)
    assert allowed(matchers, rows) == {0: [X], 1: [Y, Z], 2: [Z]}
    assert matchers.masks(rows).rows == [0, 0, 0]
    # Only the accepted ones are consumed: the sample behind the first is another.
    assert matchers.settle(rows, [X, Z, 9, 9, 9]) == ({}, {})
    rows = drafted(matchers, own, 3, [Z, END], 1)
    assert allowed(matchers, rows) == {0: [END], 1: [END]}
    assert matchers.settle(rows, [END, END]) == ({}, {})
    assert len(matchers._free) == len(matchers._bits) - 1


def test_a_sample_behind_draft_tokens_that_is_not_allowed_fails_at_its_place() -> None:
    matchers = Matchers(GRAMMARS)
    own = info("own", "xy?z")
    rows = drafted(matchers, own, 0, [7, 7, X, Y], 2)
    matchers.masks(rows)
    failures, failed_samples = matchers.settle(rows, [X, Y, X])
    assert f"token {X} is not allowed" in failures["own"]
    assert failed_samples == {"own": 2}


def test_of_a_fork_that_fails_only_the_sample_behind_it_fails() -> None:
    matchers = Matchers(GRAMMARS)
    own = info("own", "x+")
    rows = drafted(matchers, own, 0, [7, 7, X, X, X], 3)
    matchers.masks(rows)
    rows.aheads[0].num_made, rows.aheads[0].failure = 1, "too many items"
    assert set(matchers.masks(rows).numbers) == {0, 1}
    failures, failed_samples = matchers.settle(rows, [X, X, X, X])
    assert failures == {"own": "structured_outputs: too many items"}
    assert failed_samples == {"own": 2}
    matchers.reset()
    rows = drafted(matchers, own, 0, [7, 7, X, X, X], 3)
    matchers.masks(rows)
    rows.aheads[0].num_made, rows.aheads[0].failure = 1, "too many items"
    assert matchers.settle(rows, [X, END, X, X]) == ({}, {}), "a draft token before it is wrong"


def test_rows_with_and_without_draft_tokens_share_a_step() -> None:
    """Places count each sample, also of rows without a constraint."""
    matchers = Matchers(GRAMMARS)
    requests = info("free", None), info("a", "xyz"), info("free too", None), info("b", "zyx")
    tokens = [[7, 7, 5, 5], [7, 7, X, Z, Y], [7], [7, 7, Z]]
    given = plan(requests, [0] * 4, tokens, admitted=dict.fromkeys(range(4), ()))
    rows = matchers.take(replace(given, num_samples=(3, 4, 1, 2), is_decode_only=False))
    assert rows is not None
    assert allowed(matchers, rows) == {3: [X], 4: [Y], 8: [Z], 9: [Y]}
    assert matchers.masks(rows).rows == [1, 1, 3, 3]
    # The first accepts one draft token, the last accepts its own.
    assert matchers.settle(rows, [5, 5, 5, X, Y, 0, 0, 5, Z, Y]) == ({}, {})
    assert len(matchers._free) == len(matchers._bits) - 2
    going_on = requests[1], requests[3]
    again = matchers.take(plan(going_on, [3, 3], [[Y], [Y]]))
    assert allowed(matchers, again) == {0: [Z], 1: [X]}


def test_a_request_that_was_released_keeps_no_mask_behind_draft_tokens() -> None:
    matchers = Matchers(GRAMMARS)
    own = info("own", "xyz")
    rows = drafted(matchers, own, 0, [7, 7, X, Y], 2)
    # It was aborted; its masks are kept until its step is settled.
    new = matchers.take(
        plan((info("new", "y"),), [0], [[7, 7]], admitted={0: ()}, released=("own",))
    )
    assert allowed(matchers, rows) == {0: [X], 1: [Y], 2: [Z]}
    assert allowed(matchers, new) == {0: [Y]}
    assert matchers.settle(rows, [X, Y, Z]) == ({}, {})
    last = matchers.take(plan((info("last", "z"),), [0], [[7, 7]], admitted={0: ()}))
    assert allowed(matchers, last) == {0: [Z]}
    assert len(matchers._free) == len(matchers._bits) - 2


def with_min_tokens(request: RequestInfo, min_tokens: int, *stops: int) -> RequestInfo:
    params = replace(request.sampling_params, min_tokens=min_tokens)
    return replace(request, sampling_params=params, early_stop_ids=frozenset(stops))


def test_min_tokens_bans_end_tokens_where_others_are_allowed() -> None:
    matchers = Matchers(GRAMMARS)
    requests = (
        with_min_tokens(info("long", "xy*"), 3, END, 300),
        with_min_tokens(info("short", "x"), 9, END),
        with_min_tokens(info("stop", "[xy]*"), 2, END, X),
    )
    rows = matchers.take(
        plan(requests, [0, 0, 0], [[7, 7]] * 3, admitted=dict.fromkeys(range(3), ()))
    )
    expected = [
        {0: [X], 1: [X], 2: [Y]},
        {0: [Y], 1: [END], 2: [Y]},
        {0: [Y], 1: [END], 2: [END, X, Y]},
        {0: [END, Y], 1: [END], 2: [END, X, Y]},
    ]
    for step, masks in enumerate(expected):
        assert allowed(matchers, rows) == masks
        assert rows is not None
        token_ids = [X if step == 0 else Y, X if step == 0 else END, Y]
        assert matchers.settle(rows, token_ids) == ({}, {})
        # The text of the second request is complete. Its end token is not passed on.
        tokens = [[token_ids[0]], [X], [token_ids[2]]]
        rows = matchers.take(plan(requests, [2 + step, 2, 2 + step], tokens))


def test_min_tokens_counts_draft_tokens_and_returned_outputs() -> None:
    matchers = Matchers(GRAMMARS)
    own = with_min_tokens(info("own", "xy*"), 3, END)
    rows = drafted(matchers, own, 0, [7, 7, X, Y, Y], 3)
    assert allowed(matchers, rows) == {0: [X], 1: [Y], 2: [Y], 3: [END, Y]}
    assert matchers.settle(rows, [X, Y, Y, END]) == ({}, {})
    matchers.take(plan((), [], [], released=("own",)))
    for known, masks in (((X, Y), [Y]), ((X, Y, Y), [END, Y])):
        again = with_min_tokens(info(f"own{len(known)}", "xy*"), 3, END)
        rows = matchers.take(plan((again,), [0], [[7, 7, *known]], admitted={0: ()}))
        assert allowed(matchers, rows) == {0: masks}


def test_a_text_with_its_own_end_tokens_ends_behind_draft_tokens() -> None:
    matchers = Matchers(GRAMMARS)
    own = replace(info("own", "xy?"), end_token_ids=frozenset({300}))
    rows = drafted(matchers, own, 0, [7, 7, X, Y, 300], 3)
    found = allowed(matchers, rows)
    assert found == {0: [X], 1: [END, Y, 300], 2: [END, 300], 3: found[3]}
    assert matchers.settle(rows, [X, 300, 0, 0]) == ({}, {})


def test_a_text_that_failed_before_has_no_masks_behind_draft_tokens() -> None:
    matchers = Matchers(GRAMMARS)
    own = info("own", "xy")
    # Its outputs do not fit the constraint.
    given = plan((own,), [0], [[7, 7, Z, Z, X]], admitted={0: ()})
    rows = matchers.take(replace(given, num_samples=(2,), is_decode_only=False))
    assert allowed(matchers, rows) == {}
    assert rows is not None
    failures, failed_samples = matchers.settle(rows, [X, X])
    assert list(failures) == ["own"]
    assert failed_samples == {}


def test_a_constraint_that_cannot_be_compiled_takes_no_masks_behind_draft_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any) -> Any:
        raise ValueError("too many items")

    monkeypatch.setattr(Grammars, "matcher", failing)
    matchers = Matchers(GRAMMARS)
    rows = drafted(matchers, info("own", "xy"), 0, [7, 7, X, Y], 2)
    assert allowed(matchers, rows) == {}
    assert len(matchers._free) == len(matchers._bits) - 1
    assert matchers.settle(rows, [X, Y, Z]) == (
        {"own": "structured_outputs: too many items"},
        {},
    )
