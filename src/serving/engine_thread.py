"""The thread that steps an engine and runs other threads' operations between steps."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from ..engine.core import Engine
from ..errors import EngineError
from ..threads import start_native

logger = logging.getLogger("pagespec")

_T = TypeVar("_T")
# No step then finds requests whose handles were dropped, and a finalizer must not set an event.
_PAUSED_WAIT_S = 0.2


class EngineThread:
    """Steps ``engine`` on its own thread while it has work.

    An operation of the engine takes its lock, which a step holds from beginning to end. On an event
    loop that would block every caller. So operations are queued, and run here between steps, in
    order.

    No exception ends the thread, not even a KeyboardInterrupt or SystemExit of a callback. At the
    exit of the process it ends after its current step.

    Args:
        wake: set when there may be work.
        after_step: called on this thread after each step, after operations, and several times per
            second while paused.
        on_failure: called on this thread after a failed step, which ended all live requests.
        on_exit: called on this thread when it ends, with the reason passed to ``close``.

    Attributes:
        is_paused: no steps are taken; operations still run.
    """

    def __init__(
        self,
        engine: Engine,
        wake: threading.Event,
        after_step: Callable[[], None],
        on_failure: Callable[[EngineError], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self._engine, self._wake = engine, wake
        self._after_step, self._on_failure, self._on_exit = after_step, on_failure, on_exit
        self._operations: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_closing = False
        self._reason = "the engine's thread has ended"
        self.is_paused = False
        end = partial(self.close, "the process ends", waits=False)
        self._thread = start_native(self._run, "pagespec-engine", end)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def call(self, operation: Callable[[], _T]) -> Future[_T]:
        """Run ``operation`` between steps. The future receives its exception; if that is not an
        ``Exception``, it is converted to an EngineError.

        Raises:
            EngineError: the thread has ended.
        """
        future: Future[_T] = Future()
        self._operations.append((future, operation))
        self._wake.set()
        if not self._thread.is_alive():  # checked last: otherwise the operation might never run
            self._refuse_operations()
        return future

    def close(self, reason: str | None = None, *, waits: bool = True) -> None:
        """End the thread after its current step, and wait for that.

        Args:
            reason: the error of requests that are still live.
            waits: if False, return at once, as a finalizer must.
        """
        self._reason = reason or self._reason
        self._is_closing = True
        self._wake.set()
        if waits and not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                # Cleared before the operations are read: a new operation sets it again.
                self._wake.clear()
                self._do_operations()
                if self._can_step():
                    try:
                        self._engine.step()
                    except BaseException as error:
                        _logging_errors(self._on_failure, as_engine_error(error))
                _logging_errors(self._after_step)
                if not self._can_step() and not self._is_closing:
                    self._wake.wait(_PAUSED_WAIT_S if self.is_paused else None)
        finally:
            self._is_closing = True
            _logging_errors(self._on_exit, self._reason)
            self._refuse_operations()

    def _can_step(self) -> bool:
        return not self.is_paused and self._engine.has_work

    def _do_operations(self) -> None:
        while self._operations:
            future, operation = self._operations.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = operation()
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(as_engine_error(error))
            else:
                future.set_result(result)

    def _refuse_operations(self) -> None:
        while self._operations:
            future, _ = self._operations.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(self._reason))


def as_engine_error(error: BaseException) -> EngineError:
    """``error`` as an EngineError: a KeyboardInterrupt would end the caller's event loop."""
    if isinstance(error, EngineError):
        return error
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    made = EngineError(f"a step was stopped by {text}")
    made.__cause__ = error
    return made


def _logging_errors(call: Callable[..., None], *arguments: object) -> None:
    try:
        call(*arguments)
    except BaseException:
        logger.exception("the engine's thread continues after an error")
