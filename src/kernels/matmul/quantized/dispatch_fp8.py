"""Linear layers with FP8 weights on a GPU: rows are quantised, per token and 128 channels, and
multiplied on the FP8 matrix units.

The bits of a row do not depend on the number of rows: see :mod:`.matmul_fp8` for the order of
summation and :mod:`...fused.quantize_rows` for the rounding. A preceding norm or gated activation
may quantise its own result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...device import Gpu
from ...fused import quantize_rows as rows_of
from ...fused.e4m3_groups import QuantizedRows
from ...registry import registry
from .matmul_fp8 import matmul
from .quantized_weight import BLOCK, Fp8Weight
from .tiles_fp8 import choose_fp8_tile


def pack(weight: Fp8Weight) -> tuple[Tensor, Tensor]:
    """(values, scales) in the form that these functions take: scales are float32 ``[ceil(N / S),
    ceil(K / 128) or 1]``. S is 128 if each 128 outputs share their scales, else 1."""
    values, scales = weight
    if values.is_cuda:
        values = values.view(torch.float8_e4m3fn)
    firsts = scales[::BLOCK]
    if torch.equal(firsts.repeat_interleave(BLOCK, 0)[: len(scales)], scales):
        scales = firsts.contiguous()
    return values, scales


def multiply(rows: QuantizedRows, like: Tensor, *weights: Any) -> Tensor:
    """``[..., N]`` with the leading dims and the dtype of ``like``.

    Args:
        weights: values and scales of a weight, and its bias or None. Before them may come values
            and scales of gate and up; then the matmul with the last weight takes their activation
            as its input.
    """
    *gate_up, values, scales, bias = weights
    if gate_up:
        rows = _gated(rows, like.dtype, *gate_up)
    out = _multiply(rows, like.dtype, values, scales, bias)
    return out.view(*like.shape[:-1], len(values))


def _multiply(
    rows: QuantizedRows, dtype: torch.dtype, values: Tensor, scales: Tensor, bias: Tensor | None
) -> Tensor:
    """``[M, N]``."""
    num_rows, (num_outs, k_size) = len(rows.values), values.shape
    shared = 1 if len(scales) == num_outs else BLOCK
    has_whole_blocks = shared == BLOCK and num_outs % BLOCK == 0
    if bias is None and dtype == torch.bfloat16 and (has_whole_blocks or scales.shape[1] == 1):
        card = Gpu.of(values.device)
        by_arch = registry().find("matmul", "fp8", card.arch)
        if by_arch is not None:
            tile = by_arch.function("choose_tile")(num_rows, num_outs, k_size, card)
            if tile is not None:
                out: Tensor = by_arch.function("matmul")(
                    rows, values, scales, shared=shared, tile=tile
                )
                return out
    of_any = choose_fp8_tile(num_rows, num_outs)
    return matmul(rows, values, scales, bias, dtype, shared=shared, tile=of_any)


def linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of ``x [..., K]``, quantised, with a weight from :func:`pack`.

    Returns:
        ``[..., N]`` in the dtype of x.
    """
    return multiply(rows_of.quantize_rows(x), x, values, scales, bias)


def linear_of_rows(
    rows: QuantizedRows,
    dtype: torch.dtype,
    num_dims: int,
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """:func:`linear` of ``x [1, ..., M, K]``, already quantised, of ``dtype`` and that many
    dims."""
    out = _multiply(rows, dtype, values, scales, bias)
    return out.view(*(1,) * (num_dims - 2), *out.shape)


def norm_linear(x: Tensor, weight: Tensor, eps: float, form: str, *weights: Any) -> Tensor:
    """:func:`multiply` of :func:`.dispatch.rms_norm`, whose arguments come first."""
    rows, _ = rows_of.rms_norm_quantize(x, None, weight, eps, form)
    return multiply(rows, x, *weights)


def add_norm_linear(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: str, *weights: Any
) -> tuple[Tensor, Tensor]:
    """(:func:`multiply` of the first result of :func:`.dispatch.add_rms_norm`, its second)."""
    rows, hidden = rows_of.rms_norm_quantize(x, residual, weight, eps, form)
    return multiply(rows, x, *weights), hidden


def act_linear(gate: Tensor, up: Tensor, kind: str, *weights: Any) -> Tensor:
    """:func:`multiply` of :func:`.dispatch.act_mul`, whose arguments come first."""
    return multiply(rows_of.act_mul_quantize(gate, up, kind), gate, *weights)


def mlp(x: Tensor, *weights: Any) -> Tensor:
    """:func:`multiply` of ``x [..., K]``, quantised, by gate and up, silu, and a last weight."""
    return multiply(rows_of.quantize_rows(x), x, *weights)


def _gated(
    rows: QuantizedRows, dtype: torch.dtype, values: Tensor, scales: Tensor
) -> QuantizedRows:
    """``silu(gate) * up`` of the halves of a matmul, quantised: in the matmul's epilogue or by a
    separate kernel, with the same bits."""
    num_outs, k_size = values.shape
    is_like = dtype == torch.bfloat16 and scales.shape == (num_outs / BLOCK, k_size / BLOCK)
    card = Gpu.of(values.device)
    by_arch = registry().find("gated_matmul", "fp8", card.arch) if is_like else None
    if by_arch is not None:
        tile = by_arch.function("choose_tile")(len(rows.values), num_outs, k_size, card)
        if tile is not None:
            gated: QuantizedRows = by_arch.function("matmul")(rows, values, scales, tile=tile)
            return gated
    gate, up = _multiply(rows, dtype, values, scales, None).chunk(2, -1)
    return rows_of.act_mul_quantize(gate, up, "silu")
