"""Properties R1 to R3 in small groups of ranks, and seeded defects."""

from __future__ import annotations

import pytest

from spec import ranks

BROKEN = {
    "one-slot": "R1",
    "settle-on-rank-0": "R2",
    "launch-in-main": "R3",
    "no-watch": "R3",
}


@pytest.mark.parametrize("config", ranks.CONFIGS)
def test_nothing_is_violated(config: ranks.GroupConfig) -> None:
    num_states, violation = ranks.check(config)
    assert violation is None, violation
    assert num_states > 900


@pytest.mark.parametrize("bug", ranks.BUGS)
def test_a_broken_rule_is_found(bug: str) -> None:
    config = ranks.CONFIGS[1]
    if bug == "one-slot":
        config = config._replace(num_slots=1)
    _, violation = ranks.check(config, bug)
    assert violation is not None
    assert violation.property_id == BROKEN[bug], violation


def test_a_step_may_stay_unsettled_only_where_an_error_was_raised() -> None:
    """Without deaths and interrupts all steps settle; so the search gets to the end."""
    config = ranks.CONFIGS[1]._replace(may_die=False, may_interrupt=False)
    num_states, violation = ranks.check(config)
    assert violation is None
    assert num_states < ranks.check(ranks.CONFIGS[1])[0]
