"""The engine's lock: one thread at a time, in turn, and never left locked by an interrupt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_GIVE_WAY_S, _GIVE_WAY_TIMES = 50e-6, 20


class EngineLock:
    """Mutual exclusion of whole operations, for threads of which each repeats them in a loop.

    CPython handles signals after calls and at the ends of loops, never between a lock written in C
    and the block of its ``with``: the one place that locks here is such a ``with``.

    Python's locks are not fair. A thread that steps the engine in a loop would have the lock again
    before those it woke can take it, so it sleeps a moment where others wait.

    Attributes:
        is_busy: whether some thread is in an operation. A hint: true for ever, until the next
            operation, if an interrupt came just before it was reset.
    """

    def __init__(self) -> None:
        # Reentrant, so that a callback that calls back is refused by the engine, not deadlocked.
        self._mutex = threading.RLock()
        self._waiting: set[int] = set()  # thread ids
        self.is_busy = False

    def run(self, operation: Callable[..., _T], *args: object) -> _T:
        """Call ``operation(*args)`` while no other thread is in one."""
        me = threading.get_ident()
        if self._waiting:
            self._give_way(me)
        self._waiting.add(me)
        try:
            with self._mutex:
                self._waiting.discard(me)
                self.is_busy = True
                try:
                    return operation(*args)
                finally:
                    self.is_busy = False
        finally:
            self._waiting.discard(me)  # it was interrupted while it waited

    def _give_way(self, me: int) -> None:
        self._waiting.discard(me)
        for _ in range(_GIVE_WAY_TIMES):
            if not self._waiting:
                return
            time.sleep(_GIVE_WAY_S)
