"""Counts of an engine's state, read at any moment from any thread."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.core import Engine
from ..engine.request import RequestState

OWNED, CACHED, FREE = 2, 1, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Attributes:
    num_waiting: requests that wait, siblings whose leader computes the prompt among them.
    num_blocks: KV blocks in all: ``num_owned_blocks`` are in some request's table,
        ``num_cached_blocks`` are in the prefix cache only, the others are free.
    num_steps, num_preemptions, num_queried_tokens, num_hit_tokens: since the start; the last two
        are of look-ups in the prefix cache.
    """

    num_running: int
    num_waiting: int
    num_paused: int
    num_blocks: int
    num_owned_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_preemptions: int
    num_queried_tokens: int
    num_hit_tokens: int


_WAITING = (RequestState.WAITING, RequestState.PENDING, RequestState.QUEUED)


def take_snapshot(engine: Engine) -> EngineSnapshot:
    """Reads the counts one after the other, while the engine may run."""
    scheduler = engine.scheduler
    blocks, queues = scheduler.blocks, scheduler.queues
    states = [request.state for request in list(scheduler.requests.values())]
    num_cached, num_free = len(blocks.lru), len(blocks.free)
    return EngineSnapshot(
        num_running=states.count(RequestState.RUNNING),
        num_waiting=sum(states.count(state) for state in _WAITING),
        num_paused=states.count(RequestState.PAUSED),
        num_blocks=blocks.num_blocks,
        num_owned_blocks=max(0, blocks.num_blocks - num_cached - num_free),
        num_cached_blocks=num_cached,
        num_steps=scheduler.num_steps,
        num_preemptions=queues.num_preemptions,
        num_queried_tokens=queues.num_queried_tokens,
        num_hit_tokens=queues.num_hit_tokens,
    )


def block_map(engine: Engine, every: int = 1) -> bytes:
    """A byte for each KV block, or for one in ``every``: ``OWNED``, ``CACHED`` or ``FREE``."""
    blocks = engine.scheduler.blocks
    return bytes(
        OWNED if count else FREE if key is None else CACHED
        for count, key in zip(blocks.ref_counts[::every], blocks.keys[::every], strict=True)
    )
