"""The kill suite: what a mutant has to survive. Exits with 1 and one line `KILLED property detail`,
or with 0. Runs in the mutant's own process; see `tests/mutants/__main__.py`.

First whole engines with the content model and every property watched; then walks in lockstep with
the specification, for mutants that keep every property and yet do not do what is specified.
"""

from __future__ import annotations

import random
import sys

import pytest

from spec import model
from spec.state import Abort, Add, Pause, Schedule, Scope, Template
from tests.refinement import Pair, RefinementError
from tests.scenario import PropertyError, Scenario

NUM_SCENARIOS = 400
NUM_WALKS = 300
WALK_STEPS = 50
UNIT_TESTS = ("block_manager", "planner", "policy", "scheduler")


def walk(seed: int) -> None:
    """A random walk through a crowded world, the real objects beside the specification."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 2)
    num_blocks = rng.randint(4, 8)
    cap = rng.randint(3, 6)
    policy = rng.choice(["fcfs", "fcfs", "priority"])
    templates = tuple(
        Template(
            (0, 0, 1, 0, 1, 1, 0)[: rng.choice([1, 1, 2, 2, 3, 5, 7])],
            rng.randint(1, 8),
            0,
            rng.randrange(2),
        )
        for _ in range(3)
    )
    scope = Scope(
        "walk",
        templates,
        num_requests=8,
        num_blocks=num_blocks,
        block_size=block_size,
        budget=cap + rng.randint(0, 6),
        cap=cap,
        max_model_len=num_blocks * block_size + 1,
        depth=rng.choice([0, 0, 1, 2]),
        outputs=(0, 1),
        policy=policy,
        overtaking=3 if policy == "priority" else 0,
    )
    pair = Pair(scope)
    for _ in range(WALK_STEPS):
        labels = [label for label, _ in model.actions(pair.state, scope)]
        if not labels:
            return
        weights = [
            0.1
            if isinstance(label, Abort)
            else 0.3
            if isinstance(label, Pause)
            else 2.0
            if isinstance(label, Add)
            else 6.0 / sum(isinstance(other, Schedule) for other in labels)
            if isinstance(label, Schedule)
            else 3.0
            for label in labels
        ]
        pair.apply(rng.choices(labels, weights)[0])


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
    names = [f"tests/unit/test_{name}.py" for name in UNIT_TESTS]
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *names], plugins=[first])
    if status != pytest.ExitCode.OK:
        print(f"KILLED unit: {first.name or status}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
