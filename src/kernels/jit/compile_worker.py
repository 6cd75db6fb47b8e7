"""Compile worker: a process that fills Triton's cache on disk, one fork per kernel.

Started by :mod:`.compile_pool`; not meant for people. For each kernel it reads a line
of JSON, ``[number, [backend, arch, warp size], module, name, form]``, with forms as Triton's hooks
name them, and writes a line ``[number, status]`` when that has ended. It uses no GPU and has one
thread, so it may fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

# Imported once, before the forks, by all kernels' modules.
import torch  # noqa: F401
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import triton_key

from .cache_keys import precompute_cache_key
from .compile_pool import COMPILED, FAILED, FOUND

_POLL_S = 0.01


class _NoGpu:
    """Triton's driver as far as compiling asks for it."""

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
    lines = _Lines()
    waiting: deque[list[Any]] = deque()
    running: dict[int, int] = {}
    num_at_once = len(os.sched_getaffinity(0))
    while running or waiting or not lines.have_ended:
        # A child's end is not told to who waits for lines.
        waiting += map(json.loads, lines.read(_POLL_S if running else None))
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(ended[1])
            print(json.dumps([running.pop(ended[0]), status]), flush=True)
        while waiting and len(running) < num_at_once:
            number, target, *kernel = waiting.popleft()
            running[_started(GPUTarget(*target), kernel)] = number


class _Lines:
    """Of standard input, as they come."""

    def __init__(self) -> None:
        self.have_ended = False
        self._begun = b""

    def read(self, timeout: float | None) -> list[bytes]:
        """Those that are there, or come within ``timeout`` seconds; None waits for some."""
        if self.have_ended:
            time.sleep(timeout or 0)
            return []
        if not select.select([sys.stdin], [], [], timeout)[0]:
            return []
        part = os.read(sys.stdin.fileno(), 1 << 16)
        self.have_ended = not part
        *lines, self._begun = (self._begun + part).split(b"\n")
        return lines


def _started(target: GPUTarget, kernel: Sequence[str]) -> int:
    """The process that compiles ``kernel``."""
    driver.set_active(_NoGpu(target))  # type: ignore[arg-type]
    make_backend(target).hash()  # asks the assembler for its version, once for all
    child = os.fork()
    if child == 0:
        os._exit(_status_of(*kernel))
    return child


def _status_of(module: str, name: str, form: str) -> int:
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
        return FAILED
    with suppress(BaseException):
        _build_launcher(built)
    return FOUND if all(was_found) else COMPILED


def _build_launcher(built: Any) -> None:
    """A small library in C that older Tritons build for each form of arguments."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(built.src, built.metadata)


if __name__ == "__main__":
    main()
