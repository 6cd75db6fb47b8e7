"""Properties R4 and R5 of boxes that ranks poll for a sentinel value, without flags; seeded
defects.
"""

from __future__ import annotations

import pytest

from spec import sentinel


@pytest.mark.parametrize(("num_ranks", "num_calls", "shots"), sentinel.SCOPES)
def test_nothing_is_violated(num_ranks: int, num_calls: int, shots: str) -> None:
    num_states, broken, path = sentinel.check(num_ranks, num_calls, shots)
    assert not broken, path
    assert num_states > 80


@pytest.mark.parametrize("bug", sentinel.BUGS)
def test_a_broken_rule_is_found(bug: str) -> None:
    _, broken, path = sentinel.check(2, 4, "1", bug)
    assert broken == "R4", path
