"""Make Triton's cache keys independent of the compile order (a workaround for a bug of Triton <=
3.6).

A kernel's name is a digest of its source, of the functions that it calls, and of the constants that
all of them read. Triton up to 3.6 looks for a function's constants before it has read the function.
So they are missing, unless another kernel that calls it was compiled before. Parallel compilation
has no fixed order, and the next start would look for half of the kernels under other names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable


def read_triton_early() -> threading.Thread:
    """Compute the digest of Triton's files in a thread. All names contain it, and one file has 400
    MB, so this takes half a second or more. The digest is available once the thread is joined."""
    thread = threading.Thread(target=triton_key, daemon=True)
    thread.start()
    return thread


def precompute_cache_key(kernel: Any) -> None:
    """Let Triton read everything that ``kernel`` calls before ``kernel`` itself.

    Args:
        kernel: a Triton or Gluon function.
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
    """Triton functions named in the code of ``fn``, and perhaps some that only share a name."""
    names = fn.__code__.co_names
    for name in names:
        value = fn.__globals__.get(name)
        found = [getattr(value, n, None) for n in names] if isinstance(value, ModuleType) else []
        for each in (value, *found):
            if isinstance(each, JITCallable) and hasattr(each.fn, "__code__"):
                yield each
