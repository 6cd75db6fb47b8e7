"""The canonical form of a state: two states with the same form behave alike (symmetry reduction).

- Block ids are interchangeable, and so are state slots: they are renamed in the order in which
  request tables, the LRU and the free stack mention them. The order of the free stack is dropped,
  since free blocks are alike.
- The runner's tables of running requests equal these requests' tables (S32, checked for every
  plan). Tables of requests that left are never read again, so only the fact that they left is kept.
  The same holds for its histories (S39).
- For a group of siblings, only the remaining ones matter, not their former leader.
- Under "fair", only the distances of accounts and ranks from the clock matter. Properties about the
  past (S54, L5) are checked only along the first path to a state.
- Finished requests with nothing in flight are dropped. Under first come, first served only the
  order of the others matters, not their numbers.
"""

from __future__ import annotations

import hashlib
import marshal

from .state import NEVER, NO_SLOT, Request, Scope, Segment, State


def block_names(state: State) -> dict[int, int]:
    """New ids, in the order of first mention. Blocks that a defect has lost come last."""
    names: dict[int, int] = {}
    for request in state.requests:
        for block in request.table:
            if block not in names:
                names[block] = len(names)
    for block in (*state.lru, *state.free[::-1], *range(len(state.refs))):
        if block not in names:
            names[block] = len(names)
    return names


def slot_names(state: State) -> dict[int, int]:
    """Like ``block_names``, for state slots."""
    names: dict[int, int] = {NO_SLOT: NO_SLOT}
    slots = state.slots
    for table in (*[request.states for request in state.requests], slots.lru, slots.free[::-1]):
        for slot in table:
            names.setdefault(slot, len(names) - 1)
    for slot in range(len(slots.refs)):
        names.setdefault(slot, len(names) - 1)
    return names


def canonical(state: State, scope: Scope) -> tuple[object, ...]:
    names = block_names(state)
    busy = {row.request for step in state.flight for row in step}
    number: dict[int, int] = {}
    groups: dict[int, int] = {}
    requests: list[object] = []
    for r, q in enumerate(state.requests):
        ranked = q.rank if scope.overtaking else None
        if scope.policy == "fair":
            ranked = None
        if q.reason and not q.table and not q.states and r not in busy:
            if ranked:
                requests.append(ranked)
            continue
        number[r] = len(number)
        table = [names[block] for block in q.table]
        queues = (state.running, state.waiting, state.paused, state.left, state.pending)
        place = tuple(r in queue for queue in queues)
        group = groups.setdefault(r if q.leader < 0 else q.leader, number[r])
        if scope.policy == "fair":
            ranked = rank_from_clock(state, q), q.owner, q.charge, r in state.queued
        requests.append((q[:4], q[5:9], q[10:14], group, ranked, table, place))
        if q.segments != (Segment(q.num_prompt),):
            requests.append([tuple(segment) for segment in q.segments])
    flight = [
        [(number[w.request], w.start, w.n, w.samples, w.stale, w.drafts, w.wanted) for w in step]
        for step in state.flight
    ]
    queues = [[names[block] for block in queue] for queue in (state.lru, state.free[::-1])]
    blocks = [(state.refs[b], state.keys[b], state.contents[b]) for b in names]
    index = [names[block] for _, block in state.index]
    name: tuple[object, ...] = len(state.requests), requests, flight, queues, blocks, index
    if scope.policy == "fair":
        name = (*name, canonical_shares(state, scope))
    return (*name, canonical_slots(state)) if scope.num_states else name


def rank_from_clock(state: State, request: Request) -> int | None:
    return None if request.rank[0] == NEVER else request.rank[0] - state.clock


def canonical_shares(state: State, scope: Scope) -> list[tuple[int, int, int]]:
    """The accounts that can still affect a decision: beyond the earliest start, or of an owner with
    a live request."""
    live = {request.owner for request in state.requests if not request.reason}
    shares = [(owner, a - state.clock, s - state.clock) for owner, (a, s) in state.shares]
    return [share for share in shares if share[0] in live or max(share[1:]) > -scope.credit]


def canonical_slots(state: State) -> tuple[object, ...]:
    names, slots = slot_names(state), state.slots
    tables = [[names[slot] for slot in request.states] for request in state.requests]
    queues = [[names[slot] for slot in queue] for queue in (slots.lru, slots.free[::-1])]
    held = [(slots.refs[s], slots.keys[s], slots.contents[s]) for s in names if s != NO_SLOT]
    return [table for table in tables if table], queues, held, [names[s] for _, s in slots.index]


def digest(state: State, scope: Scope) -> bytes:
    """128 bits of the form. For 10^7 states the probability of a collision is below 10^-24."""
    return hashlib.blake2b(marshal.dumps(canonical(state, scope), 2), digest_size=16).digest()
