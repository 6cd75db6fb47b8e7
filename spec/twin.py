"""``python -m spec.twin``: counts distinct states of the Python model over the variables of
``tla/PageSpec.tla``, without symmetry: the count that TLC reports as "distinct states found"."""

from __future__ import annotations

from . import model
from .scopes import SEEDED
from .state import Scope, State

TWINS = (
    SEEDED._replace(name="sync"),
    SEEDED._replace(name="overlap", depth=1),
    SEEDED._replace(name="live", depth=2, abort=False, pause=False),
)


def project(state: State) -> tuple[object, ...]:
    """The variables req, ref, key, free, lru and flight."""
    requests = tuple(
        (
            q.tokens,
            q.limit,
            r in state.waiting,
            r in state.running,
            q.reason,
            (q.computed, q.dispatched, q.total, q.table, q.published),
        )
        for r, q in enumerate(state.requests)
    )
    flight = tuple(tuple((w.request, w.n, w.samples) for w in step) for step in state.flight)
    return requests, state.refs, state.keys, state.free, state.lru, flight


def count(scope: Scope) -> int:
    start = model.initial(scope)
    frontier, seen = [start], {project(start)}
    while frontier:
        following = []
        for state in frontier:
            for _, successor in model.actions(state, scope):
                name = project(successor)
                if name not in seen:
                    seen.add(name)
                    following.append(successor)
        frontier = following
    return len(seen)


if __name__ == "__main__":
    for scope in TWINS:
        print(f"{scope.name:8} {count(scope):9,} distinct states")
