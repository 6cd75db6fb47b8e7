"""The kernel registry: which kernels implement an operation on an architecture, as listed in
:mod:`.families`.

A family is a module of :mod:`.families` for one hardware generation. Its ``IMPLEMENTATIONS`` list
operations, formats, architectures and the functions that implement them. Kernels that run on every
GPU have no entry: a caller uses them where :meth:`Registry.find` returns None. A new generation
needs new kernels and one new family, and no change in callers.

Modules are imported at first use: Triton and its Gluon are not installed everywhere.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module

from . import families
from .arch import Arch, Implementation


class Registry:
    """Implementations in order of preference."""

    def __init__(self, implementations: tuple[Implementation, ...]) -> None:
        self._implementations = implementations
        # Cache by operation, format and architecture: a step without a graph looks up every layer.
        self._found: dict[tuple[str, str, str, bool], Implementation | None] = {}

    def find(self, operation: str, format: str, arch: Arch) -> Implementation | None:
        """The first implementation that applies. None if the generic kernels are to be used."""
        key = operation, format, arch.name, arch.has_gluon
        if key not in self._found:
            self._found[key] = self._search(operation, format, arch)
        return self._found[key]

    def _search(self, operation: str, format: str, arch: Arch) -> Implementation | None:
        for entry in self._implementations:
            if (entry.operation, entry.format) == (operation, format) and entry.serves(arch):
                return entry
        return None

    def archs_of(self, operation: str, format: str) -> tuple[str, ...]:
        """Names of the architectures with an entry, sorted."""
        entries = (
            e for e in self._implementations if (e.operation, e.format) == (operation, format)
        )
        return tuple(sorted({name for entry in entries for name in entry.archs}))

    @contextmanager
    def changed(
        self, *, first: tuple[Implementation, ...] = (), without: tuple[str, ...] = ()
    ) -> Iterator[None]:
        """Within the context, prefer ``first`` to all others, and drop the implementations of
        operations in ``without``. For tests and benchmarks that compare implementations."""
        before = self._implementations
        kept = tuple(entry for entry in before if entry.operation not in without)
        self._implementations, self._found = (*first, *kept), {}
        try:
            yield
        finally:
            self._implementations, self._found = before, {}


def _all_families() -> tuple[Implementation, ...]:
    found: list[Implementation] = []
    for module in sorted(pkgutil.iter_modules(families.__path__), key=lambda m: m.name):
        found += import_module(f"{families.__name__}.{module.name}").IMPLEMENTATIONS
    return tuple(found)


@cache
def registry() -> Registry:
    """The registry of all families."""
    return Registry(_all_families())
