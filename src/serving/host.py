"""The live requests of an ``AsyncLLM``: admission, ends, failures, dropped handles."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from ..engine.core import Engine
from ..engine.inputs import PromptInput
from ..engine.outputs import RequestMetrics
from ..engine.record import End, Lease
from ..engine.request import Request
from ..engine.request_factory import RequestFactory
from ..engine.sampling_params import SamplingParams
from ..errors import EngineBusyError, EngineError, InvalidInputError, RequestError
from .engine_thread import as_engine_error
from .generation import Generation
from .served import Loops, Observers, Served, notify

logger = logging.getLogger("pagespec")

_KEPT_SHARE = 8  # 1/8 of max_num_requests is reserved for owners with few requests


Handle = Lease[Served]
"""A weak reference to a caller's Generation."""


class RequestHost:
    """Holds the live requests of an ``AsyncLLM``, and is their owner in the engine.

    Its methods are called on the engine's thread, except :meth:`handle`. Whichever thread steps the
    engine calls the methods of ``Owner`` (``on_ends``, ``on_step``), one at a time. Any thread may
    read its attributes.

    Under the policy "fair" the last eighth of ``max_num_requests`` is reserved for owners with few
    requests, so that one owner cannot take all places. With one owner nothing is reserved.

    Args:
        max_num_requests: maximum number of live requests; None: no limit.
        loops: woken when callers have news.
        wake: wakes the engine's thread.

    Attributes:
        failure: why the engine cannot compute; None if it can.
        needs_self_test: a step failed, and no self-test has run since.
        has_several_owners: a second owner was seen, or is expected.
    """

    def __init__(
        self,
        engine: Engine,
        factory: RequestFactory,
        max_num_requests: int | None,
        observers: Callable[[], Observers | None],
        loops: Loops,
        wake: threading.Event,
    ) -> None:
        self._engine, self._factory = engine, factory
        self._max_num_requests, self._observers = max_num_requests, observers
        self._loops, self._wake = loops, wake
        self.failure: str | None = None
        self.needs_self_test = False
        self.has_several_owners = False
        self._first_owner: str | None = None
        self._has_failed_step = False  # since the last self-test began
        self._last_error: EngineError | None = None  # for requests aborted as the thread ends
        self._live: dict[Request, Served] = {}
        self._by_id: dict[str, Served] = {}
        # Only C code appends to it, wherever the last reference to a handle is dropped.
        self._abandoned: deque[Handle] = deque()

    @property
    def num_live(self) -> int:
        """Number of live requests; each continuation counts."""
        return len(self._live)

    def handle(self, generation: Generation, served: Served) -> Handle:
        """A weak reference that aborts the request when its caller drops ``generation``."""
        return Lease.of(generation, served, self._abandoned)

    def admit(self, made: Sequence[Served], handles: Sequence[Handle]) -> None:
        """Admit requests: all of them or, if one is refused, none.

        Raises:
            InvalidInputError, EngineBusyError, EngineError: as for ``AsyncLLM.submit``.
        """
        if self.failure is not None:
            self._check_itself()
            if self.failure is not None:
                raise EngineError(self.failure)
        names = [served.request_id for served in made]
        for name in names:
            if name in self._by_id or names.count(name) > 1:
                raise InvalidInputError("request_id", name, "is in use")
        # Before the capacity check: places are then reserved for an owner that is refused now.
        self._note_owners(made)
        self._check_room(made)
        try:
            for served, handle in zip(made, handles, strict=True):
                leader, *siblings = served.requests
                served.handle = handle
                # Before it is added: from then on, another thread may end it.
                self._by_id[served.request_id] = served
                self._live |= dict.fromkeys(served.requests, served)
                self._engine.add(leader, None, siblings, self)
        except BaseException:
            for served in made:
                self.abort(served)
                self._discard(served)
            raise

    def _note_owners(self, made: Sequence[Served]) -> None:
        for owner in (served.prompt.owner for served in made):
            self._first_owner = owner if self._first_owner is None else self._first_owner
            self.has_several_owners = self.has_several_owners or owner != self._first_owner

    def _check_room(self, made: Sequence[Served]) -> None:
        """In the last eighth, an owner may have at most as many requests as there are free places.

        Raises:
            EngineBusyError: they do not all fit.
        """
        new: Counter[str] = Counter()
        for served in made:
            new[served.prompt.owner] += len(served.requests)
        limit, num_new = self._max_num_requests, new.total()
        if limit is None:
            return
        live = list(self._live)
        if len(live) + num_new > limit:
            raise EngineBusyError(
                f"{len(live)} requests are live, {num_new} more were submitted, "
                f"max_num_requests = {limit}"
            )
        num_kept = max(1, limit // _KEPT_SHARE)
        is_fair = self._engine.scheduler.policy.is_fair and self.has_several_owners
        if not is_fair or len(live) + num_new <= limit - num_kept:
            return
        for owner, num_of_owner in new.items():
            num_live = sum(request.owner == owner for request in live)
            if num_live + num_of_owner > limit - len(live):
                raise EngineBusyError(
                    f"{num_live} requests of this client are live, {num_of_owner} more were "
                    f"submitted, and the last {num_kept} of max_num_requests = {limit} are "
                    "reserved for clients with fewer"
                )

    def abort_id(self, request_id: str) -> None:
        """Abort the request with this id, if it is live."""
        served = self._by_id.get(request_id)
        if served is not None:
            self.abort(served)

    def abort(self, served: Served) -> None:
        """End its live requests."""
        for request in served.requests:
            if request in self._live:
                self._engine.abort(request.request_id)

    def _discard(self, served: Served) -> None:
        """Drop live requests that the engine does not have."""
        for request in served.requests:
            self._live.pop(request, None)
        if self._by_id.get(served.request_id) is served:
            del self._by_id[served.request_id]

    def abort_all(self) -> None:
        for served in list(self._by_id.values()):
            self.abort(served)

    def end_all(self, reason: str) -> None:
        """End all live requests with an EngineError, because the engine's thread ends."""
        self._last_error = EngineError(reason)
        try:
            self.abort_all()
        finally:  # also if the engine cannot even abort
            left = list(self._live)
            self.on_ends(dict.fromkeys(left, End(RequestMetrics(), self._last_error)))

    def settle(self, operation: Callable[[], object]) -> None:
        """Run an operation that settles steps. It may fail like a step."""
        try:
            operation()
        except BaseException as error:
            self.on_failure(as_engine_error(error))
            raise

    # Called by the thread that steps the engine -----------------------------------------------

    def on_ends(self, ends: Mapping[Request, End]) -> None:
        """See ``Owner``."""
        for request, end in ends.items():
            served = self._live.get(request)
            if served is None:  # this end was delivered before
                continue
            error = end.error
            if error is not None and not isinstance(error, RequestError):
                self.needs_self_test = self._has_failed_step = True
            if request.finish_reason == "abort" and self._last_error is not None:
                end = End(end.metrics, self._last_error)
            served.ends.setdefault(request, end)
            if served.has_ended and self._by_id.get(served.request_id) is served:
                del self._by_id[served.request_id]
            self._live.pop(request, None)  # last: if interrupted before, the end is delivered again
        self._loops.post(is_sure=True)
        if self._has_failed_step:
            self._wake.set()

    def on_step(self, num_tokens: int) -> None:
        """See ``Owner``."""
        for observer in self._observers() or ():
            notify(observer.on_step, num_tokens)
        self._loops.post()

    # Called by the engine's thread ------------------------------------------------------------

    def after_step(self) -> None:
        """Called after each step, and after operations."""
        while self._abandoned:
            self.abort(self._abandoned.popleft().item)
        if self._has_failed_step:
            self._check_itself()

    def on_failure(self, error: EngineError) -> None:
        """Handle a failed step, which ended all live requests."""
        logger.error("a step failed: %s", error)
        self.needs_self_test = self._has_failed_step = True

    def _check_itself(self) -> None:
        """Compute one token to set ``failure``: a step may fail because of its requests, or because
        the device is broken."""
        self._has_failed_step = False
        params = SamplingParams(max_tokens=1, temperature=0.0)
        (request,) = self._factory.make(PromptInput(None, [0]), params)
        try:
            self._engine.add(request)
            while request.finish_reason is None:
                self._engine.step()
            failure = self._engine.error(request)
            if failure is not None:
                raise failure
        except BaseException as error:
            self.failure = f"the engine has failed: {as_engine_error(error)}"
            logger.error("%s", self.failure)
        else:
            self.failure = None
        finally:
            self.needs_self_test = False
            self._engine.forget(request)
