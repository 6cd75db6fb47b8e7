"""What is served, on the engine's thread: admission, ends, failures, and who went away."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from ..engine.core import Engine
from ..engine.inputs import PromptInput
from ..engine.request import Request
from ..engine.request_factory import RequestFactory
from ..engine.sampling_params import SamplingParams
from ..errors import EngineBusyError, EngineError, InvalidInputError
from .generation import Generation
from .served import Observer, Served, end_of, tell

logger = logging.getLogger("pagespec")


class Handle(weakref.ref[Generation]):
    """A weak reference to what the caller holds; its callback is C code (``deque.append``)."""

    __slots__ = ("served",)
    served: Served

    @classmethod
    def of(cls, generation: Generation, served: Served, gone: deque[Handle]) -> Handle:
        handle = cls(generation, gone.append)
        handle.served = served
        return handle


class RequestHost:
    """Holds the live requests of an ``AsyncLLM``. Its methods are called on the engine's thread,
    but for :meth:`handle`; its attributes may be read anywhere.

    Args:
        max_num_requests: most that are live; None: any number.
        tell_loops: called when there may be news for callers.

    Attributes:
        failure: why the engine cannot compute; None if it can.
    """

    def __init__(
        self,
        engine: Engine,
        factory: RequestFactory,
        max_num_requests: int | None,
        observers: Sequence[Observer],
        tell_loops: Callable[[], None],
    ) -> None:
        self._engine, self._factory = engine, factory
        self._max_num_requests, self._observers = max_num_requests, observers
        self._tell_loops = tell_loops
        self.failure: str | None = None
        self._live: dict[Request, Served] = {}
        self._by_id: dict[str, Served] = {}
        self._num_steps_told = 0
        # Filled by C code alone, from wherever the last reference goes.
        self._abandoned: deque[Handle] = deque()

    @property
    def num_live(self) -> int:
        """Requests, each continuation by itself."""
        return len(self._live)

    def handle(self, generation: Generation, served: Served) -> Handle:
        """By which it is aborted once its caller has let it go."""
        return Handle.of(generation, served, self._abandoned)

    def admit(self, made: Sequence[Served], handles: Sequence[Handle]) -> None:
        """Have requests served: all of them or, if one is refused, none.

        Raises:
            InvalidInputError, EngineBusyError, EngineError: as ``AsyncLLM.submit``.
        """
        if self.failure is not None:
            self._check_itself()
            if self.failure is not None:
                raise EngineError(self.failure)
        num_new = sum(len(served.requests) for served in made)
        limit = self._max_num_requests
        if limit is not None and len(self._live) + num_new > limit:
            raise EngineBusyError(
                f"{len(self._live)} requests are being served, {num_new} more are asked for, "
                f"max_num_requests = {limit}"
            )
        names = [served.request_id for served in made]
        for name in names:
            if name in self._by_id or names.count(name) > 1:
                raise InvalidInputError("request_id", name, "is in use")
        done: list[Served] = []
        try:
            for served, handle in zip(made, handles, strict=True):
                leader, *siblings = served.requests
                self._engine.add(leader, None, siblings)
                done.append(served)
                served.handle = handle
                self._by_id[served.request_id] = served
                self._live |= dict.fromkeys(served.requests, served)
        except BaseException:
            for served in done:
                self.abort(served)
            raise

    def abort_id(self, request_id: str) -> None:
        """Abort a request by its name, if it is live."""
        served = self._by_id.get(request_id)
        if served is not None:
            self.abort(served)

    def abort(self, served: Served) -> None:
        """End what is live of it."""
        for request in served.requests:
            if request in self._live:
                self._engine.abort(request.request_id)
                self._end(request)

    def abort_all(self) -> None:
        for served in list(self._by_id.values()):
            self.abort(served)

    def settle(self, operation: Callable[[], list[Request]]) -> None:
        """Do what settles steps, which may end requests or fail as a step does."""
        try:
            finished = operation()
        except EngineError as error:
            self.on_failure(error)
            raise
        for request in finished:
            self._end(request)

    def _end(self, request: Request) -> None:
        served = self._live.pop(request, None)
        if served is None:
            return
        engine = self._engine

        def failure() -> tuple[str, bool]:
            return engine.failure(request), engine.failed_alone(request)

        served.ends[request] = end_of(request, engine.metrics(request), failure)
        engine.forget(request)
        if served.has_ended:
            self._by_id.pop(served.request_id, None)

    def after_step(self, finished: list[Request]) -> None:
        """Called after each step, and after operations, with the requests that it finished."""
        for request in finished:
            self._end(request)
        while self._abandoned:
            self.abort(self._abandoned.popleft().served)
        last = self._engine.scheduler.last_step
        if last is not None and self._engine.scheduler.num_steps != self._num_steps_told:
            self._num_steps_told = self._engine.scheduler.num_steps
            for observer in self._observers:
                tell(observer.on_step, last.plan.total_num_tokens)
        self._tell_loops()

    def on_failure(self, error: Exception) -> None:
        """A step failed, which ended all live requests."""
        logger.error("a step failed: %s", error)
        for request in [r for r in self._live if r.finish_reason is not None]:
            self._end(request)
        self._check_itself()

    def _check_itself(self) -> None:
        """Whether it can compute: a failed step may have been the fault of what it computed, or of
        a device that computes nothing any more."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        (request,) = self._factory.make(PromptInput(None, [0]), params)
        try:
            self._engine.add(request)
            while request.finish_reason is None:
                self._engine.step()
            if request.finish_reason == "error":
                raise EngineError(self._engine.failure(request))
        except Exception as error:
            self.failure = f"the engine has failed: {error}"
            logger.error("%s", self.failure)
        else:
            self.failure = None
        finally:
            self._engine.forget(request)
