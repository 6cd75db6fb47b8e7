"""The kill suite: the tests that run on each mutant. Runs in a process per mutant.

First whole engines run with the content model while every property is checked. Then the real
objects run in lockstep with the specification. The second part kills mutants that satisfy every
property and still differ from the specification. Unit tests come last.

Exits with 1 after one line `KILLED property detail`, or with 0 if the mutant survives. See
`tests/mutants/__main__.py`.
"""

from __future__ import annotations

import sys

import pytest

from tests.property.crowded_walk import walk
from tests.support.refinement import RefinementError
from tests.support.scenario import PropertyError, Scenario

NUM_SCENARIOS = 400
NUM_WALKS = 300
UNIT_TESTS = (
    *("block_manager", "draft_mode", "drafters", "drafts", "pace", "planner", "policy"),
    *("scheduler", "shares"),
    *("segments", "siblings", "speculation", "state_slots"),
)
OTHER_TESTS = (
    "tests/runner/test_pinned.py",
    *(f"tests/structured/test_{name}.py" for name in ("forced", "matchers", "reasoning")),
)


def main() -> int:
    try:
        for seed in range(NUM_SCENARIOS):
            Scenario(seed).run()
        for seed in range(NUM_WALKS):
            walk(seed)
    except PropertyError as error:
        print(f"KILLED {error}")
    except RefinementError as error:
        print(f"KILLED lockstep: {error}")
    except Exception as error:  # the engine itself fell over
        print(f"KILLED crash: {type(error).__name__}: {error}")
    else:
        return run_unit_tests()
    return 1


class FirstFailure:
    """A pytest plugin that remembers the first failure."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def run_unit_tests() -> int:
    first = FirstFailure()
    names = [*(f"tests/engine/test_{name}.py" for name in UNIT_TESTS), *OTHER_TESTS]
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *names], plugins=[first])
    if status != pytest.ExitCode.OK:
        print(f"KILLED unit: {first.name or status}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
