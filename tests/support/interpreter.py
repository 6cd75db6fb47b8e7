"""Make Triton 3.7's interpreter compute as that of 3.9 and as a GPU, and cache repeated work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

_FLOATS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


def numbers(handle: Any) -> Any:
    """The float32 values of a tensor; numpy stores some float types as bit patterns."""
    return _tensor(handle).float().numpy()


def _tensor(handle: Any) -> torch.Tensor:
    dtype = _FLOATS[handle.dtype.scalar]
    tensor = torch.from_numpy(np.ascontiguousarray(handle.data))
    return (tensor.view(dtype) if dtype in _BITS else tensor).reshape(handle.data.shape)


def mend() -> None:
    """Correct the interpreter: the maximum or minimum of NaN and a value is the value, bfloat16
    constants exist, and floats round to the nearest, ties to even."""
    builder: Any = InterpreterBuilder
    cast = builder.cast_impl

    def rounded(self: Any, source: Any, target: Any, _: object = None) -> Any:
        if source.dtype.scalar not in _FLOATS or target.scalar not in _FLOATS:
            return cast(self, source, target)
        dtype = _FLOATS[target.scalar]
        tensor = _tensor(source).to(dtype)
        data = (tensor.view(_BITS[dtype]) if dtype in _BITS else tensor).numpy()
        return TensorHandle(data.astype(_get_np_dtype(target)), target.scalar)

    builder.cast_impl = builder.create_fp_to_fp = rounded
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, x: self.create_fp_trunc(self.get_fp32(x), tl.bfloat16)


def hasten() -> None:
    """Make launches faster, with equal results.

    ``triton.language`` is patched once per launch, not per call of a device function. Overflow
    conditions are computed only if they are asserted, in debug mode. Types and tensors of equal
    shape share one shape object. Operands of equal shape are not broadcast. Constants and ranges
    are made once.
    """
    builder: Any = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = _PatchedOnce(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _np_dtype
    type(builder).create_make_range = _make_range
    _share_shapes()
    _spare_conversions(interpreter.interpreter_semantic)


def _share_shapes() -> None:
    block_type: Any = tl.block_type
    tensor: Any = tl.tensor
    make_type = block_type.__init__
    of_scalar = (tl.tuple([]), tl.constexpr(1))

    @functools.cache
    def shared(shape: tuple[int, ...]) -> Any:
        """A type's shape and number of elements, and a tensor's."""
        of_type = SimpleNamespace()
        make_type(of_type, tl.int8, list(shape))  # refuses what is no shape
        of_tensor = (tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(of_type.numel))
        return of_type.shape, of_type.numel, of_tensor

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        self.shape, self.numel, self.of_tensor = shared(key)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else of_scalar

    block_type.__init__, tensor.__init__ = init_type, init_tensor
    block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")


def _spare_conversions(semantic: Any) -> None:
    broadcast = semantic.broadcast_impl_value
    convert = semantic.binary_op_type_checking_impl
    make_constant = semantic.scalar_constant

    def broadcast_if_shapes_differ(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    def convert_if_types_differ(lhs: Any, rhs: Any, *options: bool) -> tuple[Any, Any]:
        is_division = len(options) == 4
        if is_division or not type(lhs) is type(rhs) is tl.tensor or lhs.dtype.is_ptr():
            return convert(lhs, rhs, *options)
        if lhs.dtype is rhs.dtype and lhs.shape is rhs.shape:
            return lhs, rhs
        return convert(lhs, rhs, *options)

    @functools.cache
    def constant(value: Any, dtype: Any) -> Any:
        made = make_constant(value, dtype)
        made.handle.data.setflags(write=False)  # all launches share it
        return made

    semantic.broadcast_impl_value = broadcast_if_shapes_differ
    semantic.binary_op_type_checking_impl = convert_if_types_differ
    semantic.scalar_constant = constant


def _patch_attr(owner: Any, name: str, member: Any, _: object, scope: Any) -> None:
    """As interpreter._patch_attr, with one call fewer and no copy of the arguments."""
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


class _PatchedOnce:
    """Patches the modules that a function of a kernel names, if they are not patched now."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._languages_of: dict[Any, frozenset[str]] = {}
        self._patched: frozenset[str] = frozenset()

    def __call__(self, fn: Any) -> Any:
        if fn not in self._languages_of:
            named = fn.__globals__.values()
            found = [lang for lang in (tl, tl.core) if any(value is lang for value in named)]
            self._languages_of[fn] = frozenset(lang.__name__ for lang in found)
        languages = self._languages_of[fn]
        if languages <= self._patched:
            return _Scope(lambda: None)
        scope, before = self._patch(fn), self._patched
        self._patched = before | languages

        def restore() -> None:
            scope.restore()
            self._patched = before

        return _Scope(restore)


class _Scope:
    def __init__(self, restore: Callable[[], None]) -> None:
        self.restore = restore


@functools.cache
def _range(start: int, stop: int) -> Any:
    data = np.arange(start, stop, dtype=np.int32)
    data.setflags(write=False)  # all launches share it
    return data


def _make_range(_: object, __: object, start: int, stop: int) -> Any:
    return TensorHandle(_range(start, stop), tl.int32)


@functools.cache
def _np_dtype_of_scalar(dtype: Any) -> Any:
    return _get_np_dtype(dtype)


def _np_dtype(dtype: Any) -> Any:
    """As interpreter._get_np_dtype, whose table is made anew each time it is read."""
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _np_dtype_of_scalar(scalar)
