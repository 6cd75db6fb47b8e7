"""Makes Triton 3.7's interpreter as 3.9's is, where they differ and a GPU is as the latter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

_FLOATS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


def numbers(handle: Any) -> Any:
    """numpy's float32 of a tensor of floats, of which it holds some types as bits."""
    return _tensor(handle).float().numpy()


def _tensor(handle: Any) -> torch.Tensor:
    dtype = _FLOATS[handle.dtype.scalar]
    tensor = torch.from_numpy(np.ascontiguousarray(handle.data))
    return (tensor.view(dtype) if dtype in _BITS else tensor).reshape(handle.data.shape)


def mend() -> None:
    """A maximum or minimum of NaN and a number is the number, there are bfloat16 constants, and
    floats are rounded to the nearest, ties to even."""
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
