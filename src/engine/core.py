"""The step loop: schedule, dispatch, collect, commit."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TypeVar

from ..errors import EngineError, InvalidInputError
from .invariants import InvariantError, RunnerView, check_plan, check_state
from .logprob_output import keep_logprobs, trim_logprobs
from .outputs import RequestMetrics
from .pace import StepPace
from .record import Owner, Records, error_of
from .request import Request
from .runner import Runner
from .scheduler import Scheduler, dead_ends
from .segments import refuse_contents
from .trace import TraceWriter

_T = TypeVar("_T")
_Settled = tuple[int, list[Request]]  # see Owner.on_step; requests that finished in the step
_YIELD_S, _MAX_YIELDS = 50e-6, 20


class _StepErrors:
    """Converts exceptions of a step to EngineError."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, (EngineError, InvariantError)):
            raise EngineError(f"a step failed: {error}") from error


_AS_ENGINE_ERRORS = _StepErrors()


class Engine:
    """Drives a scheduler and a runner. Threads may share it: operations are mutually exclusive.

    A failed or interrupted operation (at any line) leaves no partial state: every live request ends
    with reason "error", the pool is reset, and the runner discards its steps (S37). The recovery
    reads no partially updated state, so it can itself be interrupted; the next operation then
    restarts it.

    Args:
        scheduler: holds the requests. Its ``pipeline_depth`` must equal the runner's.
        runner: computes plans; a model runner, or any fake that implements the protocol.
        pace: chooses the token budget of each step; None: the scheduler's maximum.
        trace: file to write the step trace to (see ``engine.trace``).
        takes_contents: whether the runner computes content segments of prompts. If not, requests
            with content segments are refused.
        check_invariants: check the structural properties after every step, and raise
            InvariantError at the first violation.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        pace: StepPace | None = None,
        trace: str | os.PathLike[str] | None = None,
        takes_contents: bool = False,
        check_invariants: bool = False,
    ) -> None:
        if scheduler.pipeline_depth != runner.pipeline_depth:
            raise ValueError(
                f"scheduler.pipeline_depth = {scheduler.pipeline_depth} and "
                f"runner.pipeline_depth = {runner.pipeline_depth} must be equal"
            )
        drafter = scheduler.drafter
        if drafter is not None and drafter.max_draft_tokens > runner.max_draft_tokens:
            raise ValueError(
                f"drafter.max_draft_tokens = {drafter.max_draft_tokens} must be at most "
                f"runner.max_draft_tokens = {runner.max_draft_tokens}"
            )
        self.scheduler = scheduler
        self.runner = runner
        self._pace = pace
        self._takes_contents = takes_contents
        self._begun: deque[float] = deque()  # dispatch time of each step in flight
        self._last_end = 0.0
        self._trace = TraceWriter(trace, scheduler) if trace is not None else None
        self._view = RunnerView() if check_invariants else None
        self._handles: deque[object] = deque()
        self._records = Records()
        # Reentrant, so that a callback that calls the engine raises instead of deadlocking.
        self._mutex = threading.RLock()
        self._waiting: set[int] = set()  # ids of threads
        # A hint: after an interrupt just before its reset, it stays True until the next operation.
        self._is_busy = False
        self._is_changing = False
        self._num_taken = 0  # steps
        self.schedule_s = self.commit_s = 0.0
        # From the end of a step to the dispatch of the next, where steps were settled first.
        self.exposed_s, self.num_exposed_steps = 0.0, 0
        if drafter is not None:
            scheduler.max_num_samples = runner.max_num_samples

    @property
    def has_work(self) -> bool:
        """Whether a step would do something. Also True during another thread's operation, and
        after an interrupted one, from which the next operation recovers."""
        return self.scheduler.has_work or self._is_changing

    # Operations -------------------------------------------------------------------------------

    def add(
        self,
        request: Request,
        caller: object | None = None,
        siblings: Sequence[Request] = (),
        owner: Owner | None = None,
    ) -> None:
        """Admit a request and its siblings. Raises InvalidInputError if the request can never be
        served, or has a content segment that the runner does not compute; see Scheduler.add.

        Args:
            caller: an object that lives as long as the call for the request. When it is garbage
                collected, the request is aborted and its record dropped. None: no such object.
            owner: receives the ends of the requests, whichever thread ends them; the engine then
                drops their records.
        """
        self._run(self._add, request, caller, siblings, owner)

    def abort(self, request_id: str) -> None:
        """End a request now; a no-op if it has already ended."""
        self._run(self._abort, request_id)

    def pause(self, request_id: str) -> None:
        """See Scheduler.pause."""
        self._run(self._serve, self.scheduler.pause, "pause", request_id)

    def resume(self, request_id: str) -> None:
        """See Scheduler.resume."""
        self._run(self._serve, self.scheduler.resume, "resume", request_id)

    def step(self) -> list[Request]:
        """Dispatch the next step if there is one, then settle the oldest step if the pipeline is
        full or nothing could be dispatched. Returns the requests that finished.

        One thread steps on behalf of all waiters: a call that waited while another thread stepped
        returns without stepping. Each waiter then checks the ``finish_reason`` of its own requests.

        Raises:
            EngineError: the step failed.
        """
        return self._run(self._step, self._num_taken)

    def settle(self) -> list[Request]:
        """Settle all steps in flight and dispatch none. Returns the requests that finished.

        Raises:
            EngineError: a step failed.
        """
        return self._run(self._settle)

    def reset_prefix_cache(self) -> list[Request]:
        """Settle all steps in flight, then see Scheduler.reset_prefix_cache. Returns the requests
        that finished.

        Raises:
            EngineError: a step failed.
        """
        return self._run(self._reset_prefix_cache)

    def sweep(self) -> None:
        """Abort requests whose callers were garbage collected. While another operation runs, the
        next operation does this instead: a finalizer may call ``sweep`` in the middle of an
        operation, or while holding a lock that an operation waits for."""
        if not self._is_busy:
            # No caller waits for the result. A runner that stays broken fails the next step.
            with contextlib.suppress(EngineError):
                self._run(self._drain)

    def forget(self, request: Request) -> None:
        """Drop the record of a finished request; a no-op if it is already dropped."""
        self._run(self._records.forget, request)

    def metrics(self, request: Request) -> RequestMetrics:
        """Metrics of a finished request whose record was not dropped yet."""
        return self._run(self._records.metrics, request)

    def error(self, request: Request) -> EngineError | None:
        """The error of a request that ended with reason "error" and whose record was not dropped
        yet: a RequestError if the other requests continued. None for any other end."""
        return error_of(request, self._records.find(request))

    # Atomic operations ------------------------------------------------------------------------

    def _run(self, operation: Callable[..., _T], *args: object) -> _T:
        """Call ``operation(*args)`` while no other thread is in an operation.

        CPython handles signals after calls and at the ends of loops, never between a lock
        implemented in C and the block of its ``with``. So locks are taken by ``with`` only.
        """
        thread = threading.get_ident()
        if self._waiting:
            self._yield_to_waiters(thread)
        self._waiting.add(thread)
        try:
            with self._mutex:
                self._waiting.discard(thread)
                self._is_busy = True
                try:
                    if self._is_changing:
                        self._recover_or_refuse()
                    self._is_changing = True
                    try:
                        gone = self._records.gone
                        while gone:
                            self._drop(gone[0].item)
                            gone.popleft()  # after the drop, which may be interrupted
                        result = operation(*args)
                    except InvalidInputError:  # of add, pause and resume: no state changed
                        self._is_changing = False
                        raise
                    except BaseException as error:
                        # If recovery fails, raise the first error; the next operation recovers.
                        with contextlib.suppress(Exception):
                            self._recover(_reason_of(error))
                        raise
                    self._is_changing = False
                    return result
                finally:
                    self._is_busy = False
        finally:
            self._waiting.discard(thread)  # in case it was interrupted while waiting

    def _yield_to_waiters(self, thread: int) -> None:
        """Sleep briefly while other threads wait. Python's locks are not fair: a thread that steps
        in a loop would reacquire the lock before the threads that it woke."""
        self._waiting.discard(thread)
        for _ in range(_MAX_YIELDS):
            if not self._waiting:
                return
            time.sleep(_YIELD_S)

    def _recover_or_refuse(self) -> None:
        """Handle an operation that did not return: interrupted, or still running on this thread."""
        if self._is_reentered():
            raise EngineError("the engine is in use by this thread: its callbacks must not use it")
        try:
            self._recover("an operation of the engine was interrupted")
        except Exception as error:
            raise EngineError(f"recovery from a failed step failed: {error}") from error

    def _is_reentered(self) -> bool:
        """Whether an earlier operation of this thread has not returned yet. The stack is searched
        instead of a flag, because an interrupt could leave a flag set."""
        frame: FrameType | None = sys._getframe()
        num_found = 0
        while frame is not None:
            if frame.f_code is Engine._run.__code__ and frame.f_locals.get("self") is self:
                num_found += 1
            frame = frame.f_back
        return num_found > 1

    def _recover(self, failure: str) -> None:
        """Reset from any state to one without requests and with a full pool. May be repeated."""
        self._records.note_all_failed(self.scheduler.requests.values(), failure)
        self.scheduler.reset("error")
        self._records.deliver_all()  # first: resetting the runner may be slow, or fail
        self._handles.clear()
        self._begun.clear()
        self.runner.reset()
        if self._view is not None:
            self._view = RunnerView()
        if self._trace is not None:
            try:
                self._trace.fail()
            except Exception:  # such as a full disk, which must not stop the engine
                self._trace = None
        self._is_changing = False

    # Bodies of the operations -----------------------------------------------------------------

    def _add(
        self,
        request: Request,
        caller: object | None,
        siblings: Sequence[Request],
        owner: Owner | None,
    ) -> None:
        if not self._takes_contents:
            refuse_contents(request.info.segments)
        arrivals = (request, *siblings)
        leases = self._records.leases(arrivals, caller)
        self.scheduler.add(request, siblings)
        self._records.add(arrivals, leases, owner)
        if self._trace is not None:
            self._trace.add(request, siblings)

    def _abort(self, request_id: str) -> None:
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._records.note_aborted(request)
            self._write("abort", id=request_id, reason="abort")
            self._records.deliver([request])

    def _serve(self, change: Callable[[str], None], event: str, request_id: str) -> None:
        """Pause or resume a request."""
        change(request_id)
        self._write(event, id=request_id)

    def _write(self, event: str, **fields: object) -> None:
        if self._trace is not None:
            self._trace.write(event, **fields)

    def _drop(self, request: Request) -> None:
        if self.scheduler.requests.get(request.request_id) is request:
            self._abort(request.request_id)
        self._records.forget(request)

    def _drain(self) -> None:
        """Settle the steps in flight if no request is left."""
        if not self.scheduler.requests:
            self._settle()

    def _step(self, num_taken: int) -> list[Request]:
        """Take a step, unless another thread took one since ``num_taken`` was read."""
        if num_taken != self._num_taken:
            return []
        self._num_taken += 1
        with _AS_ENGINE_ERRORS:
            scheduler = self.scheduler
            settled: list[_Settled] = []
            if len(self._handles) <= scheduler.pipeline_depth:
                if scheduler.drafter is not None and self._handles:
                    settled = self._settle_first()
                begin = time.perf_counter()
                pace = self._pace
                if pace is None:
                    plan = scheduler.schedule()
                else:
                    most = scheduler.max_num_batched_tokens
                    plan = scheduler.schedule(pace.budget(scheduler.queues, most))
                scheduled = time.perf_counter()
                self.schedule_s += scheduled - begin
                if self._view is not None:
                    check_state(scheduler)
                    check_plan(scheduler, plan)
                    self._view.check(scheduler, plan)
                if plan.requests:
                    if plan.tables:
                        requests = scheduler.in_flight[-1].requests
                        self._records.note_scheduled([requests[row] for row in plan.tables])
                    self._begun.append(scheduled)
                    self._handles.append(self.runner.dispatch(plan))
                    if self._trace is not None:  # after dispatch: the device may already compute
                        self._trace.plan(plan, begin, scheduled)
                    if settled:
                        self.exposed_s += time.perf_counter() - self._last_end
                        self.num_exposed_steps += 1
                    if len(self._handles) <= scheduler.pipeline_depth:
                        return self._report(settled)
                elif not self._handles and scheduler.has_work:
                    raise EngineError(
                        "no request can make progress; this is a bug in the scheduler"
                    )
            if not self._handles:
                return self._report(settled)
            return self._report([self._settle_oldest()])

    def _settle_first(self) -> list[_Settled]:
        """Settle all steps in flight if the scheduler wants to draft after them. They are reported
        once the next step is dispatched, so that reports take no time of the device."""
        settled: list[_Settled] = []
        if self.scheduler.should_settle_first():
            while self._handles:
                settled.append(self._settle_oldest())
        return settled

    def _settle(self) -> list[Request]:
        finished: list[Request] = []
        with _AS_ENGINE_ERRORS:
            while self._handles:
                finished += self._report([self._settle_oldest()])
        return finished

    def _reset_prefix_cache(self) -> list[Request]:
        finished = self._settle()
        self.scheduler.reset_prefix_cache()
        if self._trace is not None:
            self._trace.reset()
        if self._view is not None:
            check_state(self.scheduler)
        return finished

    def _settle_oldest(self) -> _Settled:
        """Collect and commit the oldest step. Its ends are not reported yet."""
        step = self.scheduler.in_flight[0]
        plan = step.plan
        awaited = time.perf_counter()
        result = self.runner.collect(self._handles[0])
        begin = time.perf_counter()
        if self._pace is not None:
            self._pace.note(plan, begin - max(self._begun[0], self._last_end))
        self._last_end = begin
        # Before commit, which could end the request for another reason.
        failures = dead_ends(step, result.token_ids)
        failing: dict[str, tuple[int, str]] = {}  # samples after draft tokens: the commit decides
        for request_id, failure in result.failures.items():
            index = result.failed_samples.get(request_id, 0)
            if not index:
                failures[request_id] = failure
            elif request_id not in failures:
                failing[request_id] = index, failure
        failed = [self._fail(*failure) for failure in failures.items()]
        if result.logprobs is not None:
            keep_logprobs(step, result.logprobs, result.token_ids)
        drafts = self.scheduler.draft_counts
        num_rejected = drafts.num_rejected_tokens
        finished = self.scheduler.commit(plan, result.token_ids, failing)
        if result.logprobs is not None and plan.has_drafts:
            trim_logprobs(step)
        if result.drafts:
            self.scheduler.offer_drafts(step, result.drafts)
        self.commit_s += time.perf_counter() - begin
        self._handles.popleft()
        self._begun.popleft()
        if self._trace is not None:
            self._trace.result(plan, result.token_ids, finished, awaited, begin)
        if self.scheduler.failures:
            for request in finished:
                if request.finish_reason == "error":
                    failure = self.scheduler.failures[request.request_id]
                    self._records.note_failed(request, failure)
            self.scheduler.failures = {}
        if self._view is not None:
            check_state(self.scheduler)
        finished += [request for request in failed if request is not None]
        # A prompt's last position is also the one that generates the first token.
        num_tokens = plan.total_num_tokens + self._records.note_settled(finished)
        return num_tokens - (drafts.num_rejected_tokens - num_rejected), finished

    def _report(self, settled: Sequence[_Settled]) -> list[Request]:
        """Report settled steps to the owners. Returns the requests that finished."""
        all_finished: list[Request] = []
        for num_tokens, finished in settled:
            owners = list(self._records.owned)
            if finished:
                self._records.deliver(finished)
                all_finished += finished
            for owner in owners:
                owner.on_step(num_tokens)
        return all_finished

    def _fail(self, request_id: str, failure: str) -> Request | None:
        """End one request with reason "error"; the others continue unaffected."""
        request = self.scheduler.abort(request_id, "error")
        if request is not None:  # a finished request may have positions in flight that fail
            self._records.note_failed(request, failure)
            self._write("abort", id=request_id, reason="error")
        return request


def _reason_of(error: BaseException) -> str:
    return str(error) if isinstance(error, Exception) else f"stopped by {type(error).__name__}"
