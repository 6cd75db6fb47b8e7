"""The architectures that kernels are written for, and the functions that implement an operation on
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

import torch

_GLUON_VERSIONS = ("3.6.", "3.7.")  # of Triton; Gluon is experimental
_NO_FUNCTIONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Arch:
    """An architecture that kernels are written for.

    Attributes:
        name: "cpu", or "sm" and the compute capability of an NVIDIA GPU, such as "sm90".
        has_gluon: whether the installed Triton has the Gluon version that the kernels require.
    """

    name: str
    has_gluon: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Arch:
        if device.type != "cuda":
            return CPU
        return cls.of_capability(*torch.cuda.get_device_capability(device))

    @classmethod
    def of_capability(cls, major: int, minor: int) -> Arch:
        """The architecture of an NVIDIA GPU with this compute capability."""
        return cls(f"sm{major}{minor}", is_gluon_known())


CPU = Arch("cpu")


@cache
def is_gluon_known() -> bool:
    """Whether the installed Triton has the Gluon version that the kernels require."""
    import triton

    return str(triton.__version__).startswith(_GLUON_VERSIONS)


@dataclass(frozen=True, slots=True)
class Implementation:
    """Functions that implement an operation on some architectures.

    Attributes:
        operation: the name that callers use. format: of weights, caches or rows; "" for any.
        archs: names of :class:`Arch`.
        functions: "module:function" by the name that callers use. Module names are relative to
            ``pagespec.kernels``. Empty for formats of weights, whose entries only list
            architectures.
        needs_gluon: whether the functions require Gluon.
    """

    operation: str
    format: str
    archs: tuple[str, ...]
    functions: Mapping[str, str] = field(default_factory=lambda: _NO_FUNCTIONS, hash=False)
    needs_gluon: bool = False

    def serves(self, arch: Arch) -> bool:
        return arch.name in self.archs and (arch.has_gluon or not self.needs_gluon)

    def function(self, name: str) -> Callable[..., Any]:
        """The function with that name. Its module is imported at first use."""
        module, attribute = _module_and_name(self.functions[name])
        found: Callable[..., Any] = getattr(module, attribute)
        return found


@cache
def _module_and_name(function: str) -> tuple[ModuleType, str]:
    module, _, attribute = function.partition(":")
    return import_module(f"{__package__}.{module}"), attribute
