"""Predicates on one action: (state before, label, plan or None, state after). True: it holds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from . import model, progress, segment_properties, share_properties, slot_properties
from .move import Move
from .properties import owners, s32, s39
from .slot_properties import all_tokens
from .state import (
    EMPTY,
    STOP,
    Abort,
    Add,
    Fail,
    Pause,
    ResetCache,
    Resume,
    Schedule,
    Settle,
    names,
)

HIDDEN = 6  # a token that no request ever has


# --------------------------------------------------------------------------- pool
def s5(m: Move) -> bool:
    taken, lru = m.taken(), m.before.lru
    if any(m.after.keys[block] is not None for block in taken):
        return False
    evicted = [i for i, block in enumerate(lru) if block in taken]
    if not evicted:
        return True
    kept = [i for i, block in enumerate(lru) if block in m.after.lru]
    unused = set(m.before.free).intersection(m.after.free)
    return not unused and (not kept or max(evicted) < min(kept))


def s9(m: Move) -> bool:
    own = owners(m.after)
    return all(own[block] == 1 and m.after.keys[block] is None for block, _ in m.written())


def s11(m: Move) -> bool:
    return all(
        len(hits) <= (len(m.before.requests[r].tokens) - 1) // m.scope.block_size
        for r, hits in m.plan.admitted
    )


def s12(m: Move) -> bool:
    for r, hits in m.plan.admitted:
        if r in m.forked:
            continue  # S33
        request = m.after.requests[r]
        own = names(request)
        if request.table[: len(hits)] != hits or any(
            m.after.keys[block] != own[(i + 1) * m.scope.block_size - 1]
            for i, block in enumerate(hits)
        ):
            return False
    return True


def s13(m: Move) -> bool:
    """Only tables that changed account for changes; refused requests are unchanged."""
    touched: set[int] = set()
    for old, new in zip(m.before.requests, m.after.requests, strict=True):
        if old.table != new.table:
            touched.update(old.table, new.table)
    a, b = m.before, m.after
    return all(
        a.refs[i] == b.refs[i]
        and a.keys[i] == b.keys[i]
        and (i in a.lru) == (i in b.lru)
        and (i in a.free) == (i in b.free)
        for i in range(len(a.refs))
        if i not in touched
    ) and all(a.requests[r] == b.requests[r] for r in a.waiting if r in b.waiting)


# --------------------------------------------------------------------------- step
def s15(m: Move) -> bool:
    return len(set(m.written())) == len(m.written())


def s16(m: Move) -> bool:
    size = m.scope.block_size
    for row in m.plan.rows:
        request = m.after.requests[row.request]
        ids = all_tokens(m.after, row.request)
        ids = ids[: row.start + row.n] + row.drafts if row.drafts else ids
        own, end = names(request, ids), row.end
        if end > len(own) or end > len(request.table) * size:
            return False
        if any(m.after.contents[request.table[p // size]][p % size] != own[p] for p in range(end)):
            return False
    return True


def s17(m: Move) -> bool:
    for row in m.plan.rows:
        done = m.before.requests[row.request].dispatched
        if row.request in m.hits:
            done = len(m.hits[row.request]) * m.scope.block_size
        if row.request in m.forked:
            done = m.before.requests[row.request].num_prompt - 1
        after = m.after.requests[row.request]
        if row.start != done or after.dispatched != row.start + row.n:
            return False
        if row.start + row.n > m.before.requests[row.request].total:
            return False
    return True


def s18(m: Move) -> bool:
    rows = m.plan.rows
    return (
        all(row.n >= 1 for row in rows)
        and sum(row.end - row.start for row in rows) <= m.plan.budget <= m.scope.budget
        and model.is_enough(m.plan.budget, m.before)
        and len({row.request for row in rows}) == len(rows) <= m.scope.cap
    )


def s19(m: Move) -> bool:
    return all(
        row.num_samples == (1 + len(row.drafts) if is_last else 0)
        for row in m.plan.rows
        for is_last in [row.start + row.n == m.before.requests[row.request].total]
    )


def s20(m: Move) -> bool:
    batch = {row.request for row in m.plan.rows}
    for r in m.plan.preempted:
        old, new = m.before.requests[r], m.after.requests[r]
        if (
            new.table
            or new.states
            or new.computed
            or new.dispatched
            or r in batch
            or r not in m.after.waiting
        ):
            return False
        if (old.tokens, old.rank, old.limit, old.salt) != (
            new.tokens,
            new.rank,
            new.limit,
            new.salt,
        ):
            return False
    return True


def s21(m: Move) -> bool:
    gone: set[int] = set()
    for preemptor in dict.fromkeys(m.plan.preempted_for):
        victims = [
            v for v, a in zip(m.plan.preempted, m.plan.preempted_for, strict=True) if a == preemptor
        ]
        gone.update(victims)
        kept = {
            block
            for r, request in enumerate(m.before.requests)
            if r not in gone
            for block in request.table
        }
        kept.update(m.hits.get(preemptor, ()))
        if any(
            kept.issuperset(m.before.requests[v].table) and v not in m.plan.displaced
            for v in victims
        ):
            return False
    return all(takes_a_place(m, v) for v in m.plan.displaced)


def takes_a_place(m: Move, victim: int) -> bool:
    """Whether the request that ``victim`` was preempted for has another owner, was admitted, and
    would have had no place without the preemption."""
    preemptor = m.plan.preempted_for[m.plan.preempted.index(victim)]
    others = {*m.before.running, *m.hits} - {preemptor}
    return (
        m.scope.policy == "fair"
        and preemptor in m.hits
        and len(others) >= m.scope.cap
        and m.before.requests[victim].owner != m.before.requests[preemptor].owner
    )


def s22(m: Move) -> bool:
    """Only the rows' own slots and the destinations of copies are written (emptied slots are
    cleared by the pool)."""
    rows = set(m.written())
    rows |= {(block, slot) for _, block in m.plan.copies for slot in range(m.scope.block_size)}
    return all(
        new in (old, EMPTY) or (block, slot) in rows
        for block, (olds, news) in enumerate(zip(m.before.contents, m.after.contents, strict=True))
        for slot, (old, new) in enumerate(zip(olds, news, strict=True))
    )


def s31(m: Move) -> bool:
    """The plan does not depend on tokens that steps in flight will sample."""
    if is_other_sample(m) or not any(row.samples for step in m.before.flight for row in step):
        return True
    masked = tuple(
        tuple(row._replace(samples=(HIDDEN,) * len(row.samples)) for row in step)
        for step in m.before.flight
    )
    masked_state = m.before._replace(flight=masked)
    return model.plan(masked_state, m.scope, *m.label[1:])[0] == m.plan


def s33(m: Move) -> bool:
    """A fork shares blocks that are full, settled and of its own prefix. It copies the partly
    filled block from a block that its owner keeps to its own block. No copy reads a block that
    another copy writes."""
    size, own = m.scope.block_size, owners(m.after)
    unsettled = m.in_flight()
    copies = []
    for r, source in m.plan.forked:
        if source not in m.after.running:
            return False
        new, table = m.after.requests[r], m.after.requests[source].table
        shared = names(new)[: new.num_prompt - 1]
        slots = [(table[p // size], p % size) for p in range(len(shared))]
        if unsettled.intersection(slots):
            return False
        if any(m.before.contents[b][s] != name for (b, s), name in zip(slots, shared, strict=True)):
            return False
        whole = len(shared) // size
        if new.table[:whole] != table[:whole]:
            return False
        if len(shared) % size:
            copies.append((table[whole], new.table[whole]))
            if own[new.table[whole]] != 1 or m.after.keys[new.table[whole]] is not None:
                return False
    written = [block for _, block in copies]
    return (
        tuple(copies) == m.plan.copies
        and len(set(written)) == len(written)
        and not {block for block, _ in copies}.intersection(written)
    )


def s38(m: Move) -> bool:
    """A request that does not read the cache computes every position, at every admission."""
    starts = {row.request: row.start for row in m.plan.rows}
    return not any(
        hits or starts.get(r) for r, hits in m.plan.admitted if not m.before.requests[r].reads_cache
    )


def s42(m: Move) -> bool:
    """A settled-only request, or one with drafts in flight, computes only tokens that are settled
    when it is planned."""
    drafting = progress.drafting_in(m.before)
    return all(
        row.start + row.n <= len(m.before.requests[row.request].tokens)
        for row in m.plan.rows
        if m.before.requests[row.request].settled_only or row.request in drafting
    )


# --------------------------------------------------------------------------- life cycle
def s24(m: Move) -> bool:
    return all(
        old.reason == new.reason and old.tokens == new.tokens
        for old, new in zip(m.before.requests, m.after.requests, strict=False)
        if old is not new and old.reason
    )


def s25(m: Move) -> bool:
    for old, new in zip_longest(m.before.requests, m.after.requests):
        if old is new:
            continue
        if old is not None and new.tokens[: len(old.tokens)] != old.tokens:
            return False
        outputs = new.tokens[new.num_prompt :]
        if STOP in outputs[:-1] or len(new.tokens) > new.limit:
            return False
        full = len(new.tokens) == new.limit
        expected = "stop" if outputs[-1:] == (STOP,) else "length" if full else ""
        reasons = ("abort", "error") if type(m.label) is Fail else ("abort",)
        if new.reason not in (*reasons, expected):
            return False
    return True


def s26(m: Move) -> bool:
    """No other request ends with it, not even a sibling."""
    if m.before.requests[m.label.request].reason:
        return m.after == m.before
    return m.after.requests[m.label.request].reason == "abort" and all(
        new.reason == old.reason
        for r, (old, new) in enumerate(zip(m.before.requests, m.after.requests, strict=True))
        if r != m.label.request
    )


def s27(m: Move) -> bool:
    if type(m.label) is Resume:
        old, new = m.before.requests[m.label.request], m.after.requests[m.label.request]
        if m.scope.policy == "fair" and not share_properties.has_turn(old):
            return m.label.request in (*m.after.waiting, *m.after.queued)
        return old == new and m.label.request in m.after.waiting
    return not any(row.request in m.before.paused for row in m.plan.rows)


def s29(m: Move) -> bool:
    """A row that is not stale appends a prefix of its samples; S58 and L10 define which one."""
    for row in m.before.flight[0]:
        old, new = m.before.requests[row.request], m.after.requests[row.request]
        taken = () if row.stale else row.samples[: len(new.tokens) - len(old.tokens)]
        if new.tokens != old.tokens + taken or (row.stale and new.published != old.published):
            return False
    return True


def s56(m: Move) -> bool:
    """Drafts take nothing that any request needs. The plan without them has the same rows, victims,
    admissions, refusals and copies, and they take no block while a request is short of blocks. Only
    rows that sample after settled tokens have drafts, and no sample exceeds the maximum length."""
    if not (m.label.offer or m.label.wishes) or is_other_sample(m):
        return True
    plain, planned = model.plan(m.before, m.scope, m.label.budget)
    if plain.closed_by is not None or plain.preempted:
        tables = [
            (m.after.requests[row.request], planned.requests[row.request]) for row in plain.rows
        ]
        if any(request.table != alone.table for request, alone in tables):
            return False
    own = tuple(
        row._replace(drafts=(), num_samples=row.num_samples - len(row.drafts), wanted=0)
        for row in m.plan.rows
    )
    drafted = m.plan._replace(rows=own, added=plain.added, tables=plain.tables)
    return drafted == plain and all(
        row.start + row.n == len(request.tokens) and row.end < request.limit
        for row, request in ((row, m.before.requests[row.request]) for row in m.plan.rows)
        if row.drafts
    )


def is_other_sample(m: Move) -> bool:
    """Whether this plan was examined for another choice of its samples."""
    return any(token != m.scope.outputs[0] for token in m.label.tokens)


def s63(m: Move) -> bool:
    """A step with drafts has at most ``max_samples`` samples. Where that or the budget cuts drafts,
    no row has more than one draft token more than a row that was cut, and none if it is younger.
    Rows are compared only if blocks are left, so that none was cut for a block."""
    drafting = [row for row in m.plan.rows if row.drafts]
    num_samples = sum(row.num_samples for row in m.plan.rows)
    if drafting and m.scope.max_samples and num_samples > m.scope.max_samples:
        return False
    if m.plan.closed_by is not None or m.plan.preempted or not (m.after.free or m.after.lru):
        return True
    offered = dict(m.label.offer)
    for i, row in enumerate(m.plan.rows):
        limit = m.before.requests[row.request].limit - 1 - row.start - row.n
        most = min(len(offered.get(row.request, ())), m.scope.max_drafts, limit)
        follows = row.start + row.n == len(m.before.requests[row.request].tokens)
        if row.num_samples and follows and len(row.drafts) < most and not m.scope.num_states:
            longest = [len(other.drafts) - (j < i) for j, other in enumerate(m.plan.rows)]
            if max(longest) > len(row.drafts):
                return False
    return True


def s64(m: Move) -> bool:
    """The positions that drafting writes have slots: behind the row's own positions, in blocks of
    its request alone, which are not published. The next row can carry all that is drafted, if no
    sample of this row ends the request."""
    size = m.scope.block_size
    for row in m.plan.rows:
        request = m.after.requests[row.request]
        if not row.wanted:
            continue
        if not row.num_samples or row.last_end > request.limit - 2:
            return False
        for p in range(row.start + row.n, row.last_end):
            if p >= len(request.table) * size:
                return False
            block = request.table[p // size]
            if m.after.refs[block] != 1 or m.after.keys[block] is not None:
                return False
    return True


def s58(m: Move) -> bool:
    """The output does not depend on drafts: a sample is appended only if every earlier draft in its
    row equals the token that was sampled there. So up to that sample, the row computed the
    request's own tokens, like steps without drafts. An accepted draft counts as computed, unless
    there are recurrent states: only the row's own positions have one."""
    for row in m.before.flight[0]:
        old, new = m.before.requests[row.request], m.after.requests[row.request]
        taken = new.tokens[len(old.tokens) :]
        if row.drafts[: max(0, len(taken) - 1)] != taken[:-1]:
            return False
        count = max(0, len(taken) - 1)
        if row.request in m.before.running and row.request in m.after.running:
            changes = (
                new.computed - old.computed - row.n,
                new.dispatched - old.dispatched,
                new.total - old.total,
            )
            num_kept = 0 if m.scope.num_states else count
            if changes != (num_kept, num_kept, count):
                return False
    return True


def s37(m: Move) -> bool:
    """Every live request ends with an error, and requests do not change otherwise. All other state
    is the initial state, so the next call is served like the first one."""
    for old, new in zip(m.before.requests, m.after.requests, strict=True):
        if (
            new.reason != (old.reason or "error")
            or new.tokens != old.tokens
            or new.table + new.states
        ):
            return False
    return m.after._replace(requests=()) == model.initial(m.scope)


def s41(m: Move) -> bool:
    """Running requests wait at their ranks with nothing computed, others do not change, no step is
    in flight, and the pool is in its initial state. The next plan releases the running requests."""
    before, start = m.before, model.initial(m.scope)
    ranks = [request.rank for request in before.requests]
    for r, (old, new) in enumerate(zip(before.requests, m.after.requests, strict=True)):
        if r in before.running:
            old = old._replace(table=(), states=(), computed=0, dispatched=0, published=0)
            old = old._replace(total=len(old.tokens))
        if new != old:
            return False
    return m.after == start._replace(
        requests=m.after.requests,
        waiting=tuple(sorted((*before.waiting, *before.running), key=lambda r: ranks[r])),
        paused=before.paused,
        pending=before.pending,
        queued=before.queued,
        clock=before.clock,
        shares=before.shares,
        left=tuple(sorted((*before.left, *before.running))),
        view=before.view,
        histories=before.histories,
        state_view=before.state_view,
    )


Property = Callable[[Move], bool]
ANY = (Add, Schedule, Settle, Abort, Pause, Resume, ResetCache, Fail)

# By the type of action that could violate them.
ON_SCHEDULE: dict[str, Property] = {
    "S5": s5,
    "S9": s9,
    "S11": s11,
    "S12": s12,
    "S13": s13,
    "S15": s15,
    "S16": s16,
    "S17": s17,
    "S18": s18,
    "S19": s19,
    "S20": s20,
    "S21": s21,
    "S22": s22,
    "S31": s31,
    "S32": lambda m: s32(m.after, m.scope),  # not part of a state's name, so checked per action
    "S33": s33,
    "S38": s38,
    "S39": lambda m: s39(m.after, m.scope),
    "S42": s42,
    "S56": s56,
    "S61": segment_properties.s61,
    "S63": s63,
    "S64": s64,
    "L3": progress.l3,
    "L5": progress.l5,
    "L6": progress.l6,
    "L9": progress.l9,
    **slot_properties.ON_SCHEDULE,
}
TRANSITION_PROPERTIES: dict[str, tuple[tuple[type, ...], Property]] = {
    **{name: ((Schedule,), holds) for name, holds in ON_SCHEDULE.items()},
    "S24": (ANY, s24),
    "S25": (ANY, s25),
    "S26": ((Abort,), s26),
    "S27": ((Schedule, Resume), s27),
    "S29": ((Settle,), s29),
    "S37": ((Fail,), s37),
    "S41": ((ResetCache,), s41),
    "S55": (ANY, share_properties.s55),
    "S58": ((Settle,), s58),
    "S62": (ANY, segment_properties.s62),
    "L4": ((Schedule, Settle), progress.l4),
    "L10": ((Settle,), progress.l10),
    "L11": ((Settle,), progress.l11),
}
