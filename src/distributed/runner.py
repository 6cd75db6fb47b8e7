"""Rank 0's runner: stages a step, sends its bytes to all ranks, and computes its own part.

A thread computes that part, and only this thread takes part in collectives. An interrupt (Ctrl-C)
reaches the main thread. Between two collectives of a step it would leave the other ranks waiting
forever. The main thread starts a step with one ``put`` to a queue.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from numpy.typing import NDArray

from ..engine.plan import StepPlan, StepResult
from ..errors import EngineError
from ..kernels.collectives.communicator import Communicator
from ..runner.bases import LocalRunner
from .channel import Channel
from .workers import Watch, Workers


@dataclass(slots=True)
class _Launch:
    """A step that passes through rank 0's thread. ``call`` computes rank 0's part. Without a call,
    a mark that shows that the thread has reached it."""

    number: int
    call: Callable[[list[NDArray[Any]]], object] | None
    is_replayed: bool = False
    is_done: threading.Event = field(default_factory=threading.Event)
    handle: Any = None


class _LaunchThread:
    """Rank 0's thread. It has no reference to the runner, which may be garbage collected.

    Args:
        on_close: called once in the thread, at its end, outside any collective.

    Attributes:
        error: error of the step that failed; no later step is computed.
    """

    def __init__(
        self,
        local: LocalRunner,
        workers: Workers,
        channel: Channel,
        on_close: Callable[[], None],
    ) -> None:
        self._local, self._workers, self._channel = local, workers, channel
        self._on_close = on_close
        self.launches: queue.SimpleQueue[_Launch | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (launch := self.launches.get()) is not None:
            if self.error is None and launch.call is not None:
                try:
                    self._workers.send_step(launch.number, is_replayed=launch.is_replayed)
                    launch.handle = self._channel.run(0, launch.number, launch.call)
                except BaseException as error:
                    self.error = error
            launch.is_done.set()
        self._local.close()
        self._on_close()

    def close(self) -> None:
        """End the workers, then the thread; may be called again."""
        self.launches.put(None)
        if threading.current_thread() is self._thread:  # it collected the garbage
            self._workers.end()
            return
        self._thread.join(1)
        self._workers.end()  # which ends a collective that waits for them
        self._thread.join(5)


class LogitsCallback:
    """The user's ``on_logits``, called in the launch thread. All ranks have computed the step
    before the call, so its exception fails the step but not the group."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._error: BaseException | None = None

    def __call__(self, *arguments: object) -> None:
        try:
            self._function(*arguments)
        except BaseException as error:  # also SystemExit: signals do not reach this thread
            self._error = error

    def take_error(self) -> BaseException | None:
        """Return and clear the exception since the last call."""
        error, self._error = self._error, None
        return error


class DistributedRunner:
    """Implements :class:`.engine.runner.Runner` for a group of ranks.

    Args:
        local: rank 0's own runner.
        workers: the other ranks.
        channel: shared with the workers, with slots.
        communicator: rank 0's own.
        on_close: called once the group has ended.
        on_logits: called by the local runner.
    """

    def __init__(
        self,
        local: LocalRunner,
        workers: Workers,
        channel: Channel,
        communicator: Communicator,
        on_close: Callable[[], None],
        on_logits: LogitsCallback | None = None,
    ) -> None:
        self.local = local
        self._on_logits = on_logits
        self.pipeline_depth = local.pipeline_depth
        self.max_draft_tokens = local.max_draft_tokens
        self.max_num_samples = local.max_num_samples
        self.num_blocks, self.block_size = local.num_blocks, local.block_size
        self.num_state_slots = local.num_state_slots
        self.captured = local.captured
        self._workers, self._channel = workers, channel
        self._communicator = communicator
        self._watch = Watch(workers, channel)
        self._thread = _LaunchThread(local, workers, channel, on_close)
        self._last: _Launch | None = None
        self._failure: EngineError | None = None
        self._num_steps = 0
        # Not a method of this object: a reference to it would keep the object alive.
        self._close = weakref.finalize(self, self._thread.close)

    @property
    def pack_s(self) -> float:
        return self.local.pack_s

    @property
    def mask_s(self) -> float:
        return self.local.mask_s

    @property
    def wait_s(self) -> float:
        return self.local.wait_s

    def dispatch(self, plan: StepPlan) -> _Launch:
        """Stage the step and let all ranks compute it.

        Raises:
            EngineError: a rank has ended or hangs; the group then ends.
        """
        return self._start(plan, partial(self.local.launch, plan=plan))

    def _start(
        self,
        plan: StepPlan,
        call: Callable[[list[NDArray[Any]]], object],
        *,
        is_replayed: bool = False,
    ) -> _Launch:
        self._wait_for(self._last)
        arrays = self.local.stage(plan)
        launch = _Launch(self._num_steps, call, is_replayed)
        self._num_steps += 1
        self._channel.write(launch.number, arrays)
        self._thread.launches.put(launch)
        self._last = launch
        return launch

    def collect(self, handle: object) -> StepResult:
        """The tokens of a step that every rank has computed (R2)."""
        if not isinstance(handle, _Launch):
            raise TypeError(f"not a handle of this runner: {handle!r}")
        self._wait_for(handle)
        self._wait(lambda wait_s: self.local.is_computed(handle.handle, wait_s))
        self._wait(lambda wait_s: self._have_finished(handle.number, wait_s))
        self._check_same_steps()
        error = self._on_logits and self._on_logits.take_error()
        if error:
            raise error
        return self.local.collect(handle.handle)

    def seconds_of(self, plan: StepPlan) -> tuple[float, float]:
        """See :class:`..runner.step_costs.MeasuredRunner`: the duration of the ranks' step, with
        their waiting for each other."""
        try:
            begin = time.perf_counter()
            self.collect(self._start(plan, self.local.launch))
            total_s = time.perf_counter() - begin
            seconds = self._replay(plan, self.local.replay)
            return seconds, max(0.0, total_s - seconds)
        finally:
            self._forget_measured()

    def draft_seconds_of(self, plan: StepPlan) -> float:
        """See :class:`..runner.step_costs.MeasuredRunner`. Rank 0 drafts."""
        if not self.local.has_drafter:
            return 0.0
        try:
            return self._replay(plan, partial(self.local.replay, plan=plan))
        finally:
            self._forget_measured()

    def _replay(self, plan: StepPlan, call: Callable[[list[NDArray[Any]]], float]) -> float:
        launch = self._start(plan, call, is_replayed=True)
        self._wait_for(launch)
        self._wait(lambda wait_s: self._have_finished(launch.number, wait_s))
        seconds: float = launch.handle
        return seconds

    def _forget_measured(self) -> None:
        self.reset()
        self.local.pack_s = self.local.wait_s = 0.0

    def reset(self) -> None:
        """See :meth:`.engine.runner.Runner.reset`. A group that lost a rank stays lost."""
        # An interrupt may have come between the put of a step and its record.
        mark = _Launch(-1, None)
        self._thread.launches.put(mark)
        self._wait_for(mark)
        if self._on_logits is not None:
            self._on_logits.take_error()
        self.local.reset()

    def close(self) -> None:
        """End the workers; may be called again."""
        self._close()

    def _wait_for(self, launch: _Launch | None) -> None:
        """Wait until the thread has passed a launch."""
        if self._failure is not None:
            raise self._failure
        if launch is not None:
            self._wait(launch.is_done.wait)
        if self._thread.error is not None:
            # The error of a rank explains more than its closed connection.
            raise self._failed(self._workers.reason_of(self._thread.error))

    def _have_finished(self, number: int, wait_s: float) -> bool:
        end = time.monotonic() + wait_s
        while not all(cell.num_finished > number for cell in self._channel.cells):
            if time.monotonic() > end:
                return False
            time.sleep(20e-6)
        return True

    def _wait(self, is_done: Callable[[float], bool]) -> None:
        try:
            self._watch.wait(is_done)
        except EngineError as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> EngineError:
        """End the group: ranks that computed different parts cannot continue together."""
        if self._failure is None:
            self._failure = EngineError(f"{error}; make a new engine")
            self._communicator.end()
            self._workers.end()
            # The error may keep this object alive for long, and a new engine needs a new group.
            self._thread.close()
        return self._failure

    def _check_same_steps(self) -> None:
        own, *others = [cell.digest for cell in self._channel.cells]
        if any(other >> 32 == own >> 32 and other != own for other in others):
            raise self._failed(EngineError("ranks computed different steps; this is a bug"))
