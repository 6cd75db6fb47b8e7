"""Threads whose work gives way to the engine's."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_NICE = 10


def give_way() -> None:
    """Have this thread run where other threads leave a processor free, for the most part. On Linux
    alone have threads priorities of their own; elsewhere nothing changes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
