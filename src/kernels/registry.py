"""Which kernels serve an operation on an architecture: a table, read from :mod:`.families`.

A family is a module of :mod:`.families` for one generation of hardware. Its ``IMPLEMENTATIONS``
name operations, formats and architectures, and where the functions stand. Kernels that run on every
GPU are no entries: a caller uses them where :meth:`Registry.find` returns None. So a new generation
is new kernels and one new family; no caller changes.

Nothing is imported before it is used: Triton and its Gluon are not installed everywhere.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

_GLUON_VERSIONS = ("3.6.", "3.7.")  # of Triton; Gluon is an experiment of its authors
_NO_FUNCTIONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Arch:
    """An architecture that kernels are written for.

    Attributes:
        name: "sm" and the compute capability of an NVIDIA GPU, as "sm90"; else "cpu".
        has_gluon: whether the installed Triton has the Gluon that our kernels are written in.
    """

    name: str
    has_gluon: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Arch:
        if device.type != "cuda":
            return CPU
        major, minor = torch.cuda.get_device_capability(device)
        return cls(f"sm{major}{minor}", is_gluon_known())


CPU = Arch("cpu")


@cache
def is_gluon_known() -> bool:
    """Whether the installed Triton has the Gluon that our kernels are written in."""
    import triton

    return str(triton.__version__).startswith(_GLUON_VERSIONS)


@dataclass(frozen=True, slots=True)
class Implementation:
    """What serves an operation on some architectures.

    Attributes:
        operation: as callers name it. format: of weights, caches or rows; "" for any.
        archs: names of :class:`Arch`.
        functions: "module:function" by the name that callers use, modules counted from
            ``pagespec.kernels``. None for formats of weights, which only say where they are served.
        needs_gluon: whether the functions need Gluon.
    """

    operation: str
    format: str
    archs: tuple[str, ...]
    functions: Mapping[str, str] = field(default_factory=lambda: _NO_FUNCTIONS, hash=False)
    needs_gluon: bool = False

    def serves(self, arch: Arch) -> bool:
        return arch.name in self.archs and (arch.has_gluon or not self.needs_gluon)

    def function(self, name: str) -> Callable[..., Any]:
        """The function of that name; its module is imported at first use."""
        module, _, attribute = self.functions[name].partition(":")
        found: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), attribute)
        return found


class Registry:
    """Implementations in the order of preference."""

    def __init__(self, implementations: tuple[Implementation, ...]) -> None:
        self._implementations = implementations

    def find(self, operation: str, format: str, arch: Arch) -> Implementation | None:
        """The first that serves; None where the kernels for every device are to be used."""
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
        """Inside, ``first`` are preferred to all others, and operations in ``without`` have no
        implementation: for tests and benchmarks that compare implementations."""
        before = self._implementations
        kept = tuple(entry for entry in before if entry.operation not in without)
        self._implementations = (*first, *kept)
        try:
            yield
        finally:
            self._implementations = before


def _all_families() -> tuple[Implementation, ...]:
    from . import families

    found: list[Implementation] = []
    for module in sorted(pkgutil.iter_modules(families.__path__), key=lambda m: m.name):
        found += import_module(f"{families.__name__}.{module.name}").IMPLEMENTATIONS
    return tuple(found)


@cache
def registry() -> Registry:
    """Of all families."""
    return Registry(_all_families())
