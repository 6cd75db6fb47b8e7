"""Read Dynamo's records of a graph's results, with integers for the sizes of a step.

torch's fake tensors import sympy and all of Dynamo. A graph that runs without a compiler does not
need them: tensors on the meta device represent its results, and each symbol is a large prime, which
is no size of any model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ..fx.fake_tensors import Layout, expressions, meta_of

_PRIMES = (
    *(1000003, 1000033, 1000037, 1000039, 1000081, 1000099, 1000117),
    *(1000121, 1000133, 1000151, 1000159, 1000171, 1000183, 1000187),
    *(1000193, 1000199, 1000211, 1000213, 1000231, 1000249),
)  # fmt: skip
_OPERATIONS: dict[str, Callable[..., int]] = {
    "Add": lambda *parts: sum(parts),
    "Mul": lambda *parts: math.prod(parts),
    "Pow": lambda base, exponent: int(base**exponent),
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
}


class NotSerializable(Exception):
    """The graph contains something that has no JSON form."""


class ResultReader:
    """The records of one graph's results, read in its order.

    Args:
        symbols: see :meth:`.ResultEncoder.symbols`.
        constants: the model's parameters and buffers by name.
    """

    _operations: Mapping[str, Callable[..., Any]] = _OPERATIONS

    def __init__(self, symbols: Iterable[Any], constants: dict[str, Tensor]) -> None:
        self._constants = constants
        self._tensors: list[Tensor] = []
        # The data that each of them was made from, and the layouts of those made before.
        self._recipes: list[Any] = []
        self._layouts: dict[Any, Layout] = {}
        self._sizes: dict[str, Any] = {}
        self._symbols: dict[str, Any] = {}
        self._make_symbols(symbols)

    def value(self, kind: str, *parts: Any) -> Any:
        """The value for a result of :meth:`.ResultEncoder.data`, in the same order."""
        if kind == "same":
            return self._tensors[parts[0]]
        if kind == "size":
            return self._size(parts[0])
        if kind == "shape":
            return torch.Size([self._size(part) for part in parts])
        if kind == "tensor":
            fake = self._tensor(*parts)
        elif kind == "constant":
            fake = self._of_constant(self._constants[parts[0]])
            self._recipes.append(parts[0])
        else:
            raise ValueError(f"a result of kind {kind!r}")
        self._tensors.append(fake)
        return fake

    def _tensor(self, base: int, *parts: Any) -> Tensor:
        whole = self._tensors[base] if base < len(self._tensors) else None
        num_bytes = () if whole is None else expressions([whole.untyped_storage().nbytes()])
        recipe = (None if whole is None else self._recipes[base], *num_bytes, repr(parts))
        self._recipes.append(recipe)
        layout = self._layouts.get(recipe)
        if layout is not None:
            return layout.new() if whole is None else layout.within(whole)
        fake = self._first(whole, parts)
        layout = Layout.of(fake)
        # A part after the recorded end of a whole makes the whole grow. Each part must.
        if whole is None or num_bytes == expressions([layout.num_bytes]):
            self._layouts[recipe] = layout
        return fake

    def _first(self, whole: Tensor | None, parts: tuple[Any, ...]) -> Tensor:
        dtype_name, device, shape, strides, offset, requires_grad = parts
        dtype: torch.dtype = getattr(torch, dtype_name)
        sizes = [self._size(size) for size in shape]
        steps = [self._size(step) for step in strides or ()]
        # Takes half as long as a call under the mode.
        with no_dispatch():
            if whole is not None:
                made = torch.empty(0, dtype=dtype, device="meta")
                made.set_(whole.untyped_storage(), self._size(offset), sizes, steps)
            elif strides is None:
                made = torch.empty(sizes, dtype=dtype, device="meta")
            else:
                made = torch.empty_strided(sizes, steps, dtype=dtype, device="meta")
            fake = self._of_meta(made, torch.device(device))
        if requires_grad:
            fake.requires_grad_()
        return fake

    def _size(self, size: Any) -> Any:
        if isinstance(size, int):
            return size
        key = repr(size)
        if key not in self._sizes:
            self._sizes[key] = self._new_size(size)
        return self._sizes[key]

    def _make_symbols(self, symbols: Iterable[Any]) -> None:
        for number, (name, *_) in enumerate(symbols):
            if number == len(_PRIMES):
                raise NotSerializable(f"a graph with more than {number} sizes of a step")
            self._symbols[name] = _PRIMES[number]

    def _new_size(self, size: Any) -> Any:
        return self._expression(size)

    def _expression(self, size: Any) -> Any:
        if isinstance(size, list):
            return self._operations[size[0]](*map(self._expression, size[1:]))
        return self._symbols[size] if isinstance(size, str) else size

    def _of_constant(self, constant: Tensor) -> Tensor:
        return meta_of(constant)

    def _of_meta(self, made: Tensor, device: torch.device) -> Tensor:
        if device.type != "cpu":
            raise NotSerializable(f"a result on {device}")  # the meta device does not show it
        return made
