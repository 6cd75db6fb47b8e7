"""Matmuls whose weights stay quantised, as :func:`.lower_cpu.lower_cpu` lowers them.

Then the float32 weights are given back. Whatever reads such a parameter of the model reads NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...kernels.linear import cpu_quantized
from ..fx.nodes import example, is_linear, linear_operands
from .context import PassContext

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class QuantizedCalls:
    """Calls in place of linear layers, for the weights in ``context.quantized``.

    A weight stays as it is if the context is transparent and a trial with the first weight of its
    shape finds that a row's bits follow the number of rows.
    """

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._packed: dict[Node, tuple[Node, ...] | None] = {}  # None: stays as it is
        self._is_trusted: dict[tuple[object, ...], bool] = {}

    def __call__(self, node: Node) -> _Call | None:
        if not self._context.quantized or not is_linear(node):
            return None
        x, matrix, bias = linear_operands(node)
        weight = self._context.constant(matrix)
        format = None if weight is None else self._context.weight_format(weight)
        if weight is None or format is None:
            return None
        if matrix not in self._packed:
            self._packed[matrix] = self._pack(matrix, weight, format)
        packed = self._packed[matrix]
        if packed is None:
            return None
        return _LINEAR[format], (x, *packed, bias), {}

    def _pack(self, matrix: Node, weight: Tensor, format: str) -> tuple[Node, ...] | None:
        """Placeholders for what the call reads in place of ``matrix``."""
        blocks = self._context.quantized[id(weight)]
        parts: tuple[Tensor, ...]
        if format == "int4" and blocks is not None:
            parts = cpu_quantized.pack_int4(blocks)
        else:
            parts = (cpu_quantized.pack_float16(weight),)
        shape = (format, *weight.shape)
        if self._context.transparent and shape not in self._is_trusted:
            self._is_trusted[shape] = cpu_quantized.is_row_invariant(
                lambda rows: _LINEAR[format](rows, *parts, None), weight.shape[1]
            )
        if not self._is_trusted.get(shape, True):
            return None
        count = self._context.weight_formats
        count[format] = count.get(format, 0) + weight.numel()
        nodes = []
        for i, part in enumerate(parts):
            with matrix.graph.inserting_before(matrix):
                node = matrix.graph.placeholder(f"{format}_{i}_{matrix.name}")
            recorded: Any = example(matrix)
            if isinstance(part, Tensor):
                recorded = recorded.fake_mode.from_tensor(part, static_shapes=True)
            node.meta["example_value"] = recorded
            self._context.constants[node.name] = part
            nodes.append(node)
        return tuple(nodes)

    def release_weights(self) -> None:
        """Give back the memory of the weights that are in no call any more."""
        context = self._context
        if not context.quantized:
            return
        freed: set[int] = set()
        for matrix, packed in self._packed.items():
            if packed is not None and not matrix.users:
                freed.add(_storage(context.constants.pop(matrix.name)))
                matrix.graph.erase_node(matrix)
        freed -= {_storage(t) for t in context.constants.values() if isinstance(t, Tensor)}
        with torch.inference_mode(False), torch.no_grad():
            for name, parameter in context.module.named_parameters():
                if _storage(parameter) in freed:
                    nan = parameter.new_full((1,), torch.nan)
                    parameter.data = nan.expand(parameter.shape)
                    continue
                count = context.weight_formats
                count["float32"] = count.get("float32", 0) + parameter.numel()
                if parameter.dim() > 1:
                    context.float32_matrices.append(name)
        context.quantized.clear()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_LINEAR: dict[str, Callable[..., Tensor]] = {
    "int4": cpu_quantized.linear_int4,
    "float16": cpu_quantized.linear_float16,
}
