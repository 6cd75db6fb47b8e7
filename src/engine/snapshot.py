"""Counts of a scheduler's state, readable at any moment from any thread."""

from __future__ import annotations

from dataclasses import dataclass

from .request import RequestState
from .scheduler import Scheduler

OWNED, CACHED, FREE = 2, 1, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Attributes:
    num_waiting: waiting requests. ``num_deferred`` of them are siblings whose leader computes the
        prompt; the others wait for capacity.
    num_blocks: number of KV blocks: ``num_owned_blocks`` are in some request's table,
        ``num_cached_blocks`` are in the prefix cache only, the others are free.
    num_steps, num_preemptions, num_queried_tokens, num_hit_tokens: since the start; the last two
        count tokens of prefix-cache look-ups.
    """

    num_running: int
    num_waiting: int
    num_deferred: int
    num_paused: int
    num_blocks: int
    num_owned_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_preemptions: int
    num_queried_tokens: int
    num_hit_tokens: int

    @property
    def kv_cache_usage(self) -> float:
        """The share of KV blocks that are in some request's table, from 0 to 1."""
        return self.num_owned_blocks / max(1, self.num_blocks)


_WAITING = (RequestState.WAITING, RequestState.PENDING, RequestState.QUEUED)


def take_snapshot(scheduler: Scheduler) -> EngineSnapshot:
    """Read the counts one after another, without stopping the engine."""
    blocks, queues = scheduler.blocks, scheduler.queues
    states = [request.state for request in list(scheduler.requests.values())]
    num_cached, num_free = len(blocks.lru), len(blocks.free)
    return EngineSnapshot(
        num_running=states.count(RequestState.RUNNING),
        num_waiting=sum(states.count(state) for state in _WAITING),
        num_deferred=states.count(RequestState.PENDING),
        num_paused=states.count(RequestState.PAUSED),
        num_blocks=blocks.num_blocks,
        num_owned_blocks=max(0, blocks.num_blocks - num_cached - num_free),
        num_cached_blocks=num_cached,
        num_steps=scheduler.num_steps,
        num_preemptions=queues.num_preemptions,
        num_queried_tokens=queues.num_queried_tokens,
        num_hit_tokens=queues.num_hit_tokens,
    )


def block_map(scheduler: Scheduler, every: int = 1) -> bytes:
    """One byte per sampled KV block (one in ``every``): ``OWNED``, ``CACHED`` or ``FREE``."""
    blocks = scheduler.blocks
    return bytes(
        OWNED if count else FREE if key is None else CACHED
        for count, key in zip(blocks.ref_counts[::every], blocks.keys[::every], strict=True)
    )
