"""The thread that steps an engine, and does between two steps what others ask of the engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..engine.core import Engine
from ..engine.request import Request
from ..errors import EngineError

_T = TypeVar("_T")


class EngineThread:
    """Steps ``engine`` as long as it has work, on a thread of its own.

    An operation of the engine takes its lock, which a step holds from its beginning to its end: on
    an event loop it would stop everybody. So operations are handed over, and done here between
    steps, in their order.

    Args:
        after_step: called on this thread after each step, and after operations, with the requests
            that the step finished.
        on_failure: called on this thread when a step failed, which ended all live requests.

    Attributes:
        is_paused: no step is taken; operations are done as ever.
    """

    def __init__(
        self,
        engine: Engine,
        after_step: Callable[[list[Request]], None],
        on_failure: Callable[[EngineError], None],
    ) -> None:
        self._engine = engine
        self._after_step, self._on_failure = after_step, on_failure
        self._operations: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self.is_paused = False
        self._thread = threading.Thread(target=self._run, name="pagespec-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, operation: Callable[[], _T]) -> Future[_T]:
        """Have ``operation`` done between steps.

        Raises:
            EngineError: the thread has ended.
        """
        future: Future[_T] = Future()
        self._operations.append((future, operation))
        self._wake.set()
        if not self._thread.is_alive():  # looked at last: else nobody might ever do it
            self._refuse_operations()
        return future

    def close(self) -> None:
        """End the thread after the step it is in, and wait for that. What is in flight is left."""
        self._is_closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                # Before the operations are looked at: one that comes now sets it again.
                self._wake.clear()
                has_changed = self._do_operations()
                if self.is_paused or not self._engine.has_work:
                    if has_changed:
                        self._after_step([])
                    self._wake.wait()
                    continue
                finished: list[Request] = []
                try:
                    finished = self._engine.step()
                except EngineError as error:
                    self._on_failure(error)
                self._after_step(finished)
        finally:
            self._is_closing = True
            self._refuse_operations()

    def _do_operations(self) -> bool:
        has_changed = False
        while self._operations:
            future, operation = self._operations.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            has_changed = True
            try:
                result = operation()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        return has_changed

    def _refuse_operations(self) -> None:
        while self._operations:
            future, _ = self._operations.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError("the engine's thread has ended"))
