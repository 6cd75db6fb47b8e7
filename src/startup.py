"""Start of an engine: progress on stderr, no cyclic garbage collection, and an early CUDA context.

Imports and tracing allocate many long-lived objects, and each collection rescans them: a seventh of
the import time. Creating the CUDA context takes as long as the imports, and both run concurrently.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disables the cyclic garbage collector in this block, then restores its earlier setting."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_watched() -> bool:
    """Whether stderr is shown as it is written: a terminal or a notebook."""
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)


@contextmanager
def log_shown(level: int = logging.INFO) -> Iterator[None]:
    """Writes the log of pagespec to stderr in this block, unless the application has configured
    logging."""
    logger = logging.getLogger("pagespec")
    if logger.hasHandlers() or sys.stderr is None:
        yield
        return
    handler, before = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("pagespec: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def create_cuda_context_async(device: str) -> threading.Thread | None:
    """Create the primary CUDA context of a GPU in a thread.

    The driver call takes a large part of a second and does not hold the GIL. torch reuses this
    context, which all libraries of a process share. Without a driver or GPU nothing happens; later
    code reports the problem.

    Args:
        device: the engine's setting: "auto", "cpu", "cuda" or "cuda:N".

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
    # 0 is success. The context is never released: it is used until the process ends.
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
