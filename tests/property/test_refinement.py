"""Exhaustive refinement in small scopes: apply every enabled action in every reachable state.

The actions run on the real objects. `python -m tests.property.test_refinement` explores the scopes
completely.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import pytest

from spec.scopes import CI
from spec.state import Scope
from tests.support.refinement import explore

NUM_STATES_IN_CI = 2500


@pytest.mark.parametrize("scope", CI, ids=lambda scope: scope.name)
def test_the_real_objects_do_what_the_specification_does(scope: Scope) -> None:
    num_states, num_transitions, num_packed_steps = explore(scope, NUM_STATES_IN_CI)
    assert num_transitions > num_states > 1000
    assert num_packed_steps > 100


def main() -> None:
    print("scope                 states  transitions  packed steps  seconds")
    totals = [0, 0, 0]
    for scope in CI:
        begin = time.perf_counter()
        counts = explore(scope)
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        seconds = time.perf_counter() - begin
        print(_row(scope.name, counts) + f" {seconds:>8.1f}", flush=True)
    print(_row("all", totals))


def _row(name: str, counts: Sequence[int]) -> str:
    return f"{name:<18} {counts[0]:>9} {counts[1]:>12} {counts[2]:>13}"


if __name__ == "__main__":
    sys.exit(main())
