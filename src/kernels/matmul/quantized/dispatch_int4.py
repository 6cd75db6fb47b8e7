"""Linear layers with 4-bit or 8-bit weights on a GPU: unpacked in the matmul, or before it.

A matmul of few rows takes the time of reading the weight, and :mod:`.matmul_int4` reads it
quantised. For many rows the weight is dequantised into memory once per call and multiplied as any
weight (:mod:`..dispatch`). Both compute with the same weight values in the same order, so the bits
are equal. They also equal those of a model that stores the weight dequantised in the dtype of its
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..matmul import Tile
from ..tuned_tiles import _tile
from .int4_packing import PackedWeight
from .matmul_int4 import dequantize, matmul

MAX_FUSED_ROWS = 64
"""Up to this row count, unpacking in the matmul was measured to be faster."""


def choose_tile(num_rows: int, num_outs: int, num_inputs: int, has_gate: bool) -> Tile:
    """The fastest of the tiles tried on an H200 (docs/notes/int4.md). The choice changes no
    bits."""
    if num_rows <= 16:
        # Long rows have enough loads in flight even with smaller steps.
        return _tile(16, 32, 256 if num_inputs > 8192 else 512, 4, 4)
    if has_gate and num_outs >= 8192:
        return _tile(64, 128, 128, 4, 8)
    return _tile(64, 32, 256, 3, 4)


def linear(
    x: Tensor,
    words: Tensor,
    numbers: Tensor,
    bias: Tensor | None,
    num_bits: int,
    group: int,
    dtype: str,
    has_minima: bool,
    max_fused_rows: int = MAX_FUSED_ROWS,
    max_custom_rows: int = dispatch.ALL_ROWS,
    *,
    has_gate: bool = False,
) -> Tensor:
    """``F.linear(x, weight, bias)``, x ``[..., K]``, with the fields of a :class:`.PackedWeight` as
    the weight.

    Args:
        max_fused_rows: the largest row count for unpacking in the matmul.
        max_custom_rows: as in :func:`..dispatch.linear`, above that count.
        has_gate: see :func:`linear_silu_mul`.
    """
    weight = PackedWeight(words, numbers, num_bits, group, dtype, has_minima)
    width = x.shape[-1]
    if x.dtype != torch.float32 and 0 < x.numel() <= max_fused_rows * width:
        rows = x.reshape(-1, width)
        num_outs = len(weight.words) // (2 if has_gate else 1)
        tile = choose_tile(len(rows), num_outs, width, has_gate)
        out = matmul(rows, weight, bias, tile=tile, has_gate=has_gate)
        return out.view(*x.shape[:-1], num_outs)
    plain = dequantize(weight, width, x.dtype)
    # The plan is for a matmul without a bias.
    if x.numel() == 0 or (bias is None and x.numel() > max_custom_rows * width):
        # By cuBLAS or :mod:`..sm90.matmul_sm90_many`, which reads the weight after its wait.
        many: Callable[..., Tensor] = dispatch.linear_silu_mul if has_gate else dispatch.linear
        return many(x, plain, bias, 0)
    # The previous kernel has just written the weight.
    return dispatch._ours(x, plain, bias, has_gate, prefetches=False)


def linear_silu_mul(
    x: Tensor, words: Tensor, numbers: Tensor, bias: Tensor | None, *data: Any
) -> Tensor:
    """``silu(gate) * up`` of the halves of :func:`linear`, which also takes ``data``."""
    return linear(x, words, numbers, bias, *data, has_gate=True)
