"""Exhaustive refinement at small scope: every action enabled in every reached state, on the real
objects. `python -m tests.property.test_refinement` runs the scopes to their ends."""

from __future__ import annotations

import sys
import time

import pytest

from spec.scopes import CI
from spec.state import Scope
from tests.refinement import explore

NUM_STATES_IN_CI = 2500


@pytest.mark.parametrize("scope", CI, ids=lambda scope: scope.name)
def test_the_real_objects_do_what_the_specification_does(scope: Scope) -> None:
    num_states, num_transitions = explore(scope, NUM_STATES_IN_CI)
    assert num_transitions > num_states > 1000


def main() -> None:
    print("scope                 states  transitions  seconds")
    totals = [0, 0]
    for scope in CI:
        begin = time.perf_counter()
        counts = explore(scope)
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        seconds = time.perf_counter() - begin
        print(f"{scope.name:<18} {counts[0]:>9} {counts[1]:>12} {seconds:>8.1f}", flush=True)
    print(f"{'all':<18} {totals[0]:>9} {totals[1]:>12}")


if __name__ == "__main__":
    sys.exit(main())
