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
    """Have the driver make its context on the GPU, in a thread that ends with that.

    It takes a good part of a second, in which the driver leaves Python alone. torch takes up this
    context later; it is the one that all libraries of a process share. Where there is no driver or
    no such GPU, nothing happens, and the code that needs it will say so.

    Args:
        device: as the engine's setting: "auto", "cpu", "cuda" or "cuda:N".

    Returns:
        The thread; None for a CPU, or for what is no device.
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
    # Each returns 0 if it worked. The context is never given back: it is in use to the end.
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
