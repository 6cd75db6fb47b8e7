"""Makes Triton's cache keys independent of compile order (works around a bug of Triton <= 3.6).

A kernel's name is a digest of its source, of the functions it calls, and of the constants that all
of them read. Triton up to 3.6 looks for a function's constants before it has read the function: so
they are missing, unless another kernel that calls it was compiled before. Kernels that are compiled
in parallel come in any order, and the next start would then look for half of them under other
names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable


def read_triton_early() -> threading.Thread:
    """Compute the digest of Triton's files in a thread. All names contain it, and one file has
    400 MB: half a second or more. It is known once the thread is joined."""
    thread = threading.Thread(target=triton_key, daemon=True)
    thread.start()
    return thread


def precompute_cache_key(kernel: Any) -> None:
    """Let Triton read all that ``kernel`` calls before ``kernel`` itself.

    Args:
        kernel: a function of Triton or Gluon.
    """
    _settle(kernel, set())


def _settle(function: Any, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    for called in _called(function.fn):
        _settle(called, seen)
    function.cache_key  # noqa: B018 - Triton keeps what it finds


def _called(fn: Any) -> Iterator[Any]:
    """Triton's functions that the code of ``fn`` names, and perhaps some that only share a name."""
    names = fn.__code__.co_names
    for name in names:
        value = fn.__globals__.get(name)
        found = [getattr(value, n, None) for n in names] if isinstance(value, ModuleType) else []
        for each in (value, *found):
            if isinstance(each, JITCallable) and hasattr(each.fn, "__code__"):
                yield each
