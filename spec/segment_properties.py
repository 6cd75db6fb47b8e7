"""Predicates on the segments of prompts (S59 to S62), by the numbers of spec/README.md.

They compare content position by position, not encoded prefixes or keys."""

from __future__ import annotations

from functools import cache

from .move import Move
from .state import Position, Request, Scope, Segments, State, names, read_prefix


def positions(request: Request, end: int) -> tuple[Position, ...]:
    """The content of the first ``end`` settled positions of a request."""
    places: list[tuple[int | None, int]] = []
    for length, content_hash in request.segments:
        is_content = content_hash is not None
        places += [(content_hash, i if is_content else 0) for i in range(length)]
    places += [(None, 0)] * (end - len(places))  # tokens that were sampled
    return tuple(
        (token, *place) for token, place in zip(request.tokens[:end], places, strict=False)
    )


def s59(state: State, _: Scope) -> bool:
    """Non-empty segments cover the prompt exactly."""
    return all(are_whole(request.segments, request.num_prompt) for request in state.requests)


@cache
def are_whole(segments: Segments, num_prompt: int) -> bool:
    lengths = [segment.length for segment in segments]
    return sum(lengths) == num_prompt and min(lengths) >= 1


def s60(state: State, scope: Scope) -> bool:
    """The owners of a block have the same content up to its end."""
    if max(state.refs, default=0) < 2:
        return True
    held: dict[int, tuple[int, tuple[Position, ...]]] = {}
    for request in state.requests:
        for i, block in enumerate(request.table):
            if state.refs[block] > 1:
                own = request.salt, positions(request, (i + 1) * scope.block_size)
                if held.setdefault(block, own) != own:
                    return False
    return True


def s61(m: Move) -> bool:
    """The hits of an admission are the longest chain of published blocks with exactly its own
    content, even if the chain ends inside a content segment. With state slots the chain is cut
    (S49). (A plan publishes nothing.)"""
    if not m.plan.admitted:
        return True
    size, state = m.scope.block_size, m.after
    held = {
        read_prefix(state.contents[block][-1]): block
        for block, key in enumerate(state.keys)
        if key is not None
    }
    for r, hits in m.plan.admitted:
        if r in m.forked:
            continue  # S33
        request, chain = m.before.requests[r], []
        if m.scope.caching and request.reads_cache:
            for end in range(size, len(request.tokens), size):
                block = held.get((request.salt, positions(request, end)))
                if block is None:
                    break
                chain.append(block)
        if hits != tuple(chain[: len(hits)] if m.scope.num_states else chain):
            return False
    return True


def s62(m: Move) -> bool:
    """The content of a request's positions, and so its keys, never change: not by a preemption, a
    pause, or a reset of the cache."""
    return all(
        old is new or has_same_names(old, new)
        for old, new in zip(m.before.requests, m.after.requests, strict=False)
    )


def has_same_names(old: Request, new: Request) -> bool:
    if old.tokens is new.tokens and old.segments is new.segments and old.salt == new.salt:
        return True
    return names(new)[: len(old.tokens)] == names(old)
