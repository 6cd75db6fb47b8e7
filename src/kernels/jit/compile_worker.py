"""Compile worker: a process that fills Triton's cache on disk, with one pool task per kernel.

Started only by :mod:`.compile_pool`, with the number of an open socket. It receives ``(target,
module, name, form)`` per kernel, with forms in the format of Triton's hooks, and sends the results
of :func:`_compile`, in any order. It uses no GPU and has one thread when the pool forks.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

# Imported once, before the forks, by all kernels' modules.
import torch  # noqa: F401
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import triton_key

from .cache_keys import precompute_cache_key

_MAX_PROCESSES = 32  # all of them are forked at once; a start has a few dozen kernels


class _NoGpu:
    """The part of Triton's driver that compilation calls."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


def main() -> None:
    # All names of cached kernels contain this digest of Triton itself, its largest library
    # included.
    triton_key()
    gc.freeze()  # a fork copies the pages that it touches
    requests = Connection(int(sys.argv[1]))
    pool = ProcessPoolExecutor(
        min(len(os.sched_getaffinity(0)), _MAX_PROCESSES),
        multiprocessing.get_context("fork"),
        _end_with_parent,
    )

    def answer(future: Future[bool | None]) -> None:
        requests.send(None if future.exception() else future.result())

    # Ends with the requesting process, or when a child was killed: BrokenProcessPool.
    with suppress(Exception):
        while True:
            target, *kernel = requests.recv()
            driver.set_active(_NoGpu(target))  # type: ignore[arg-type]
            make_backend(target).hash()  # queries the version of ptxas, once for all forks
            pool.submit(_compile, *kernel).add_done_callback(answer)
    os._exit(0)  # waits for no child


def _end_with_parent() -> None:
    """End this child with the worker: a child that waits for tasks would not notice the end, and
    stay."""

    def wait() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _compile(module: str, name: str, form: str) -> bool | None:
    """Whether the kernel had to be compiled; None if that failed."""
    was_found: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        was_found.append(cache_hit)

    knobs.compilation.listener = listen
    # The launch of a kernel that is not cached compiles it, and raises if that fails.
    try:
        kernel = getattr(importlib.import_module(module), name)
        precompute_cache_key(kernel)
        built = kernel.preload(form)
    except BaseException:
        return None
    with suppress(BaseException):  # a small C library that older Tritons build
        CudaLauncher(built.src, built.metadata)
    return not all(was_found)


if __name__ == "__main__":
    main()
