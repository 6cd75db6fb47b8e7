"""Compile worker: a process that fills Triton's cache on disk, one task of a pool per kernel.

Started by :mod:`.compile_pool` with the number of an open socket; not meant for people. It receives
``(target, module, name, form)`` per kernel, with forms as Triton's hooks name them, and sends what
:func:`_compile` returns, in any order. It uses no GPU and has one thread when the pool forks.
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

_MAX_PROCESSES = 32  # all of them are forked at once; a start has some dozen kernels


class _NoGpu:
    """The part of Triton's driver that compiling calls."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


def main() -> None:
    # All kernels' names in the cache hold this digest of Triton itself, its largest library too.
    triton_key()
    gc.freeze()  # what a fork looks at, it copies
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
            make_backend(target).hash()  # queries the assembler's version, once for all
            pool.submit(_compile, *kernel).add_done_callback(answer)
    os._exit(0)  # waits for no child


def _end_with_parent() -> None:
    """End this child with the worker: one that waits for tasks would not notice, and stay."""

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
    # The launch of a kernel that is not there compiles it, and says what fails.
    try:
        kernel = getattr(importlib.import_module(module), name)
        precompute_cache_key(kernel)
        built = kernel.preload(form)
    except BaseException:
        return None
    with suppress(BaseException):  # a small library in C that older Tritons build
        CudaLauncher(built.src, built.metadata)
    return not all(was_found)


if __name__ == "__main__":
    main()
