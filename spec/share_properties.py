"""Predicates on fair shares (``shares``): S53 to S55 and the bound on overtaking, L5."""

from __future__ import annotations

from .move import Move
from .shares import expected_cost
from .state import NEVER, Fail, Request, Scope, State


def has_turn(request: Request) -> bool:
    return request.rank[0] != NEVER


def num_yields(request: Request, scope: Scope) -> int:
    """Ticks between the earliest possible start of the turn and its actual start: the charge to its
    owner in advance."""
    return request.rank[0] - (request.turn - scope.credit)


def passing(state: State, r: int) -> list[int]:
    """Requests that got their turns after r and precede it. A failure sets the clock back, so
    requests that it ended are excluded."""
    request = state.requests[r]
    return [
        p
        for p, other in enumerate(state.requests)
        if other.turn > request.turn and other.rank < request.rank and other.reason != "error"
    ]


def s53(state: State, scope: Scope) -> bool:
    """Every owner with queued requests has a waiting one. Other policies queue no request."""
    if scope.policy != "fair":
        return not state.queued
    waiting = {state.requests[r].owner for r in state.waiting}
    return all(state.requests[r].owner in waiting for r in state.queued)


def s54(state: State, scope: Scope) -> bool:
    """The requests of another owner that pass a request are charged at most the amount by which the
    request's own owner was ahead of it, plus one request. Excess charges are refunded."""
    if scope.policy != "fair":
        return True
    requests = state.requests
    for r, request in enumerate(requests):
        if request.reason or not has_turn(request):
            continue
        costs: dict[int, dict[int, int]] = {}
        for p in passing(state, r):
            other = requests[p]
            groups = costs.setdefault(other.owner, {})
            leader = p if other.leader < 0 else other.leader
            groups[leader] = groups.get(leader, 0) + expected_cost(other, scope)
        for owner, groups in costs.items():
            given_back = sum(
                max(0, expected_cost(other, scope) - other.charge)
                for other in requests
                if other.owner == owner and other.reason and has_turn(other)
            )
            bound = num_yields(request, scope) + max(groups.values()) + given_back
            if owner != request.owner and sum(groups.values()) > bound:
                return False
    return True


def s55(m: Move) -> bool:
    """Within an owner, turns are given in the order of arrival, each with a later start than the
    one before; assigned ranks do not change. The clock never goes back, except by a failure."""
    before, after = m.before.requests, m.after.requests
    if type(m.label) is not Fail and m.after.clock < m.before.clock:
        return False
    latest: dict[int, int] = {}
    for request in before:
        if has_turn(request) and not request.reason:
            latest[request.owner] = max(latest.get(request.owner, 0), request.rank[0])
    new_turns = []
    for r, new in enumerate(after):
        old = before[r] if r < len(before) else None
        if old is not None and has_turn(old):
            if new.rank != old.rank:
                return False
        elif has_turn(new):
            if m.scope.policy == "fair" and new.rank[0] < latest.get(new.owner, 0):
                return False
            if new.leader < 0:
                new_turns.append(r)
    return all(after[r].owner != after[q].owner or r < q for r in new_turns for q in m.after.queued)


def l5(state: State, scope: Scope) -> bool:
    """The number of later turns that precede a request is at most the ticks by which it yields."""
    return all(
        len({state.requests[p].turn for p in passing(state, r)}) <= num_yields(request, scope)
        for r, request in enumerate(state.requests)
        if not request.reason and has_turn(request)
    )
