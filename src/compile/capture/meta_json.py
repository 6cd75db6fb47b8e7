"""Serialises the fake tensors that Dynamo recorded for a graph's results, as JSON, and reads them.

Kept are shape, strides, dtype and device of each fake tensor, which of them share memory or are one
object, and the symbols that stand for sizes. Two equal records are never made one: a compiler that
saw one tensor twice would leave out an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._guards import Source as GuardSource
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._mode_utils import no_dispatch
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo

from ..fx.fake_tensors import Layout, expressions
from ..fx.nodes import PLAIN

_SYMPY = {name: getattr(sympy, name) for name in ("Add", "Mul", "Pow")} | {
    name: getattr(sympy_functions, name) for name in ("FloorDiv", "Mod", "PythonMod", "CleanDiv")
}


class NotSerializable(Exception):
    """The graph holds something that has no form in a file."""


class _Named(GuardSource):
    """Where a size was read, by the name Dynamo gave it: the symbol's name is made from it."""

    def __init__(self, name: str) -> None:
        self._text = name

    @property
    def _name_template(self) -> str:
        return self._text


class ResultEncoder:
    """What Dynamo recorded about results, as JSON data. One for a graph, in its order."""

    def __init__(self) -> None:
        self._constants: dict[int, str] = {}
        # Ids stay taken: the graph holds the tensors.
        self._tensors: dict[int, int] = {}
        self._storages: dict[int, tuple[int, torch.dtype]] = {}
        self._hints: dict[sympy.Symbol, int] = {}
        self._shape_env: ShapeEnv | None = None

    def constant(self, fake: Any, name: str) -> None:
        """Say that ``fake`` stands for the parameter or buffer ``name``."""
        self._constants[id(fake)] = name

    def value(self, value: Any) -> Any:
        """Of one result: a fake tensor, a size, or several in a tuple or list."""
        if isinstance(value, FakeTensor):
            return self._tensor(value)
        if isinstance(value, torch.SymInt):
            return ["size", self._size(value)]
        if isinstance(value, torch.Size):
            return ["shape", *map(self._size, value)]
        if isinstance(value, (tuple, list)):
            # A tuple with names for its parts (of topk, sort) is read by number in a graph.
            return [("list", "tuple")[isinstance(value, tuple)], *map(self.value, value)]
        if type(value) in PLAIN:
            return ["plain", value]
        raise NotSerializable(f"result {value!r}")

    def _tensor(self, fake: FakeTensor) -> Any:
        if id(fake) in self._tensors:
            return ["same", self._tensors[id(fake)]]
        number = self._tensors[id(fake)] = len(self._tensors)
        if fake.layout != torch.strided or fake.is_conj() or fake.is_neg() or fake.is_inference():
            raise NotSerializable(f"result {fake!r}")
        storage = fake.untyped_storage()._cdata
        base, base_dtype = self._storages.setdefault(storage, (number, fake.dtype))
        if base_dtype != fake.dtype:
            raise NotSerializable(f"one memory read as two dtypes: {fake!r}")
        if id(fake) in self._constants:
            return ["constant", self._constants[id(fake)]]
        offset = self._size(fake.storage_offset())
        if base == number and offset != 0:
            raise NotSerializable(f"a part of a tensor that is not there: {fake!r}")
        shape = [self._size(size) for size in fake.shape]
        strides: list[Any] | None = [self._size(step) for step in fake.stride()]
        if base == number and expressions(fake.stride()) == _contiguous(fake.shape):
            strides = None
        dtype, device = str(fake.dtype).removeprefix("torch."), str(fake.device)
        return ["tensor", base, dtype, device, shape, strides, offset, fake.requires_grad]

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return int(size)
        self._shape_env = size.node.shape_env
        if isinstance(size.node._expr, sympy.Symbol):
            if size.node.hint is None:
                raise NotSerializable(f"size {size}, which depends on data")
            self._hints[size.node._expr] = int(size.node.hint)
        return self._expression(size.node.expr)

    def _expression(self, value: Any) -> Any:
        if isinstance(value, sympy.Integer):
            return int(value)
        if isinstance(value, sympy.Symbol):
            return value.name
        name = type(value).__name__
        if _SYMPY.get(name) is not type(value):
            raise NotSerializable(f"size {value}")
        return [name, *map(self._expression, value.args)]

    def symbols(self) -> list[Any]:
        """In the order in which they were made, which their names depend on."""
        if self._shape_env is None:
            return []
        found = []
        for symbol, sources in self._shape_env.var_to_sources.items():
            bounds = self._shape_env.var_to_range[symbol]
            if symbol not in self._hints or not sources:
                raise NotSerializable(f"size {symbol}")
            upper = None if bounds.upper is int_oo else int(bounds.upper)
            hint = self._hints.pop(symbol)
            found.append([symbol.name, sources[0].name, hint, int(bounds.lower), upper])
        if self._hints:
            raise NotSerializable(f"sizes {self._hints}")
        return found


class ResultDecoder:
    """The inverse, with new symbols and in a mode of its own."""

    def __init__(
        self,
        symbols: Iterable[Any],
        constants: dict[str, Tensor],
    ) -> None:
        # As Dynamo's own for a full graph.
        env: Any = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self._mode = FakeTensorMode(shape_env=env)
        self._constants = constants
        self._tensors: list[FakeTensor] = []
        # What each of them was made of, and the layouts of what was made so before.
        self._recipes: list[Any] = []
        self._layouts: dict[Any, Layout] = {}
        self._sizes: dict[str, Any] = {}
        self._symbols: dict[str, Any] = {}
        for name, source, hint, lower, upper in symbols:
            symbol = env.create_symbol(hint, _Named(source), DimDynamic.DYNAMIC)
            bounds = (lower, int_oo if upper is None else upper)
            known = env.var_to_range[symbol]
            # A comparison of expressions, which takes half of the time.
            if (known.lower, known.upper) != bounds:
                env.constrain_symbol_range(symbol, *bounds)
            self._symbols[name] = symbol

    def value(self, value: list[Any]) -> Any:
        """Of what :meth:`ResultEncoder.value` returned, in the same order."""
        kind, *parts = value
        if kind == "tensor":
            self._tensors.append(self._tensor(*parts))
            return self._tensors[-1]
        if kind == "constant":
            fake = self._mode.from_tensor(self._constants[parts[0]], static_shapes=True)
            self._tensors.append(fake)
            self._recipes.append(parts[0])
            return fake
        if kind == "same":
            return self._tensors[parts[0]]
        if kind == "size":
            return self._size(parts[0])
        if kind == "shape":
            return torch.Size([self._size(part) for part in parts])
        if kind == "plain":
            return parts[0]
        make: Any = {"tuple": tuple, "list": list}[kind]
        return make([self.value(part) for part in parts])

    def _tensor(self, base: int, *parts: Any) -> FakeTensor:
        whole = self._tensors[base] if base < len(self._tensors) else None
        num_bytes = () if whole is None else expressions([whole.untyped_storage().nbytes()])
        recipe = (None if whole is None else self._recipes[base], *num_bytes, repr(parts))
        self._recipes.append(recipe)
        layout = self._layouts.get(recipe)
        if layout is not None:
            return layout.new() if whole is None else layout.within(whole)
        fake = self._first(whole, *parts)
        layout = Layout.of(fake)
        # A part that lies behind what was recorded of a whole makes it grow. Each has to.
        if whole is None or num_bytes == expressions([layout.num_bytes]):
            self._layouts[recipe] = layout
        return fake

    def _first(
        self,
        whole: FakeTensor | None,
        dtype_name: str,
        device: str,
        shape: list[Any],
        strides: list[Any] | None,
        offset: Any,
        requires_grad: bool,
    ) -> FakeTensor:
        dtype: torch.dtype = getattr(torch, dtype_name)
        sizes = [self._size(size) for size in shape]
        steps = [self._size(step) for step in strides or ()]
        # Half as long as by a call under the mode.
        with no_dispatch():
            if whole is not None:
                made = torch.empty(0, dtype=dtype, device="meta")
                made.set_(whole.untyped_storage(), self._size(offset), sizes, steps)
            elif strides is None:
                made = torch.empty(sizes, dtype=dtype, device="meta")
            else:
                made = torch.empty_strided(sizes, steps, dtype=dtype, device="meta")
            fake = FakeTensor(self._mode, made, torch.device(device))
        if requires_grad:
            fake.requires_grad_()
        return fake

    def _size(self, size: Any) -> Any:
        if isinstance(size, int):
            return size
        key = repr(size)
        if key not in self._sizes:
            env: Any = self._mode.shape_env
            self._sizes[key] = env.create_symintnode(self._expression(size), hint=None)
        return self._sizes[key]

    def _expression(self, value: Any) -> Any:
        if isinstance(value, int):
            return sympy.Integer(value)
        if isinstance(value, str):
            return self._symbols[value]
        return _SYMPY[value[0]](*map(self._expression, value[1:]))


def _contiguous(shape: Iterable[Any]) -> tuple[Any, ...]:
    """The strides that torch gives a new tensor of this shape."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(expressions(shape)):
        strides.insert(0, step)
        # Compared as integers and expressions, with no guard and no torch.SymInt.
        step = step * size
    return tuple(strides)
