"""R1 to R3 in small groups of ranks, and what breaks them."""

from __future__ import annotations

import pytest

from spec import ranks

BROKEN = {
    "one-slot": "R1",
    "settle-on-rank-0": "R2",
    "launch-in-main": "R3",
    "no-watch": "R3",
}


@pytest.mark.parametrize("world", ranks.WORLDS)
def test_nothing_is_violated(world: ranks.World) -> None:
    num_states, violation = ranks.check(world)
    assert violation is None, violation
    assert num_states > 900


@pytest.mark.parametrize("bug", ranks.BUGS)
def test_a_broken_rule_is_found(bug: str) -> None:
    world = ranks.WORLDS[1]
    if bug == "one-slot":
        world = world._replace(num_slots=1)
    _, violation = ranks.check(world, bug)
    assert violation is not None
    assert violation.property_id == BROKEN[bug], violation


def test_a_step_may_stay_unsettled_only_where_an_error_was_raised() -> None:
    """Without deaths and interrupts all steps settle; so the search gets to the end."""
    world = ranks.WORLDS[1]._replace(may_die=False, may_interrupt=False)
    num_states, violation = ranks.check(world)
    assert violation is None
    assert num_states < ranks.check(ranks.WORLDS[1])[0]
