"""Rows quantised to e4m3 by token and 128 channels, in Triton: alone, or with what makes them.

How they are rounded: :mod:`.e4m3_groups`. The norm and the gated activation (:mod:`.rms_norm`,
:mod:`.activation`) round their results before they quantise them, so joining changes no bits.
"""

from __future__ import annotations

from torch import Tensor

from . import activation, rms_norm
from .e4m3_groups import QuantizedRows, empty_rows


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Of ``x [..., K]`` as rows, which may be strided."""
    return act_mul_quantize(x, x, "none")


def act_mul_quantize(gate: Tensor, up: Tensor, kind: str) -> QuantizedRows:
    """Of :func:`.dispatch.act_mul`."""
    out = _empty_like(gate)
    activation.launch(gate, up, kind, *out)
    return out


def rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: str
) -> tuple[QuantizedRows, Tensor]:
    """(the first result of :func:`.dispatch.add_rms_norm`, quantised; its second); without a
    residual that of :func:`.dispatch.rms_norm`, and ``x``."""
    out = _empty_like(x)
    return out, rms_norm.launch(x, residual, weight, eps, form, *out)


def _empty_like(x: Tensor) -> QuantizedRows:
    return empty_rows(x.numel() // x.shape[-1], x.shape[-1], x.device)
