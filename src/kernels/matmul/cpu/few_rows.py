"""CPU matmul of few rows, where reading the weight takes most of the time.

MKL's sgemm packs the weight on every call. For 2 to 32 rows this costs up to four times as much as
reading it. Measured with 2 threads on an AVX2 machine, weight 49,152 x 576 in float32 (113 MB), ms:

=====  ========  ===============  =================
rows   F.linear  oneDNN, unpacked  weight @ input.T
=====  ========  ===============  =================
1      8.9       4.5               8.7
2      18.6      7.9               4.9
4      19.7      8.0               5.5
8      17.8      9.7               9.0
16     23.5      12.9              14.6
32     30.0      18.6              17.9
=====  ========  ===============  =================
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MIN_TRANSPOSED_ROWS = 2
_MAX_TRANSPOSED_ROWS = 8
_MAX_ROWS = 64


def linear_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` for float32 on a CPU; the same result up to rounding.

    Args:
        x: ``[..., in]``. weight: ``[out, in]``, contiguous. bias: ``[out]`` or None.

    Returns:
        ``[..., out]``, contiguous.
    """
    num_rows = x.numel() // x.shape[-1]
    if num_rows > _MAX_ROWS:
        return F.linear(x, weight, bias)
    if _MIN_TRANSPOSED_ROWS <= num_rows <= _MAX_TRANSPOSED_ROWS:
        product = torch.mm(weight, x.reshape(num_rows, -1).t()).t()
        product = product.contiguous()
        if bias is not None:
            product += bias
        return product.view(*x.shape[:-1], product.shape[1])
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
