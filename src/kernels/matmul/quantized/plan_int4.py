"""Choose, per weight shape, the row count up to which a matmul unpacks a 4-bit or 8-bit weight
itself.

Its bits must equal those of the method for many rows: a matmul with the dequantised weight. The
bits are compared on this GPU, as in :mod:`..plan`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...jit.parallel_build import parallel_build
from .. import dispatch
from ..plan import SWEEP_ROWS, differing_counts
from ..plan_cache import LinearPlans
from . import dispatch_int4
from .dispatch_int4 import MAX_FUSED_ROWS
from .int4_packing import PackedWeight
from .matmul_int4 import dequantize

_LEAST_INPUTS = 512


class RowLimits:
    """Row limits of the matmuls with packed weights, one pair per shape.

    Args:
        dtype: dtype of the rows. plans: plans of matmuls with dequantised weights.
    """

    def __init__(self, dtype: torch.dtype, plans: LinearPlans) -> None:
        self._dtype, self._plans = dtype, plans
        self._known: dict[object, tuple[int, int]] = {}

    def choose(self, weight: PackedWeight, num_inputs: int) -> tuple[int, int]:
        """``max_fused_rows`` and ``max_custom_rows`` of :func:`.dispatch_int4.linear`.

        Raises:
            UnsupportedModelError: see :func:`..plan.choose_plan`.
        """
        key = (*weight.words.shape, num_inputs, *weight[2:])
        if key not in self._known:
            with torch.inference_mode():
                self._known[key] = self._find(weight, num_inputs)
        return self._known[key]

    def _find(self, weight: PackedWeight, num_inputs: int) -> tuple[int, int]:
        plain = dequantize(weight, num_inputs, self._dtype)
        self._plans.prepare([(plain, None, False)])
        max_custom_rows = self._plans.max_custom_rows(plain, None, has_gate=False)
        if self._dtype == torch.float32 or num_inputs < _LEAST_INPUTS:
            return 0, max_custom_rows  # no matrix unit, or too little to gain
        if not self._plans.transparent:
            return MAX_FUSED_ROWS, max_custom_rows
        counts = [count for count in SWEEP_ROWS if count <= MAX_FUSED_ROWS]
        data: tuple[Any, ...] = (*weight[2:], MAX_FUSED_ROWS, max_custom_rows)

        def multiply(x: Tensor) -> Tensor:
            return dispatch_int4.linear(x, *weight[:2], None, *data)

        def reference(x: Tensor) -> Tensor:
            return dispatch.linear(x, plain, None, max_custom_rows)

        with parallel_build(plain.device):
            for count in counts:
                multiply(plain.new_empty(count, num_inputs))
        differing = differing_counts(multiply, reference, plain, counts)
        return 0 if differing else MAX_FUSED_ROWS, max_custom_rows
