"""``python -m spec.proof``: proves that the pool's invariants are inductive for any pool size.

The checker explores small pools; this proof covers all of them. A pool is a set of functions over
unbounded sorts. For every action and every invariant, Z3 searches for a state in which all
invariants hold, the action is allowed, and the invariant fails afterwards; "unsat" proves the
step. The solver gets no quantifiers: an action changes a function at one point, so an invariant is
assumed only at the few terms that the query mentions (assuming less is sound).
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import z3

from .proof_pool import (
    ACTIONS,
    BROKEN,
    INVARIANTS,
    Action,
    BlockSort,
    Fn,
    Invariant,
    KeySort,
    PoolFns,
    Terms,
    any_pool,
)

b, other, b0 = z3.Consts("b other b0", BlockSort)
k, k0 = z3.Consts("k k0", KeySort)
TERMS = Terms(b, k, other)


def assume_invariants(solver: z3.Solver, p: PoolFns) -> None:
    """At every term a query can mention: the action's own, the goal's, one look-up further."""
    blocks = [b, other, b0, p.index(k), p.index(k0)]
    keys = [k, k0, p.key(b), p.key(b0), p.key(other), p.key(p.index(k))]
    for holds in INVARIANTS.values():
        solver.add(*(holds(p, block, key) for block in blocks for key in keys))


def ask(action: Action, goal: Invariant | None, promise: int = -1) -> z3.CheckSatResult:
    """unsat: proved. sat: refuted (or, without a goal, the action is possible)."""
    solver, p = z3.Solver(), any_pool()
    assume_invariants(solver, p)
    step = action(p, TERMS)
    solver.add(step.allowed)
    if promise >= 0:
        solver.add(z3.Not(step.promises[promise][1]))
    elif goal is not None:
        solver.add(z3.Not(goal(step.after, b0, k0)))
    return solver.check()


def empty_pool() -> PoolFns:
    p = any_pool()

    def always(value: int | bool) -> Fn:
        constant = z3.BoolVal(value) if isinstance(value, bool) else z3.IntVal(value)
        return lambda _: constant

    zero, no = always(0), always(False)
    return replace(
        p, own=zero, ref=zero, in_lru=zero, in_free=always(1), has_key=no, indexed=no, settled=no
    )


def conditions() -> dict[str, z3.CheckSatResult]:
    """Every verification condition by name, with Z3's answer; all must be unsat."""
    answers: dict[str, z3.CheckSatResult] = {}
    for name, holds in INVARIANTS.items():
        solver = z3.Solver()
        solver.add(z3.Not(holds(empty_pool(), b0, k0)))
        answers[f"empty pool: {name}"] = solver.check()
    for act, action in ACTIONS.items():
        for name, holds in INVARIANTS.items():
            answers[f"{act}: {name}"] = ask(action, holds)
        for number, (name, _) in enumerate(action(any_pool(), TERMS).promises):
            answers[f"{act}: {name}"] = ask(action, None, number)
    return answers


def refuted(action: Action) -> list[str]:
    """The invariants that a broken action does not preserve."""
    return [name for name, holds in INVARIANTS.items() if ask(action, holds) == z3.sat]


def main() -> int:
    began = time.perf_counter()
    answers = conditions()
    failed = [name for name, answer in answers.items() if answer != z3.unsat]
    seconds = time.perf_counter() - began
    proved = len(answers) - len(failed)
    print(f"{len(answers)} verification conditions, {proved} proved, {seconds:.2f} s")
    for name in failed:
        print(f"  NOT PROVED  {name}: {answers[name]}")
    idle = [act for act, action in ACTIONS.items() if ask(action, None) != z3.sat]
    print(f"{len(ACTIONS) - len(idle)} of {len(ACTIONS)} actions are possible under the invariants")
    unrefuted = []
    for act, action in BROKEN.items():
        broken = refuted(action)
        print(f"broken: {act}: {'breaks ' + '; '.join(broken) if broken else 'NOT REFUTED'}")
        if not broken:
            unrefuted.append(act)
    return 1 if failed or idle or unrefuted else 0


if __name__ == "__main__":
    sys.exit(main())
