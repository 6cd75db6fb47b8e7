"""Predicates on state slots (S43 to S52), by the numbers of spec/README.md. True: it holds."""

from __future__ import annotations

from collections.abc import Callable

from .move import Move
from .pool import ceil_div
from .state import NO_SLOT, Row, Scope, State, names, read_prefix


def all_tokens(state: State, r: int) -> tuple[int, ...]:
    """Settled tokens, then the first sample of each row in flight (not known to the scheduler)."""
    pending = (
        token
        for step in state.flight
        for row in step
        if row.request == r and not row.stale
        for token in row.samples[:1]
    )
    return state.requests[r].tokens + tuple(pending)


def holders(state: State) -> list[int]:
    """For each slot, the number of requests whose state table contains it."""
    held = [0] * len(state.slots.refs)
    for request in state.requests:
        for slot in set(request.states) - {NO_SLOT}:
            held[slot] += 1
    return held


def s43(state: State, _: Scope) -> bool:
    """A slot is owned, cached or free, and its count is correct; the index inverts the keys."""
    slots = state.slots
    held = holders(state)
    cached = {s for s, n in enumerate(held) if n == 0 and slots.keys[s] is not None}
    unused = {s for s, n in enumerate(held) if n == 0 and slots.keys[s] is None}
    inverse = sorted((key, slot) for slot, key in enumerate(slots.keys) if key is not None)
    return (
        held == list(slots.refs)
        and sorted(slots.lru) == sorted(cached)
        and sorted(slots.free) == sorted(unused)
        and inverse == list(slots.index)
    )


def s44(state: State, scope: Scope) -> bool:
    """One entry per interval begun; it has a slot unless settled positions are past it."""
    return all(
        len(request.states) == ceil_div(request.dispatched, scope.interval)
        and all(
            (slot == NO_SLOT) == ((i + 1) * scope.interval < request.computed)
            for i, slot in enumerate(request.states)
            if not request.reason
        )
        for request in state.requests
        if request.states or not request.reason
    )


def s45(state: State, scope: Scope) -> bool:
    """The slots of a running request hold the state of its own tokens: up to the end of the entry's
    interval, or as far as it is dispatched. So every state that a row reads is its own."""
    for r in state.running:
        request = state.requests[r]
        if not request.states:
            continue
        own = names(request, all_tokens(state, r))
        for i, slot in enumerate(request.states):
            if slot == NO_SLOT or slot in request.states[i + 1 :]:
                continue  # released, or updated in place
            end = min((i + 1) * scope.interval, request.dispatched)
            if end > len(own) or state.slots.contents[slot] != own[end - 1]:
                return False
    return True


def s46(state: State, scope: Scope) -> bool:
    """A key equals the prefix of its checkpoint, at the end of an interval, and no step in flight
    writes the slot."""
    written = {slot for step in state.flight for row in step for slot in writes(row, scope)}
    return all(
        key is None
        or (
            state.slots.contents[slot] == key
            and num_tokens(key) % scope.interval == 0
            and slot not in written
        )
        for slot, key in enumerate(state.slots.keys)
    )


def num_tokens(prefix: int) -> int:
    return len(read_prefix(prefix)[1])


def writes(row: Row, scope: Scope) -> list[int]:
    """The slots that a row in flight writes."""
    first, last = row.start // scope.interval, (row.start + row.n - 1) // scope.interval
    return list(row.states[first : last + 1])


def s47(state: State, scope: Scope) -> bool:
    """Every slot that a step in flight reads or writes is still in its request's table."""
    for step in state.flight:
        for row in step:
            first = max(0, row.start - 1) // scope.interval
            last = (row.start + row.n - 1) // scope.interval
            if row.states[first : last + 1] != state.requests[row.request].states[first : last + 1]:
                return False
    return True


def s50(state: State, _: Scope) -> bool:
    if state.flight or any(not request.reason for request in state.requests):
        return True
    slots = state.slots
    return not any(slots.refs) and len(slots.free) + len(slots.lru) == len(slots.refs)


def s51(state: State, _: Scope) -> bool:
    """The runner's state tables equal those of the running requests, except released entries."""
    known = dict(state.state_view)
    return known.keys() == {*state.running, *state.left} and all(
        len(known[r]) == len(state.requests[r].states)
        and all(
            slot in (sent, NO_SLOT)
            for sent, slot in zip(known[r], state.requests[r].states, strict=True)
        )
        for r in state.running
    )


# --------------------------------------------------------------------------- on a Schedule
def s48(m: Move) -> bool:
    """A slot that a step writes has one owner and no key, so no other row reads or writes it."""
    held, seen = holders(m.after), set()
    for row in m.after.flight[-1]:
        slots = set(writes(row, m.scope))
        if NO_SLOT in slots or slots & seen:
            return False
        if any(held[slot] != 1 or m.after.slots.keys[slot] is not None for slot in slots):
            return False
        seen |= slots
    return True


def s49(m: Move) -> bool:
    """An admission starts after its longest checkpoint up to which its blocks are cached, and at no
    other token. (A plan publishes nothing, so the cache is the same before and after.)"""
    index, cached = dict(m.after.slots.index), dict(m.after.index)
    for row in m.plan.rows:
        if row.request not in m.hits:
            continue
        request = m.before.requests[row.request]
        own, expected = names(request), 0
        if request.reads_cache:
            for end in range(m.scope.block_size, len(own), m.scope.block_size):
                if own[end - 1] not in cached:
                    break
                if end % m.scope.interval == 0 and own[end - 1] in index:
                    expected = end
        if row.start != expected:
            return False
    return True


def s52(m: Move) -> bool:
    """Free slots are taken first, then the oldest cached checkpoints, whose keys are removed."""
    before, after, taken = m.before.slots, m.after.slots, set()
    for row in m.plan.rows:
        old, new = m.before.requests[row.request], m.after.requests[row.request]
        begin = len(old.states) or len(m.hits.get(row.request, ())) * m.scope.block_size // (
            m.scope.interval
        )
        taken.update(new.states[begin:])
        if old.states:
            taken.discard(old.states[-1])
    if any(after.keys[slot] is not None for slot in taken):
        return False
    evicted = [i for i, slot in enumerate(before.lru) if slot in taken]
    if not evicted:
        return True
    kept = [i for i, slot in enumerate(before.lru) if slot in after.lru]
    unused = set(before.free).intersection(after.free)
    return not unused and (not kept or max(evicted) < min(kept))


def _if_any_state(holds: Callable[[State, Scope], bool]) -> Callable[[State, Scope], bool]:
    """True if there are no state slots."""
    return lambda state, scope: not scope.num_states or holds(state, scope)


def _if_any(holds: Callable[[Move], bool]) -> Callable[[Move], bool]:
    return lambda m: not m.scope.num_states or holds(m)


OF_STATES = {
    name: _if_any_state(holds)
    for name, holds in {
        "S43": s43,
        "S44": s44,
        "S45": s45,
        "S46": s46,
        "S47": s47,
        "S50": s50,
        "S51": s51,
    }.items()
}
ON_SCHEDULE = {
    name: _if_any(holds)
    for name, holds in {
        "S48": s48,
        "S49": s49,
        "S51": lambda m: s51(m.after, m.scope),  # not part of a state's name, like S32
        "S52": s52,
    }.items()
}
