"""Parallel compilation of the Triton kernels of a start.

The first launch of a kernel blocks while it compiles. Within the context, such launches are
recorded and skipped. Then another process compiles what is missing (:mod:`.compile_pool`), if there
is one. Threads of this process load the kernels, or compile them, too: LLVM and ptxas take most of
a compilation and release the GIL. Later launches find the kernels compiled.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs

from .cache_keys import precompute_cache_key
from .compile_pool import current_compilers

logger = logging.getLogger("pagespec")

# All cores, but not hundreds of ptxas processes at a time; a start has a few dozen kernels.
_MAX_THREADS = 16
# Triton 3.6 loads a launcher module per kernel, all with one module name. CPython has one module
# object for those that it has loaded before, so two threads could get each other's launcher.
_LOADING = threading.Lock()


class _Missing:
    """A hook that records the kernels that one thread launches uncompiled, once each.

    Attributes:
        found: the function, then its signature in Triton's format.
    """

    def __init__(self) -> None:
        self._asking = threading.get_ident()
        self._others = current_compilers()
        self.found: dict[tuple[int, str], tuple[Any, str]] = {}

    def __call__(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's ``jit_cache_hook``: whether to skip this compilation and its launch."""
        if threading.get_ident() != self._asking:
            return False
        kernel, form = fn.jit_function, compile["specialization_data"]
        if (id(kernel), form) not in self.found:
            self.found[id(kernel), form] = (kernel, form)
            if self._others is not None:
                self._others.ask(kernel, form)
        return True


def may_skip_launches() -> bool:
    """Whether launches may be skipped now, because the call is within :func:`parallel_build`. Then
    other code must initialise results that serve as indices."""
    return isinstance(knobs.runtime.jit_cache_hook, _Missing)


def pin_triton_cache_dir() -> None:
    """Set TRITON_CACHE_DIR to the folder in use, unless it is set.

    Inductor sets it to another folder when it first compiles a kernel. A start that finds all
    Inductor kernels in the cache would then read Triton's kernels from another folder than the
    previous start wrote them to.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)


@dataclass
class BuildReport:
    """The outcome of a context. ``num_compiled``: kernels that were not in Triton's cache on disk;
    available at its end."""

    num_compiled: int = 0


@contextmanager
def parallel_build(device: torch.device) -> Iterator[BuildReport]:
    """Within the context, this thread's launches of missing kernels do nothing. At its end those
    kernels are compiled and loaded, if possible; otherwise the next launch tries again.

    They are not compiled before the end, because Triton exposes a kernel to other threads before it
    is loaded.

    The code in the context must cope with results that were not written. If other code has set
    Triton's cache hook, launches compile as usual.

    Args:
        device: of the launches; a GPU.
    """
    built = BuildReport()
    if knobs.runtime.jit_cache_hook is not None:
        yield built
        return
    missing = knobs.runtime.jit_cache_hook = _Missing()
    try:
        yield built
    finally:
        knobs.runtime.jit_cache_hook = None
    if missing.found:
        built.num_compiled = _build(list(missing.found.values()), device)


def _build(kernels: Sequence[tuple[Any, str]], device: torch.device) -> int:
    """Return the number of compiled kernels; all of them, if other code has set the hook that
    counts them."""
    was_found: list[bool] = []
    for kernel, _ in kernels:
        precompute_cache_key(kernel)
    others = current_compilers()
    num_compiled = others.wait() if others is not None else 0

    def listen(*, cache_hit: bool, **_: Any) -> None:
        was_found.append(cache_hit)

    def build(kernel: Any, form: str) -> None:
        # Both use the thread's current device.
        with torch.cuda.device(device):
            built = kernel.preload(form)
            with _LOADING:
                built.run  # noqa: B018 - makes the launcher, loads the kernel

    is_ours = knobs.compilation.listener is None
    if is_ours:
        knobs.compilation.listener = listen
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1, len(kernels))
    try:
        with ThreadPoolExecutor(num_threads, "pagespec-build") as pool:
            for future in [pool.submit(build, *each) for each in kernels]:
                error = future.exception()
                if error is not None:
                    logger.info("a kernel is compiled at its first launch: %s", error)
    finally:
        if is_ours:
            knobs.compilation.listener = None
    num_compiled = num_compiled + was_found.count(False) if is_ours else len(kernels)
    logger.info("%d kernels were needed, %d of them compiled", len(kernels), num_compiled)
    return num_compiled
