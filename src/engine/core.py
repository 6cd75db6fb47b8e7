"""The step loop: schedule, dispatch, collect, commit."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass

from pagespec.engine.invariants import RunnerView, check_plan, check_state
from pagespec.engine.outputs import RequestMetrics
from pagespec.engine.request import Request
from pagespec.engine.runner import Runner
from pagespec.engine.scheduler import Scheduler
from pagespec.engine.trace import TraceWriter
from pagespec.errors import EngineError


@dataclass(slots=True)
class _Times:
    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Engine:
    """Drives a scheduler and a runner. Not thread-safe: one thread steps it.

    Args:
        scheduler: holds the requests. Its ``pipeline_depth`` must be the runner's.
        runner: computes plans; a model runner, or any fake that meets the protocol.
        trace: a file to write the step trace to (see ``engine.trace``).
        check_invariants: check the structural properties after every step, and raise
            InvariantError (after which the engine is of no more use) at the first that fails.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        trace: str | os.PathLike[str] | None = None,
        check_invariants: bool = False,
    ) -> None:
        if scheduler.pipeline_depth != runner.pipeline_depth:
            raise ValueError(
                f"scheduler.pipeline_depth = {scheduler.pipeline_depth} and "
                f"runner.pipeline_depth = {runner.pipeline_depth} must be equal"
            )
        self.scheduler = scheduler
        self.runner = runner
        self._trace = TraceWriter(trace, scheduler) if trace is not None else None
        self._view = RunnerView() if check_invariants else None
        self._handles: deque[object] = deque()
        self._times: dict[Request, _Times] = {}
        self._awaiting_first_token: set[Request] = set()
        self.schedule_s = self.commit_s = 0.0

    def add(self, request: Request) -> None:
        """Raises InvalidInputError if the request can never be served; see Scheduler.add."""
        self.scheduler.add(request)
        self._times[request] = _Times(arrival=time.perf_counter())
        if self._trace is not None:
            self._trace.add(request)

    def abort(self, request_id: str) -> None:
        """End a request now; a no-op if it has ended already."""
        self._end(request_id, "abort")

    def pause(self, request_id: str) -> None:
        """See Scheduler.pause."""
        self.scheduler.pause(request_id)
        if self._trace is not None:
            self._trace.pause(request_id)

    def resume(self, request_id: str) -> None:
        """See Scheduler.resume."""
        self.scheduler.resume(request_id)
        if self._trace is not None:
            self._trace.resume(request_id)

    def _end(self, request_id: str, reason: str) -> None:
        request = self.scheduler.abort(request_id, reason)
        if request is not None:
            self._times[request].finished = time.perf_counter()
            if self._trace is not None:
                self._trace.abort(request_id, reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Request]:
        """Dispatch the next step if there is one, then settle the oldest if the pipeline is full
        or nothing could be dispatched. Returns the requests that finished.

        Raises:
            EngineError: the runner failed. Every live request has ended with reason "error", all
                blocks are given back, and the engine can be used again.
        """
        scheduler = self.scheduler
        if len(self._handles) <= scheduler.pipeline_depth:
            begin = time.perf_counter()
            plan = scheduler.schedule()
            self.schedule_s += time.perf_counter() - begin
            if self._view is not None:
                check_state(scheduler)
                check_plan(scheduler, plan)
                self._view.check(scheduler, plan)
            if plan.requests:
                if self._trace is not None:
                    self._trace.plan(plan)
                if plan.tables:
                    requests = scheduler.in_flight[-1].requests
                    self._note_first_scheduled([requests[row] for row in plan.tables])
                try:
                    self._handles.append(self.runner.dispatch(plan))
                except Exception as error:
                    self.abandon("error")
                    raise EngineError(f"step {plan.step} failed: {error}") from error
                if len(self._handles) <= scheduler.pipeline_depth:
                    return []
            elif not self._handles and scheduler.has_work:
                self.abandon("error")
                raise EngineError("no request can make progress; this is a bug in the scheduler")
        return self._settle_oldest() if self._handles else []

    def _settle_oldest(self) -> list[Request]:
        plan = self.scheduler.in_flight[0].plan
        try:
            result = self.runner.collect(self._handles[0])
            begin = time.perf_counter()
            finished = self.scheduler.commit(plan, result.token_ids)
            self.commit_s += time.perf_counter() - begin
        except Exception as error:
            self.abandon("error")
            raise EngineError(f"step {plan.step} failed: {error}") from error
        self._handles.popleft()
        if self._trace is not None:
            self._trace.result(plan, result.token_ids, finished)
        if self._view is not None:
            check_state(self.scheduler)
        now = time.perf_counter()
        if self._awaiting_first_token:
            for request in [
                r for r in self._awaiting_first_token if len(r.token_ids) > r.num_prompt_tokens
            ]:
                self._times[request].first_token = now
                self._awaiting_first_token.discard(request)
        for request in finished:
            self._times[request].finished = now
        return finished

    def abandon(self, reason: str = "abort") -> None:
        """End every live request with ``reason`` and drop the steps in flight, uncollected. Their
        blocks are given back unpublished: what a failed step wrote is never found again."""
        scheduler = self.scheduler
        for request_id in list(scheduler.requests):
            self._end(request_id, reason)
        while scheduler.in_flight:
            plan = scheduler.in_flight[0].plan
            unread = [0] * plan.num_sampled
            finished = scheduler.commit(plan, unread)
            if self._trace is not None:
                self._trace.result(plan, unread, finished)
        self._handles.clear()
        self._awaiting_first_token.clear()

    def _note_first_scheduled(self, requests: list[Request]) -> None:
        now = time.perf_counter()
        for request in requests:
            times = self._times[request]
            if times.first_scheduled is None:
                times.first_scheduled = now
                self._awaiting_first_token.add(request)

    def forget(self, request: Request) -> None:
        """Drop the times kept for a finished request; a no-op if they are gone."""
        self._times.pop(request, None)
        self._awaiting_first_token.discard(request)

    def metrics(self, request: Request) -> RequestMetrics:
        """Metrics of a finished request that was not forgotten yet."""
        times = self._times[request]
        metrics = RequestMetrics(
            num_cached_tokens=request.num_cached_tokens, num_preemptions=request.num_preemptions
        )
        if times.first_scheduled is not None:
            metrics.queue_time_s = times.first_scheduled - times.arrival
        if times.finished is not None:
            metrics.total_time_s = times.finished - times.arrival
        if times.first_token is not None:
            metrics.time_to_first_token_s = times.first_token - times.arrival
            num_later_tokens = len(request.token_ids) - request.num_prompt_tokens - 1
            if times.finished is not None and num_later_tokens > 0:
                elapsed = times.finished - times.first_token
                metrics.tokens_per_second = num_later_tokens / elapsed if elapsed > 0 else None
        return metrics
