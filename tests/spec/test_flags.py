"""Properties R4 and R5 of the flags of collectives over peer memory, and seeded defects."""

from __future__ import annotations

import pytest

from spec import flags

BROKEN = {"equality": "R5", "one-half": "R4", "flag-first": "R4"}


@pytest.mark.parametrize(("num_ranks", "num_calls"), flags.SCOPES)
def test_nothing_is_violated(num_ranks: int, num_calls: int) -> None:
    num_states, broken, path = flags.check(num_ranks, num_calls)
    assert not broken, path
    assert num_states > 80


@pytest.mark.parametrize("bug", flags.BUGS)
def test_a_broken_rule_is_found(bug: str) -> None:
    _, broken, path = flags.check(2, 3, bug)
    assert broken == BROKEN[bug], path
