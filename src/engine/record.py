"""Per-request records until they are dropped: callers, times, failures."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..errors import EngineError, RequestError
from .outputs import RequestMetrics
from .request import Request

_T = TypeVar("_T")


class Lease(weakref.ref[Any], Generic[_T]):
    """A weak reference to the caller, or the handle, of ``item``. Its callback is C code
    (``deque.append``), so it cannot be interrupted when the referent is freed."""

    __slots__ = ("item",)
    item: _T

    @classmethod
    def of(cls, referent: object, item: _T, gone: deque[Lease[_T]]) -> Lease[_T]:
        """``gone``: the lease is appended to it when the referent is freed."""
        lease = cls(referent, gone.append)
        lease.item = item
        return lease


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended; ``error`` is set for reason "error"."""

    metrics: RequestMetrics
    error: EngineError | None = None


class Owner(Protocol):
    """Waits for requests without stepping the engine; see ``Engine.add``.

    Its methods are called by the thread whose operation ended or advanced the requests, before that
    operation returns and while it holds the engine's lock. They must return at once, raise nothing,
    and call no operation of the engine.
    """

    def on_ends(self, ends: Mapping[Request, End]) -> None:
        """These requests have ended, for any reason. Called once per request; after an interrupt
        possibly again, with the same end."""

    def on_step(self, num_tokens: int) -> None:
        """A step was settled, maybe without this owner's requests. ``num_tokens``: prompt tokens
        that it computed, plus generated tokens."""


@dataclass(slots=True)
class Record:
    """Times of one request, from ``time.perf_counter``."""

    arrival: float
    lease: Lease[Request] | None = None
    owner: Owner | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    failure: str = ""
    failed_alone: bool = False

    def metrics(self, request: Request) -> RequestMetrics:
        """Metrics of ``request``, to which this record belongs, up to its present state."""
        metrics = RequestMetrics(
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            num_draft_tokens=request.num_drafted,
            num_accepted_tokens=request.num_accepted,
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

    def end(self, request: Request) -> End:
        """The end of ``request``, to which this record belongs."""
        return End(self.metrics(request), error_of(request, self))


def error_of(request: Request, record: Record | None) -> EngineError | None:
    """The error of a request that ended with reason "error"; None if it did not. ``record``: its
    record, or None if that was dropped."""
    if request.finish_reason != "error":
        return None
    failure = (record and record.failure) or "an operation of the engine was interrupted"
    kind = RequestError if record is not None and record.failed_alone else EngineError
    return kind(f"request {request.request_id} was ended: {failure}")


class Records:
    """The records of all requests that were not dropped yet. They influence no decision.

    An interrupt may come between any two lines (S37), so a record is added in one statement.

    Attributes:
        gone: leases whose callers were freed, and whose requests are still to be dropped. Only C
            code appends to it, from any thread, at any moment.
        owned: the live requests of each owner.
    """

    def __init__(self) -> None:
        self.gone: deque[Lease[Request]] = deque()
        self.owned: dict[Owner, set[Request]] = {}
        self._records: dict[Request, Record] = {}
        self._awaiting_first_token: set[Request] = set()

    def __len__(self) -> int:
        return len(self._records)

    def find(self, request: Request) -> Record | None:
        """The record of a request; None if it was dropped."""
        return self._records.get(request)

    def metrics(self, request: Request) -> RequestMetrics:
        """Metrics of a request whose record was not dropped yet."""
        return self._records[request].metrics(request)

    def leases(
        self, requests: Sequence[Request], caller: object | None
    ) -> list[Lease[Request] | None]:
        """One lease per request; None without a caller."""
        if caller is None:
            return [None] * len(requests)
        return [Lease.of(caller, request, self.gone) for request in requests]

    def add(
        self,
        requests: Sequence[Request],
        leases: Sequence[Lease[Request] | None],
        owner: Owner | None = None,
    ) -> None:
        """Add records of requests that have just arrived."""
        if owner is not None:  # first: a recovery then drops each record that has an owner
            self.owned.setdefault(owner, set()).update(requests)
        now = time.perf_counter()
        for request, lease in zip(requests, leases, strict=True):
            # One statement: a record without its lease could otherwise stay forever.
            self._records[request] = Record(now, lease, owner)

    def forget(self, request: Request) -> None:
        """Drop the record of a request; a no-op if it is already dropped."""
        self._records.pop(request, None)
        self._awaiting_first_token.discard(request)

    def deliver(self, ended: Iterable[Request]) -> None:
        """Deliver the ends of those requests that have an owner, then drop their records."""
        by_owner: dict[Owner, dict[Request, End]] = {}
        for request in ended:
            record = self._records.get(request)
            if record is not None and record.owner is not None:
                by_owner.setdefault(record.owner, {})[request] = record.end(request)
        for owner, ends in by_owner.items():
            owner.on_ends(ends)
            # After the delivery, in this order: after an earlier interrupt they are sent again.
            for request in ends:
                self.forget(request)
            waiting = self.owned[owner]
            waiting.difference_update(ends)
            if not waiting:
                del self.owned[owner]

    def deliver_all(self) -> None:
        """Deliver the end of every request with an owner, all of which have ended."""
        self.deliver([request for waiting in self.owned.values() for request in waiting])
        self.owned.clear()

    def note_scheduled(self, requests: Iterable[Request]) -> None:
        """Record that requests are in a step, some of them for the first time."""
        now = time.perf_counter()
        for request in requests:
            record = self._records[request]
            if record.first_scheduled is None:
                record.first_scheduled = now
                self._awaiting_first_token.add(request)

    def note_settled(self, finished: Iterable[Request]) -> int:
        """Record that a step was settled, and that these requests finished. Returns the number of
        requests whose first token the step settled."""
        now = time.perf_counter()
        num_first = 0
        if self._awaiting_first_token:
            for request in [
                r for r in self._awaiting_first_token if len(r.token_ids) > r.num_prompt_tokens
            ]:
                self._records[request].first_token = now
                num_first += 1
                self._awaiting_first_token.discard(request)
        for request in finished:
            self._records[request].finished = now
        return num_first

    def note_aborted(self, request: Request) -> None:
        """Record that the caller aborted the request."""
        self._records[request].finished = time.perf_counter()

    def note_failed(self, request: Request, failure: str) -> None:
        """Record that this request alone failed."""
        record = self._records[request]
        record.failure, record.failed_alone = failure, True

    def note_all_failed(self, requests: Iterable[Request], failure: str) -> None:
        """Record that all these requests failed, with no step in flight. May be repeated."""
        for request in requests:
            record = self._records.get(request)
            if record is not None:
                record.failure = record.failure or failure
        self._awaiting_first_token.clear()
