"""Stand-ins: parameters of a shape and no values, for weights that are held quantised beside.

One NaN in memory. So a module can be built, traced and described as if it had the weight, and what
reads it by mistake computes NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stand_in(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(*shape)


def is_stand_in(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and not any(tensor.stride())
