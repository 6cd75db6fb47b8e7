"""The name of a state up to symmetry: two states of one name behave alike.

- Block ids are interchangeable: they are renamed in the order in which request tables, the LRU and
  the free stack mention them. The order of the free stack then disappears, since free blocks are
  alike.
- The runner's tables of running requests are these requests' tables (S32, checked at every plan),
  and those of requests that left are never read again: that they left is all there is to tell. The
  same goes for its histories (S39).
- Of a group of siblings it matters who of them are left; whose siblings they are does not.
- A finished request with nothing in flight is forgotten. Under first come first served only the
  order of the others matters, not their numbers.
"""

from __future__ import annotations

import hashlib
import marshal

from .state import Scope, State


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


def canonical(state: State, scope: Scope) -> tuple[object, ...]:
    names = block_names(state)
    busy = {row.request for step in state.flight for row in step}
    number: dict[int, int] = {}
    groups: dict[int, int] = {}
    requests: list[object] = []
    for r, q in enumerate(state.requests):
        ranked = q.rank if scope.overtaking else None
        if q.reason and not q.table and r not in busy:
            if ranked:
                requests.append(ranked)
            continue
        number[r] = len(number)
        table = [names[block] for block in q.table]
        queues = (state.running, state.waiting, state.paused, state.left, state.pending)
        place = tuple(r in queue for queue in queues)
        group = groups.setdefault(r if q.leader < 0 else q.leader, number[r])
        requests.append((q[:4], q[5:9], q[10:14], group, ranked, table, place))
    flight = [
        [(number[w.request], w.start, w.n, w.token, w.stale) for w in step] for step in state.flight
    ]
    queues = [[names[block] for block in queue] for queue in (state.lru, state.free[::-1])]
    blocks = [(state.refs[b], state.keys[b], state.contents[b]) for b in names]
    index = [names[block] for _, block in state.index]
    return len(state.requests), requests, flight, queues, blocks, index


def digest(state: State, scope: Scope) -> bytes:
    """128 bits of the name. Over 10^7 states a collision has a chance below 10^-24."""
    return hashlib.blake2b(marshal.dumps(canonical(state, scope), 2), digest_size=16).digest()
