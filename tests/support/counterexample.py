"""Print the shortest sequence of actions that breaks the real code.

    python -m tests.support.counterexample [mutant name]

A breadth-first search through the scopes of the specification applies each action to the real
objects too. The structural properties are checked on every plan and state. The program prints the
actions that lead to the first failure. With a name, it does so for that mutant of the code (see
`tests/mutants/catalog.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque

from pagespec.engine.invariants import InvariantError, check_plan, check_state
from spec.scopes import CI, SEEDED
from spec.state import Label, Scope
from spec.trace import render
from tests.support.refinement import Pair, RefinementError, Saved

NUM_STATES_MAX = 20_000


class _Watched(Pair):
    """A pair whose real side is also checked against the properties, which explain more than a
    difference of two states."""

    def _apply_to_real(self, label: Label):
        plan = super()._apply_to_real(label)
        check_state(self.scheduler)
        if plan is not None:
            check_plan(self.scheduler, plan)
        return plan


def search(scope: Scope) -> tuple[list[Label], Exception] | None:
    """The shortest sequence of actions that fails, and the failure; None if the first
    `NUM_STATES_MAX` states have no failure."""
    pair = _Watched(scope)
    seen = {pair.state}
    queue: deque[tuple[Saved, tuple[Label, ...]]] = deque([(pair.save(), ())])
    while queue:
        saved, path = queue.popleft()
        pair.load(saved)
        for i, label in enumerate(pair.enabled()):
            if i:
                pair.load(saved)
            try:
                pair.apply(label)
            except (InvariantError, RefinementError) as error:
                return [*path, label], error
            if pair.state not in seen and len(seen) < NUM_STATES_MAX:
                seen.add(pair.state)
                queue.append((pair.save(), (*path, label)))
    return None


def tell(scope: Scope, labels: list[Label], error: Exception) -> None:
    """Print the scope, the actions with the specification's state after them, and the code's
    failure."""
    print(
        f"{scope.num_blocks} blocks of {scope.block_size}, budget {scope.budget}, "
        f"at most {scope.cap} running, pipeline depth {scope.depth}"
    )
    print(render(labels, scope))
    kind = "" if isinstance(error, InvariantError) else "not as specified: "
    print(f"  => the code: {kind}{error}")


def main() -> int:
    if len(sys.argv) > 1:
        return _of_mutant(" ".join(sys.argv[1:]))
    scopes = [SEEDED._replace(depth=depth) for depth in (0, 1)] + list(CI)
    for scope in scopes:
        found = search(scope)
        if found is not None:
            tell(scope, *found)
            return 1
    print("no counterexample")
    return 0


def _of_mutant(name: str) -> int:
    from tests.mutants.__main__ import mutated_sources
    from tests.mutants.catalog import MUTANTS

    mutant = next(m for m in MUTANTS if name in m.name)
    print(f"{mutant.file}: {mutant.name}")
    with mutated_sources(mutant) as environment:
        command = [sys.executable, "-m", "tests.support.counterexample"]
        return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
