"""The block pool as a theory for Z3: functions over unbounded sorts, invariants, actions.

``own(b)`` is the ghost count of table entries that are b: every action on a table updates it, and
the code's ``ref`` must equal it (S1). ``in_free`` and ``in_lru`` are multiplicities, so that "twice
in the list" can be expressed (S2). A key stands for a chained prefix; ``content`` is the prefix
that the block's slots really hold, ``settled`` whether settled steps wrote all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import z3

BlockSort, KeySort = z3.DeclareSort("Block"), z3.DeclareSort("Key")
Fn = Callable[[z3.ExprRef], z3.ExprRef]


@dataclass(frozen=True)
class PoolFns:
    own: Fn
    ref: Fn
    in_free: Fn
    in_lru: Fn
    age: Fn  # position in the LRU: smaller is older
    has_key: Fn
    key: Fn
    indexed: Fn  # by key
    index: Fn  # key to block
    content: Fn
    settled: Fn


def any_pool() -> PoolFns:
    def fn(name: str, domain: z3.SortRef, target: z3.SortRef) -> Fn:
        return z3.Function(name, domain, target)

    integer, boolean = z3.IntSort(), z3.BoolSort()
    return PoolFns(
        *(fn(name, BlockSort, integer) for name in ("own", "ref", "in_free", "in_lru", "age")),
        fn("has_key", BlockSort, boolean),
        fn("key", BlockSort, KeySort),
        fn("indexed", KeySort, boolean),
        fn("index", KeySort, BlockSort),
        fn("content", BlockSort, KeySort),
        fn("settled", BlockSort, boolean),
    )


def put(f: Fn, at: z3.ExprRef, value: object) -> Fn:
    """f, but with ``value`` at one point."""
    return lambda x: z3.If(x == at, value, f(x))


def put_if(condition: z3.BoolRef, f: Fn, at: z3.ExprRef, value: object) -> Fn:
    return lambda x: z3.If(z3.And(condition, x == at), value, f(x))


# --------------------------------------------------------------------------- invariants
# Each is a statement about an arbitrary block b and an arbitrary key k.
Invariant = Callable[[PoolFns, z3.ExprRef, z3.ExprRef], z3.BoolRef]

INVARIANTS: dict[str, Invariant] = {
    "S1 ref counts owners": lambda p, b, _: p.ref(b) == p.own(b),
    "S2 one place, once": lambda p, b, _: (
        p.in_free(b) + p.in_lru(b) + z3.If(p.own(b) > 0, 1, 0) == 1
    ),
    "S2 no negative place": lambda p, b, _: z3.And(p.in_free(b) >= 0, p.in_lru(b) >= 0),
    "S3 no negative count": lambda p, b, _: p.ref(b) >= 0,
    "S4 lru: unowned, keyed": lambda p, b, _: (
        (p.in_lru(b) == 1) == z3.And(p.ref(b) == 0, p.has_key(b))
    ),
    "S4 free: unowned, keyless": lambda p, b, _: (
        (p.in_free(b) == 1) == z3.And(p.ref(b) == 0, z3.Not(p.has_key(b)))
    ),
    "S6 key tells the content": lambda p, b, _: z3.Implies(p.has_key(b), p.content(b) == p.key(b)),
    "S7 published is settled": lambda p, b, _: z3.Implies(p.has_key(b), p.settled(b)),
    "S8 key is indexed": lambda p, b, _: z3.Implies(
        p.has_key(b), z3.And(p.indexed(p.key(b)), p.index(p.key(b)) == b)
    ),
    "S8 index is a key": lambda p, _, k: z3.Implies(
        p.indexed(k), z3.And(p.has_key(p.index(k)), p.key(p.index(k)) == k)
    ),
}


# --------------------------------------------------------------------------- actions
@dataclass(frozen=True)
class Step:
    allowed: z3.BoolRef
    after: PoolFns
    # properties of the action itself (S5, S9, S12), beyond the invariants
    promises: tuple[tuple[str, z3.BoolRef], ...] = ()


class Terms(NamedTuple):
    """The terms of an action: a block, a key, and any other block."""

    block: z3.ExprRef
    key: z3.ExprRef
    other: z3.ExprRef


Action = Callable[[PoolFns, Terms], Step]


def take_free(p: PoolFns, at: Terms) -> Step:
    """Pop the free stack into a table."""
    b = at.block
    after = replace(
        p,
        in_free=put(p.in_free, b, p.in_free(b) - 1),
        own=put(p.own, b, p.own(b) + 1),
        ref=put(p.ref, b, p.ref(b) + 1),
        settled=put(p.settled, b, False),
    )
    return Step(p.in_free(b) > 0, after, writable(after, b))


def writable(after: PoolFns, b: z3.ExprRef) -> tuple[tuple[str, z3.BoolRef], ...]:
    return (
        ("S5 taken without key", z3.Not(after.has_key(b))),
        ("S9 taken by one", after.own(b) == 1),
    )


def take_cached(p: PoolFns, at: Terms) -> Step:
    """Evict the LRU head into a table, when no block is free. The action also removes its key."""
    b, other = at.block, at.other
    after = replace(
        p,
        in_lru=put(p.in_lru, b, p.in_lru(b) - 1),
        own=put(p.own, b, p.own(b) + 1),
        ref=put(p.ref, b, p.ref(b) + 1),
        has_key=put(p.has_key, b, False),
        indexed=put(p.indexed, p.key(b), False),
        settled=put(p.settled, b, False),
    )
    oldest = z3.Implies(p.in_lru(other) > 0, p.age(b) <= p.age(other))
    allowed = z3.And(p.in_lru(b) > 0, p.in_free(other) == 0, oldest)
    in_use = z3.Implies(
        p.own(other) > 0, z3.And(other != b, after.has_key(other) == p.has_key(other))
    )
    return Step(allowed, after, (*writable(after, b), ("S12 spares blocks in use", in_use)))


def acquire(p: PoolFns, at: Terms) -> Step:
    """A prefix hit: the index's block for k is added to one more table."""
    k = at.key
    b = p.index(k)
    after = replace(
        p,
        in_lru=put_if(p.ref(b) == 0, p.in_lru, b, p.in_lru(b) - 1),
        own=put(p.own, b, p.own(b) + 1),
        ref=put(p.ref, b, p.ref(b) + 1),
    )
    hit = z3.And(after.content(b) == k, after.settled(b), after.own(b) > 0)
    return Step(p.indexed(k), after, (("S6 S7 S12 the hit has the requested prefix", hit),))


def drop(p: PoolFns, at: Terms) -> Step:
    """One table releases b. The last owner retires it: to the LRU with a key, else to free."""
    b = at.block
    last = p.ref(b) == 1
    after = replace(
        p,
        own=put(p.own, b, p.own(b) - 1),
        ref=put(p.ref, b, p.ref(b) - 1),
        in_lru=put_if(z3.And(last, p.has_key(b)), p.in_lru, b, p.in_lru(b) + 1),
        in_free=put_if(z3.And(last, z3.Not(p.has_key(b))), p.in_free, b, p.in_free(b) + 1),
    )
    return Step(p.own(b) > 0, after, (("S3 was held", p.ref(b) > 0),))


def write(p: PoolFns, at: Terms) -> Step:
    """A dispatched step writes slots of b: any content, unsettled."""
    b, k = at.block, at.key
    after = replace(p, content=put(p.content, b, k), settled=put(p.settled, b, False))
    return Step(z3.And(p.own(b) == 1, z3.Not(p.has_key(b))), after)


def settle(p: PoolFns, at: Terms) -> Step:
    """The step that filled b settles."""
    b = at.block
    return Step(p.own(b) > 0, replace(p, settled=put(p.settled, b, True)))


def publish(p: PoolFns, at: Terms) -> Step:
    """A full, settled, keyless block gets the key of its content, unless another block has it."""
    b, k = at.block, at.key
    wins = z3.Not(p.indexed(k))
    after = replace(
        p,
        has_key=put_if(wins, p.has_key, b, True),
        key=put_if(wins, p.key, b, k),
        indexed=put_if(wins, p.indexed, k, True),
        index=put_if(wins, p.index, k, b),
    )
    ready = z3.And(p.own(b) > 0, p.settled(b), p.content(b) == k, z3.Not(p.has_key(b)))
    return Step(ready, after)


ACTIONS: dict[str, Action] = {
    "take a free block": take_free,
    "take the oldest cached block": take_cached,
    "acquire a hit": acquire,
    "drop a reference": drop,
    "write": write,
    "settle": settle,
    "publish": publish,
}


# --------------------------------------------------------------------------- broken actions
def take_cached_keeping_the_index(p: PoolFns, at: Terms) -> Step:
    step = take_cached(p, at)
    return replace(step, after=replace(step.after, indexed=p.indexed))


def acquire_leaving_it_in_the_lru(p: PoolFns, at: Terms) -> Step:
    step = acquire(p, at)
    return replace(step, after=replace(step.after, in_lru=p.in_lru))


def publish_before_settle(p: PoolFns, at: Terms) -> Step:
    b, k = at.block, at.key
    step = publish(p, at)
    ready = z3.And(p.own(b) > 0, p.content(b) == k, z3.Not(p.has_key(b)))
    return replace(step, allowed=ready)


def publish_over_another(p: PoolFns, at: Terms) -> Step:
    b, k = at.block, at.key
    after = replace(
        p,
        has_key=put(p.has_key, b, True),
        key=put(p.key, b, k),
        indexed=put(p.indexed, k, True),
        index=put(p.index, k, b),
    )
    return replace(publish(p, at), after=after)


BROKEN: dict[str, Action] = {
    "eviction keeps the index entry": take_cached_keeping_the_index,
    "a hit stays in the LRU": acquire_leaving_it_in_the_lru,
    "publish before settle": publish_before_settle,
    "publish over another block": publish_over_another,
}
