"""Liveness, as predicates on one action: served requests, yielding requests, ranking function."""

from __future__ import annotations

from .move import Move
from .pool import ceil_div
from .state import Request, State


def l3(m: Move) -> bool:
    ranks = [request.rank for request in m.before.requests]
    return all(
        ranks[preemptor] < ranks[victim]
        for victim, preemptor in zip(m.plan.preempted, m.plan.preempted_for, strict=True)
    )


def measure(state: State) -> list[tuple[int, int, int]]:
    """The ranking function, oldest request first: whether it must drain before it restarts; tokens
    not yet dispatched; tokens in flight. Every engine action decreases it lexicographically. A
    preemption undoes the victim's work, but the older request that caused it dispatches a token."""
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
    """Admission follows rank order: a waiting request that is passed over is younger."""
    ranks = [request.rank for request in m.after.requests]  # a turn may begin in this very walk
    passed = [r for r in m.before.waiting if r in m.after.waiting]
    return all(ranks[r] < ranks[w] for r, _ in m.plan.admitted for w in passed)


def l6(m: Move) -> bool:
    """A running decode has a row, or yields to an older request. Decodes that are settled-only or
    have drafts in flight: L9."""
    drafting = drafting_in(m.before)
    return all(
        is_served_or_yields(m, r)
        for r in decodes(m)
        if not (m.before.requests[r].settled_only or r in drafting)
    )


def drafting_in(state: State) -> set[int]:
    """Requests with drafts in flight."""
    return {row.request for step in state.flight for row in step if row.drafts}


def l9(m: Move) -> bool:
    """A decode that is settled-only or has drafts in flight has a row, or yields to an older
    request, or one of the steps in flight (at most ``depth``) samples the token that it has to
    compute."""
    drafting = drafting_in(m.before)
    sampling = {row.request for step in m.before.flight for row in step if row.samples}
    return len(m.before.flight) <= m.scope.depth and all(
        r in sampling or is_served_or_yields(m, r)
        for r in decodes(m)
        if m.before.requests[r].settled_only or r in drafting
    )


def l10(m: Move) -> bool:
    """Each row that samples adds a token to its request, whatever its drafts are, and one more for
    each accepted draft, unless the request ends earlier."""
    for row in m.before.flight[0]:
        old, new = m.before.requests[row.request], m.after.requests[row.request]
        taken = new.tokens[len(old.tokens) :]
        if not row.samples or row.stale:
            continue
        if not taken:
            return False
        has_more = len(taken) <= len(row.drafts) and not new.reason
        if has_more and row.drafts[len(taken) - 1] == taken[-1]:
            return False
    return True


def l11(m: Move) -> bool:
    """The settle of a row with drafts leaves its request, if it still runs, with nothing in flight
    and only settled tokens to compute: one or, with recurrent states, the accepted drafts and one.
    So a request waits for at most one settle, that of its own row."""
    for row in m.before.flight[0]:
        request = m.after.requests[row.request]
        if row.drafts and not row.stale and row.request in m.after.running:
            is_settled = request.total == len(request.tokens)
            num_left = request.total - request.dispatched
            num_again = len(row.drafts) if m.scope.num_states else 0
            if request.in_flight or not (is_settled and 1 <= num_left <= 1 + num_again):
                return False
    return True


def decodes(m: Move) -> list[int]:
    """Running requests with one token to compute, if any request has a row. With recurrent states
    they may also have to compute accepted drafts again."""
    requests = m.before.requests
    draft_again = m.scope.num_states and m.scope.max_drafts
    return [
        r
        for r in (m.before.running if m.plan.rows else ())
        for request in (requests[r],)
        for num_left in (request.total - request.dispatched,)
        if request.total != request.limit
        and (num_left == 1 or (num_left and draft_again and is_past_prompt(request)))
    ]


def is_past_prompt(request: Request) -> bool:
    return request.dispatched >= request.num_prompt


def is_served_or_yields(m: Move, r: int) -> bool:
    """Whether the request has a row, or is preempted or held for an older one, or may not allocate
    blocks because an older one is short of blocks."""
    if r in m.plan.preempted or any(row.request == r for row in m.plan.rows):
        return True
    request, closed_by = m.before.requests[r], m.plan.closed_by
    if closed_by is None or m.before.requests[closed_by].rank > request.rank:
        return False
    has_slot = len(request.table) >= ceil_div(request.dispatched + 1, m.scope.block_size)
    return r in m.plan.held or closed_by == r or not has_slot
