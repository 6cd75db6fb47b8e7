"""Properties R4 and R5 of the two-shot all-reduce over peer memory, and seeded defects."""

from __future__ import annotations

import pytest

from spec import two_shot

BROKEN = {"flag-first": "R4", "early-call": "R4", "finish-before-sum": "R5"}


@pytest.mark.parametrize(("num_ranks", "num_calls", "num_slots"), two_shot.SCOPES)
def test_nothing_is_violated(num_ranks: int, num_calls: int, num_slots: int) -> None:
    num_states, broken, path = two_shot.check(num_ranks, num_calls, num_slots)
    assert not broken, path
    assert num_states > 80


@pytest.mark.parametrize("bug", two_shot.BUGS)
def test_a_broken_rule_is_found(bug: str) -> None:
    _, broken, path = two_shot.check(2, 3, 1, bug)
    assert broken == BROKEN[bug], path
