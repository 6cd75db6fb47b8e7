"""The engine's record of a request until it is forgotten: its caller, its times, its failure."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from .outputs import RequestMetrics
from .request import Request


class Lease(weakref.ref[object]):
    """A weak reference to the caller who waits for ``request``. Its callback should be C code
    (``deque.append``): called from wherever the caller goes, it can then not be interrupted."""

    __slots__ = ("request",)
    request: Request


@dataclass(slots=True)
class Record:
    """Times are of ``time.perf_counter``."""

    arrival: float
    lease: Lease | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    failure: str = ""
    failed_alone: bool = False

    def metrics(self, request: Request) -> RequestMetrics:
        """Of the request whose record this is, as far as it got."""
        metrics = RequestMetrics(
            num_cached_tokens=request.num_cached_tokens, num_preemptions=request.num_preemptions
        )
        if self.first_scheduled is not None:
            metrics.queue_time_s = self.first_scheduled - self.arrival
        if self.finished is not None:
            metrics.total_time_s = self.finished - self.arrival
        if self.first_token is not None:
            metrics.time_to_first_token_s = self.first_token - self.arrival
            num_later_tokens = len(request.token_ids) - request.num_prompt_tokens - 1
            if self.finished is not None and num_later_tokens > 0:
                elapsed = self.finished - self.first_token
                metrics.tokens_per_second = num_later_tokens / elapsed if elapsed > 0 else None
        return metrics
