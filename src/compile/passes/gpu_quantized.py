"""Kernels for weights that stay quantised on a GPU: a table by the format of the weight.

The formats that are let in at the door are :data:`.quantized_load.GPU_FORMATS`.
"""

from __future__ import annotations

from ...kernels.linear import dispatch_fp8
from ...kernels.linear.fp8 import Fp8Weight
from ...kernels.linear.quantized_weight import QuantizedWeight
from .quantize_linear import Kernel, KernelTable


def _fp8(weight: QuantizedWeight) -> Kernel:
    assert isinstance(weight, Fp8Weight)
    return Kernel(dispatch_fp8.linear, dispatch_fp8.pack(weight))


GPU_KERNELS: KernelTable = {"fp8": _fp8}
