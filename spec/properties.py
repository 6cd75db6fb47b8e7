"""Predicates on one state, by the numbers of spec/README.md. True: the property holds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from . import segment_properties, share_properties
from .pool import ceil_div
from .slot_properties import OF_STATES, all_tokens
from .state import EMPTY, Request, Scope, State, names, without_last


def owners(state: State) -> list[int]:
    """own(b): how many table entries are b."""
    own = [0] * len(state.refs)
    for request in state.requests:
        for block in request.table:
            own[block] += 1
    return own


# --------------------------------------------------------------------------- pool
def s1(state: State, _: Scope) -> bool:
    return owners(state) == list(state.refs)


def s2(state: State, _: Scope) -> bool:
    owned = {block for request in state.requests for block in request.table}
    everything = sorted([*state.free, *state.lru, *owned])
    return everything == list(range(len(state.refs)))


def s3(state: State, _: Scope) -> bool:
    return min(state.refs) >= 0


def s4(state: State, _: Scope) -> bool:
    cached = {b for b, ref in enumerate(state.refs) if ref == 0 and state.keys[b] is not None}
    plain = {b for b, ref in enumerate(state.refs) if ref == 0 and state.keys[b] is None}
    return set(state.lru) == cached and set(state.free) == plain


def s6(state: State, scope: Scope) -> bool:
    for block, key in enumerate(state.keys):
        if key is not None:
            for slot in reversed(range(scope.block_size)):
                if state.contents[block][slot] != key:
                    return False
                key = without_last(key)
    return True


def s7(state: State, scope: Scope) -> bool:
    published = {block for block, key in enumerate(state.keys) if key is not None}
    if any(EMPTY in state.contents[block] for block in published):
        return False
    for step in state.flight:
        for row in step:
            first, last = row.start // scope.block_size, (row.last_end - 1) // scope.block_size
            if published.intersection(row.blocks[first : last + 1]):
                return False
    return True


def s8(state: State, _: Scope) -> bool:
    inverse = sorted((key, block) for block, key in enumerate(state.keys) if key is not None)
    return inverse == list(state.index)


def s10(state: State, scope: Scope) -> bool:
    """Rejected drafts, and drafting behind a row, may leave blocks that the request's next tokens
    fill."""
    size = scope.block_size
    return all(
        ceil_div(request.dispatched, size)
        <= len(request.table)
        <= ceil_div(request.dispatched + max_behind(request, scope), size)
        for request in state.requests
        if request.table or not request.reason
    )


def max_drafts(request: Request, scope: Scope) -> int:
    """Maximum number of draft tokens in a row of the request since its admission."""
    return scope.max_drafts if request.table else 0


def max_behind(request: Request, scope: Scope) -> int:
    """Maximum number of positions behind the dispatched ones that have blocks."""
    return max_drafts(request, scope) + (scope.max_wanted if request.table else 0)


def s14(state: State, _: Scope) -> bool:
    if state.flight or any(not request.reason for request in state.requests):
        return True
    return not any(state.refs) and len(state.free) + len(state.lru) == len(state.refs)


# --------------------------------------------------------------------------- step, life cycle
def s18(state: State, scope: Scope) -> bool:
    """For the running set; the part about plans is in transitions.py."""
    return len(state.running) <= scope.cap and all(
        len(request.tokens) <= request.limit <= scope.max_model_len
        and request.computed <= request.dispatched <= request.total
        for request in state.requests
    )


def s23(state: State, _: Scope) -> bool:
    finished = [r for r, request in enumerate(state.requests) if request.reason]
    live = (*state.waiting, *state.running, *state.paused, *state.pending, *state.queued)
    everywhere = sorted([*live, *finished])
    return everywhere == list(range(len(state.requests)))


def s27(state: State, _: Scope) -> bool:
    """Queues are in rank order; the part about paused requests is in transitions.py."""
    return all(
        state.requests[a].rank < state.requests[b].rank
        for queue in (state.waiting, state.running)
        for a, b in pairwise(queue)
    )


def s28(state: State, _: Scope) -> bool:
    return all(
        row.blocks == state.requests[row.request].table[: len(row.blocks)]
        for step in state.flight
        for row in step
    )


def s30(state: State, scope: Scope) -> bool:
    return all(
        ceil_div(request.limit - 1, scope.block_size) <= scope.num_blocks
        and request.num_prompt < request.limit
        for request in state.requests
    )


def s32(state: State, _: Scope) -> bool:
    """The runner's tables equal those of the running requests. The only others it keeps are those
    that the next plan will release."""
    known = dict(state.view)
    return known.keys() == {*state.running, *state.left} and all(
        known[r] == state.requests[r].table for r in state.running
    )


def s33(state: State, scope: Scope) -> bool:
    """A block that its owner has not filled has no other owner; the part about forks is in
    transitions.py."""
    return all(
        state.refs[block] == 1
        for request in state.requests
        for block in request.table[request.dispatched // scope.block_size :]
    )


def s38(state: State, scope: Scope) -> bool:
    """A running request has offered its full, settled blocks, whether or not it reads the cache.
    The part about not reading the cache is in transitions.py."""
    return not scope.caching or all(
        request.published == request.computed // scope.block_size
        for request in (state.requests[r] for r in state.running)
    )


def s39(state: State, scope: Scope) -> bool:
    """The runner has all dispatched tokens of the running requests that need their history. The
    only others it keeps are those that the next plan will release. They may be followed by the
    drafts of one row, until the next row overwrites them."""
    sent, here = dict(state.histories), {*state.running, *state.left}
    return sent.keys() == {r for r in here if state.requests[r].needs_history} and all(
        sent[r][:done] == all_tokens(state, r)[:done]
        and 0 <= len(sent[r]) - done <= max_drafts(state.requests[r], scope)
        for r, done in ((r, state.requests[r].dispatched) for r in state.running)
        if r in sent
    )


def s57(state: State, scope: Scope) -> bool:
    """The settled KV of a running request was computed for its own tokens, and not for rejected
    drafts."""
    if not scope.max_drafts:
        return True  # S16 and S17 check this for every row
    size = scope.block_size
    return all(
        state.contents[request.table[p // size]][p % size] == name
        for request in (state.requests[r] for r in state.running)
        for p, name in enumerate(names(request)[: request.computed])
    )


def s40(state: State, _: Scope) -> bool:
    """A pending request waits only for its leader, which is not finished."""
    return all(
        leader in (*state.waiting, *state.running, *state.queued)
        and state.requests[leader].computed < state.requests[leader].num_prompt
        for leader in (state.requests[r].leader for r in state.pending)
    )


# --------------------------------------------------------------------------- liveness, by state
def l5(state: State, scope: Scope) -> bool:
    """Requests are served in rank order, and a request overtakes at most K others."""
    if scope.policy == "fair":
        return share_properties.l5(state, scope)
    ranks = [request.rank for request in state.requests]
    return all(
        sum(later < rank for later in ranks[number + 1 :]) <= scope.overtaking
        and not any(later < rank for later in ranks[number + scope.overtaking + 1 :])
        for number, rank in enumerate(ranks)
    )


def l7(state: State, scope: Scope) -> bool:
    """Blocks of a finished request are kept only by steps in flight, at most depth + 1."""
    busy = {row.request for step in state.flight for row in step}
    return len(state.flight) <= scope.depth + 1 and all(
        r in busy for r, request in enumerate(state.requests) if request.reason and request.table
    )


STATE_PROPERTIES: dict[str, Callable[[State, Scope], bool]] = {
    "S1": s1,
    "S2": s2,
    "S3": s3,
    "S4": s4,
    "S6": s6,
    "S7": s7,
    "S8": s8,
    "S10": s10,
    "S14": s14,
    "S18": s18,
    "S23": s23,
    "S27": s27,
    "S28": s28,
    "S30": s30,
    "S32": s32,
    "S33": s33,
    "S38": s38,
    "S39": s39,
    "S40": s40,
    "S53": share_properties.s53,
    "S54": share_properties.s54,
    "S57": s57,
    "S59": segment_properties.s59,
    "S60": segment_properties.s60,
    "L5": l5,
    "L7": l7,
    **OF_STATES,
}
