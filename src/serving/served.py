"""The live requests of one prompt, shared by the engine's thread and an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..engine.inputs import PromptInput
from ..engine.record import End
from ..engine.request import Request
from ..engine.sampling_params import SamplingParams
from ..errors import EngineError

logger = logging.getLogger("pagespec")
_NUM_PER_TURN = 16


class Observer(Protocol):
    """Receives the events of requests on their event loop, but ``on_step`` on the thread that
    stepped, while it holds the engine's lock."""

    def on_arrival(self, served: Served) -> None: ...

    def on_tokens(self, served: Served, num_tokens: int, elapsed_s: float | None) -> None:
        """``num_tokens`` tokens of one request were settled, ``elapsed_s`` seconds after that
        request's previous ones; None for its first tokens."""

    def on_end(self, served: Served, request: Request, end: End) -> None: ...

    def on_step(self, num_tokens: int) -> None:
        """A step was settled. ``num_tokens``: prompt tokens that it computed, plus generated
        tokens."""


class Observers(list[Observer]):
    """The observers of an ``AsyncLLM``. Objects of the engine's thread refer to them weakly: they
    may refer to the ``AsyncLLM``, which must be collectable while the thread runs."""

    __slots__ = ("__weakref__",)


def notify(report: Callable[..., None], *facts: object) -> None:
    """Call an observer's method and log its exceptions: answers do not depend on observers."""
    try:
        report(*facts)
    except Exception:
        logger.exception("an observer of requests failed")


@dataclass(eq=False, slots=True)
class Served:
    """The continuations of one prompt, the leader first.

    Threads that step the engine update ``ends`` and each request's tokens; the event loop owns the
    rest. ``arrived_at`` is a time of ``time.perf_counter``.
    """

    request_id: str
    prompt: PromptInput
    params: SamplingParams
    requests: list[Request]
    arrived_at: float = field(default_factory=time.perf_counter)
    ends: dict[Request, End] = field(default_factory=dict)
    handle: object | None = None  # a weak reference, kept alive while it may fire
    news: asyncio.Event = field(default_factory=asyncio.Event)
    _num_seen: dict[Request, int] = field(default_factory=dict)
    _seen_at: dict[Request, float] = field(default_factory=dict)
    _reported_ends: set[Request] = field(default_factory=set)

    @property
    def has_ended(self) -> bool:
        return len(self.ends) == len(self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Settled output tokens so far, of all continuations."""
        return sum(len(r.token_ids) - r.num_prompt_tokens for r in self.requests)

    def error(self) -> EngineError | None:
        """The error of the first failed continuation."""
        if not self.ends:  # the usual case
            return None
        ends = list(self.ends.values())  # another thread may be adding one
        return next((end.error for end in ends if end.error is not None), None)

    def poll(self, observers: Sequence[Observer]) -> bool:
        """Check for new tokens and ends, notify the observers, and wake the readers. Returns
        whether all requests have ended."""
        is_over, has_news = self.has_ended, False  # the ends are read before the tokens
        now = time.perf_counter()
        for request in self.requests:
            num_tokens = len(request.token_ids) - request.num_prompt_tokens
            num_new = num_tokens - self._num_seen.get(request, 0)
            if num_new:
                has_news = True
                before = self._seen_at.get(request)
                self._num_seen[request], self._seen_at[request] = num_tokens, now
                elapsed_s = None if before is None else now - before
                for observer in observers:
                    notify(observer.on_tokens, self, num_new, elapsed_s)
            end = self.ends.get(request)
            if end is not None and request not in self._reported_ends:
                has_news = True
                self._reported_ends.add(request)
                for observer in observers:
                    notify(observer.on_end, self, request, end)
        if has_news:
            self.news.set()
        return is_over


class LoopRequests:
    """The live prompts of one event loop, which is woken once for all of them.

    Each turn of the event loop handles only a few prompts, so that turns are short. A new request
    needs some ten turns from its connection to its first chunk. If every stream wrote a chunk in
    each turn, the request would wait ten times for all streams.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, observers: Callable[[], Observers | None]
    ) -> None:
        self.loop = loop
        self._observers = observers
        self._served: dict[Served, None] = {}
        self._unpolled: list[Served] = []
        self._is_posted = self._is_polling = False

    def add(self, served: Served) -> None:
        """Add a submitted prompt. Called on the loop."""
        self._served[served] = None
        for observer in self._observers() or ():
            notify(observer.on_arrival, served)

    def discard(self, served: Served) -> None:
        """Remove a refused prompt. Called on the loop."""
        self._served.pop(served, None)

    def post(self, *, is_sure: bool = False) -> None:
        """Schedule a pass on the loop, from any thread; a late loop has one pass for many steps.

        Args:
            is_sure: schedule it even if a pass is scheduled: an interrupt may have lost that one.
        """
        if is_sure or not self._is_posted:
            self._is_posted = True
            with contextlib.suppress(RuntimeError):  # it was closed
                self.loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        """Start a pass over all requests, after the current pass if there is one."""
        if not self._is_polling:
            self._is_polling = True
            self._poll_some()

    def _poll_some(self) -> None:
        if not self._unpolled:
            self._is_posted = False  # first: later news schedules another pass
            self._unpolled = list(self._served)
        for _ in range(min(_NUM_PER_TURN, len(self._unpolled))):
            served = self._unpolled.pop()  # the youngest first: they wait for their first tokens
            if served in self._served and served.poll(self._observers() or ()):
                del self._served[served]
        if self._unpolled or self._is_posted:
            self.loop.call_soon(self._poll_some)
        else:
            self._is_polling = False


class Loops:
    """The event loops of an ``AsyncLLM``'s callers."""

    def __init__(self, observers: Callable[[], Observers | None]) -> None:
        self._observers = observers
        self._loops: dict[asyncio.AbstractEventLoop, LoopRequests] = {}
        self._lock = threading.Lock()

    def requests_of(self, loop: asyncio.AbstractEventLoop) -> LoopRequests:
        """The live prompts of ``loop``."""
        with self._lock:
            if loop not in self._loops:
                open_ones = {k: v for k, v in self._loops.items() if not k.is_closed()}
                self._loops = {**open_ones, loop: LoopRequests(loop, self._observers)}
            return self._loops[loop]

    def post(self, *, is_sure: bool = False) -> None:
        """See ``LoopRequests.post``."""
        for requests in list(self._loops.values()):
            requests.post(is_sure=is_sure)
