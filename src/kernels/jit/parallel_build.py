"""Compiles the Triton kernels of a start in parallel.

The first launch of a kernel blocks while it compiles. Inside the block such launches are recorded
and skipped. Then another process compiles what is missing (:mod:`.compile_pool`), if there
is one, and threads of this process load it, or compile it, too: most of a compilation is LLVM and
the assembler, which leave Python alone. What runs later finds the kernels made.
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

# Every core, but not hundreds of assemblers at a time; a start has some dozen kernels.
_MAX_THREADS = 16
# Triton 3.6 loads a launcher per kernel, and all as modules of one name. CPython has one module
# object for those that it has loaded before, so that two threads could take each other's launcher.
_LOADING = threading.Lock()


class _Missing:
    """A hook that records the kernels that one thread launches uncompiled, once each.

    Attributes:
        found: what makes it, then the form, as Triton names it.
    """

    def __init__(self) -> None:
        self._asking = threading.get_ident()
        self._others = current_compilers()
        self.found: dict[tuple[int, str], tuple[Any, str]] = {}

    def __call__(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's ``jit_cache_hook``: whether to leave out this compilation and its launch."""
        if threading.get_ident() != self._asking:
            return False
        kernel, form = fn.jit_function, compile["specialization_data"]
        if (id(kernel), form) not in self.found:
            self.found[id(kernel), form] = (kernel, form)
            if self._others is not None:
                self._others.ask(kernel, form)
        return True


def may_skip_launches() -> bool:
    """Whether launches made now may be left out, as in a block of :func:`parallel_build`: then what
    is to be used as an index has to be made one by other means."""
    return isinstance(knobs.runtime.jit_cache_hook, _Missing)


def pin_triton_cache_dir() -> None:
    """Set TRITON_CACHE_DIR to the folder in use, unless it is set.

    Inductor sets it to another folder when it first compiles a kernel. A start that finds all of
    Inductor's kernels in the cache would then read Triton's from another folder than the start
    before wrote them to.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)


@dataclass
class BuildReport:
    """What became of a block. ``num_compiled``: kernels that were not in Triton's cache on disk;
    known at its end."""

    num_compiled: int = 0


@contextmanager
def parallel_build(device: torch.device) -> Iterator[BuildReport]:
    """In this block, launches by this thread of kernels that are not there yet do nothing. At its
    end those kernels are compiled and loaded, as far as that works: the next launch tries again.

    Not before its end, for Triton shows a kernel to other threads before it is loaded.

    The block must cope with results that were not written. If something else has its hook in
    Triton's cache already, launches compile as ever.

    Args:
        device: of the launches, a GPU.
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
    """Returns how many were compiled; all of them, if something else listens to that already."""
    was_found: list[bool] = []
    for kernel, _ in kernels:
        precompute_cache_key(kernel)
    others = current_compilers()
    num_compiled = others.wait() if others is not None else 0

    def listen(*, cache_hit: bool, **_: Any) -> None:
        was_found.append(cache_hit)

    def build(kernel: Any, form: str) -> None:
        # Both look for the thread's current device.
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
