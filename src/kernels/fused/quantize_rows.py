"""Rows quantised to e4m3 per token and 128 channels, in Triton: alone, or fused with the operation
that computes them.

:mod:`.e4m3_groups` defines the rounding. The norm and the gated activation (:mod:`.rms_norm`,
:mod:`.activation`) round their results before they quantise them, so fusion changes no bits.
"""

from __future__ import annotations

from torch import Tensor

from . import activation, rms_norm
from .e4m3_groups import QuantizedRows, empty_rows


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Quantise ``x [..., K]`` as rows, which may be strided."""
    return act_mul_quantize(x, x, "none")


def act_mul_quantize(gate: Tensor, up: Tensor, kind: str) -> QuantizedRows:
    """Quantise the result of :func:`.dispatch.act_mul`."""
    out = _empty_like(gate)
    activation.launch(gate, up, kind, *out)
    return out


def rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: str
) -> tuple[QuantizedRows, Tensor]:
    """(the first result of :func:`.dispatch.add_rms_norm`, quantised; its second result). Without a
    residual: (the result of :func:`.dispatch.rms_norm`, quantised; ``x``)."""
    out = _empty_like(x)
    return out, rms_norm.launch(x, residual, weight, eps, form, *out)


def _empty_like(x: Tensor) -> QuantizedRows:
    return empty_rows(x.numel() // x.shape[-1], x.shape[-1], x.device)
