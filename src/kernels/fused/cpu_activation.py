"""Batch-invariant activations on a CPU: PyTorch's vector code for every element.

PyTorch computes the end of a range with other code than its whole vectors. For some dtypes this
gives other bits, so ranges are padded to whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Whole vectors of any dtype (two AVX-512 vectors of bfloat16 are 64 elements).
_VECTOR_ELEMENTS = 64


# PyTorch splits longer ranges between threads, at any element.
_GRAIN_ELEMENTS = 32_768


ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "elu": F.elu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
}
"""Functions whose vector code and code for the end of a range differ, in some dtype."""


def elementwise(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply a function to every element, with vector code only. Each row is a whole number of
    vectors, and no call is so long that it could be split between threads within a row.

    Args:
        name: a key of ``ELEMENTWISE``.
        x: ``[..., width]``, floating point. args, kwargs: further arguments, none of them a tensor.

    Returns:
        ``[..., width]``, contiguous.
    """
    function = ELEMENTWISE[name]
    if not x.numel():
        return function(x, *args, **kwargs)
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    missing = -width % _VECTOR_ELEMENTS
    if missing:
        rows = F.pad(rows, (0, missing))
    rows = rows.contiguous()
    if rows.numel() <= _GRAIN_ELEMENTS or torch.get_num_threads() == 1:
        out = function(rows, *args, **kwargs)
    else:
        num_rows = max(1, _GRAIN_ELEMENTS // rows.shape[1])
        out = torch.cat([function(part, *args, **kwargs) for part in rows.split(num_rows)])
    return out[:, :width].contiguous().view(x.shape)
