"""Kernels for weights that stay quantised on a GPU: a table by the format of the weight.

Where a format is served, :mod:`...kernels.families` say.
"""

from __future__ import annotations

from functools import partial

import torch

from ...kernels.linear.plan_cache import LinearPlans
from ...kernels.quantized import dispatch_fp8, dispatch_int4
from ...kernels.quantized.int4_packing import pack
from ...kernels.quantized.plan_int4 import RowLimits
from ...kernels.quantized.quantized_weight import (
    GROUP,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
)
from .quantize_linear import Kernel, KernelTable


def _fp8(weight: QuantizedWeight) -> Kernel:
    assert isinstance(weight, Fp8Weight)
    return Kernel(dispatch_fp8.linear, dispatch_fp8.pack(weight), pack=dispatch_fp8.pack)


def _integers(limits: RowLimits, weight: QuantizedWeight) -> Kernel:
    assert isinstance(weight, Int4Weight | Int8Weight)
    packed = pack(weight)
    chosen = limits.choose(packed, weight.scales.shape[1] * GROUP)
    data = (*packed[2:], *chosen)
    return Kernel(dispatch_int4.linear, packed[:2], data, dispatch_int4.linear_silu_mul)


def gpu_kernels(dtype: torch.dtype, plans: LinearPlans) -> KernelTable:
    """Args:
    dtype: of the rows that weights are multiplied with.
    plans: of the matmuls with dequantised weights.
    """
    integers = partial(_integers, RowLimits(dtype, plans))
    return {"fp8": _fp8, "int4": integers, "int8": integers}
