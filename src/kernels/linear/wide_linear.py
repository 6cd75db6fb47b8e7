"""A linear layer in float32 of 16-bit rows and a 16-bit weight: routers of a mixture of experts.

transformers widens both and multiplies in float32, with a copy of the weight in each step. Products
of 16-bit numbers are exact in float32, so that the matrix units, which sum in float32, compute the
same up to the order of additions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .tuned_tiles import _tile

# One for all numbers of rows: of two, only rounded sums were compared. Narrow, for routers have few
# outputs, and one row's programs are to share them.
_TILE = _tile(16, 16, 256, 4, warps=2)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear(x.float(), weight.float())``, a row's bits the same for all numbers of rows.

    Args:
        x: ``[..., K]``. weight: ``[N, K]``, both of one 16-bit dtype.

    Returns:
        float32 ``[..., N]``, contiguous.
    """
    if not x.is_cuda:
        return F.linear(x.float(), weight.float())
    from .matmul import matmul

    rows = x.reshape(-1, x.shape[-1])
    out = matmul(rows, weight, tile=_TILE, out_dtype=torch.float32)
    return out.view(*x.shape[:-1], len(weight))
