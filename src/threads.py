"""Daemon threads that end before the interpreter is finalized.

CPython before 3.14 unwinds a daemon thread that takes the GIL during finalization. Frames of torch
and of Rust libraries cannot be unwound there: the process ends with SIGABRT ("terminate called
without an active exception") or SIGSEGV, whatever its exit code was.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

_EXIT_WAIT_S = 5.0


def start_native(
    target: Callable[[], object], name: str, end: Callable[[], object] | None = None
) -> threading.Thread:
    """Start a daemon thread that runs native code. The exit of the process waits for its end, at
    most ``_EXIT_WAIT_S`` seconds.

    Args:
        end: called first at the exit of the process, to make ``target`` return soon.

    Raises:
        RuntimeError: no thread can start.
    """

    def run() -> None:
        try:
            target()
        finally:
            atexit.unregister(wait)

    thread = threading.Thread(target=run, name=name, daemon=True)

    def wait() -> None:
        if end is not None:
            end()
        thread.join(_EXIT_WAIT_S)

    atexit.register(wait)
    try:
        thread.start()
    except BaseException:
        atexit.unregister(wait)
        raise
    return thread
