"""Serialise the fake tensors that Dynamo recorded for a graph's results as JSON, and read them.

The JSON has shape, strides, dtype and device of each fake tensor, which of them share memory or are
one object, and the symbols that stand for sizes. Two equal records are never merged: a compiler
that saw one tensor twice would omit an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._guards import SLoc
from torch._guards import Source as GuardSource
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo

from ..fx.fake_tensors import expressions
from .results import NotSerializable, ResultReader

_SYMPY = {name: getattr(sympy, name) for name in ("Add", "Mul", "Pow")} | {
    name: getattr(sympy_functions, name) for name in ("FloorDiv", "Mod", "PythonMod", "CleanDiv")
}


class _Named(GuardSource):
    """The source of a size, by the name that Dynamo gave it. The symbol's name is derived from
    it."""

    def __init__(self, name: str) -> None:
        self._text = name

    @property
    def _name_template(self) -> str:
        return self._text


class _ShapeEnv(ShapeEnv):
    """For its messages, torch records the line of the user's code that each symbol comes from. To
    tell that line from its own code it imports Dynamo, Inductor and export. This class records no
    line."""

    def _get_stack_summary(self, *_: Any, **__: Any) -> tuple[SLoc, str]:
        return SLoc("a graph from the disk", None), ""


class ResultEncoder:
    """Dynamo's records of results, as JSON data. One object per graph, in its order.

    Attributes:
        constants: names of parameters and buffers, by the id of their fake tensors.
    """

    def __init__(self) -> None:
        self.constants: dict[int, str] = {}
        # Ids stay unique, because the graph keeps the tensors alive.
        self._tensors: dict[int, int] = {}
        self._storages: dict[int, tuple[int, torch.dtype]] = {}
        self._hints: dict[sympy.Symbol, int] = {}
        self._read: set[sympy.Symbol] = set()
        self._shape_env: ShapeEnv | None = None

    def data(self, value: Any) -> Any:
        """Data of a fake tensor, a size or a shape; else None."""
        if isinstance(value, FakeTensor):
            return self._tensor(value)
        if isinstance(value, torch.SymInt):
            return ["size", self._size(value)]
        if isinstance(value, torch.Size):
            return ["shape", *map(self._size, value)]
        return None

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
        if id(fake) in self.constants:
            return ["constant", self.constants[id(fake)]]
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
            self._read.add(value)
            return value.name
        name = type(value).__name__
        if _SYMPY.get(name) is not type(value):
            raise NotSerializable(f"size {value}")
        return [name, *map(self._expression, value.args)]

    def symbols(self) -> list[Any]:
        """The symbols of results, in the order of their creation, which determines their names."""
        if self._shape_env is None:
            return []
        found = []
        for symbol, sources in self._shape_env.var_to_sources.items():
            if symbol not in self._read | self._hints.keys():
                continue  # of an input that the graph does not read
            bounds = self._shape_env.var_to_range[symbol]
            if symbol not in self._hints or not sources:
                raise NotSerializable(f"size {symbol}")
            upper = None if bounds.upper is int_oo else int(bounds.upper)
            hint = self._hints.pop(symbol)
            found.append([symbol.name, sources[0].name, hint, int(bounds.lower), upper])
        if self._hints:
            raise NotSerializable(f"sizes {self._hints}")
        return found


class ResultDecoder(ResultReader):
    """The inverse, with new symbols and its own mode."""

    _operations = _SYMPY

    def __init__(self, symbols: Iterable[Any], constants: dict[str, Tensor]) -> None:
        # As in Dynamo's own for a full graph.
        env: Any = _ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self._mode = FakeTensorMode(shape_env=env)
        super().__init__(symbols, constants)

    def _make_symbols(self, symbols: Iterable[Any]) -> None:
        env: Any = self._mode.shape_env
        for name, source, hint, lower, upper in symbols:
            symbol = env.create_symbol(hint, _Named(source), DimDynamic.DYNAMIC)
            bounds = (lower, int_oo if upper is None else upper)
            known = env.var_to_range[symbol]
            # This comparison of expressions takes half of the time.
            if (known.lower, known.upper) != bounds:
                env.constrain_symbol_range(symbol, *bounds)
            self._symbols[name] = symbol

    def _of_constant(self, constant: Tensor) -> Tensor:
        return self._mode.from_tensor(constant, static_shapes=True)

    def _of_meta(self, made: Tensor, device: torch.device) -> Tensor:
        return FakeTensor(self._mode, made, device)

    def _new_size(self, size: Any) -> Any:
        env: Any = self._mode.shape_env
        return env.create_symintnode(self._expression(size), hint=None)


def _contiguous(shape: Iterable[Any]) -> tuple[Any, ...]:
    """The strides that torch gives a new tensor of this shape."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(expressions(shape)):
        strides.insert(0, step)
        # Compared as integers and expressions, without a guard or a torch.SymInt.
        step = step * size
    return tuple(strides)
