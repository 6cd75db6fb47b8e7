"""Disables the cyclic garbage collector during a start, and creates the CUDA context early.

Imports and tracing allocate many long-lived objects, and each collection rescans them: a seventh of
the import time. The context takes as long as the imports, and neither waits for the other.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disables the cyclic garbage collector in this block, and restores it as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def create_cuda_context_async(device: str) -> threading.Thread | None:
    """Create the primary CUDA context of a GPU in a thread.

    The driver needs a large part of a second, without the interpreter lock. torch reuses this
    context, which all libraries of a process share. Without a driver or GPU nothing happens; later
    code reports that.

    Args:
        device: as the engine's setting: "auto", "cpu", "cuda" or "cuda:N".

    Returns:
        The thread; None for a CPU or an invalid device.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdecimal():
        return None
    thread = threading.Thread(target=_open, args=(int(index or 0),), daemon=True)
    thread.start()
    return thread


def _open(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    # 0 is success. The context is never released: it is in use until the process ends.
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
