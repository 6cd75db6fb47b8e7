"""Liveness, as predicates on one action: who is served, who gives way, what becomes less."""

from __future__ import annotations

from .move import Move
from .pool import ceil_div
from .state import State


def l3(m: Move) -> bool:
    ranks = [request.rank for request in m.before.requests]
    return all(
        ranks[asker] < ranks[victim]
        for victim, asker in zip(m.plan.preempted, m.plan.askers, strict=True)
    )


def measure(state: State) -> list[tuple[int, int, int]]:
    """The ranking function, eldest first: must it still drain before it starts afresh; tokens not
    yet dispatched; tokens in flight. Every engine action makes it lexicographically smaller: a
    preemption gives the victim's work back, but its asker, an elder, dispatches at least one."""
    vector = []
    for r in sorted(range(len(state.requests)), key=lambda r: state.requests[r].rank):
        request = state.requests[r]
        if request.reason:
            vector.append((0, 0, request.in_flight))
        else:
            draining = request.in_flight > 0 and r not in state.running
            vector.append((int(draining), request.limit - request.dispatched, request.in_flight))
    return vector


def l4(m: Move) -> bool:
    return measure(m.after) < measure(m.before)


def l5(m: Move) -> bool:
    """Admission keeps to the order of ranks: whoever is passed over is younger."""
    ranks = [request.rank for request in m.before.requests]
    passed = [r for r in m.before.waiting if r in m.after.waiting]
    return all(ranks[r] < ranks[w] for r, _ in m.plan.admitted for w in passed)


def l6(m: Move) -> bool:
    """A running decode has a row, or is preempted or held for an elder, or has no slot left while
    an elder wants blocks."""
    batch = {row.request for row in m.plan.rows}
    closed_by = m.plan.closed_by
    for r in m.before.running if m.plan.rows else ():
        request = m.before.requests[r]
        if request.total - request.dispatched != 1 or request.total == request.limit:
            continue
        if r in batch or r in m.plan.preempted:
            continue
        if closed_by is None or m.before.requests[closed_by].rank > request.rank:
            return False
        needs_block = len(request.table) == ceil_div(request.dispatched + 1, m.scope.block_size)
        if r not in m.plan.held and closed_by != r and needs_block:
            return False
    return True
