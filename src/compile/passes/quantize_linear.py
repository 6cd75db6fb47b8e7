"""Matmuls whose weights stay quantised, as :func:`.lower_cpu.lower_cpu` lowers them.

Then the float32 weights are given back. Whatever reads such a parameter of the model reads NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...kernels.linear import cpu_quantized
from ...kernels.linear.cpu_quantized import Int4Weight
from ...kernels.native import calls as native
from ..fx.nodes import calls_op, example, is_linear, linear_operands, shape_of
from .context import PassContext

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class QuantizedCalls:
    """Calls in place of linear layers, for the weights in ``context.quantized``.

    With torch's operations a weight stays as it is if the context is transparent and a trial with
    the first weight of its shape finds that a row's bits follow the number of rows.
    """

    def __init__(self, graph: Graph, context: PassContext) -> None:
        self._context = context
        self._tokens = _tokens_of_step(graph) if context.is_native else None
        self._formats: dict[Node, native.Format] = {}  # of those that the native kernels take
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
        if matrix in self._formats:
            starts = None
            if self._tokens is not None and (shape_of(x) or ())[-2:-1] == self._tokens[:1]:
                starts = self._tokens[1]
            shape = (weight.shape[0], self._formats[matrix], starts)
            return native.linear, (x, *packed, bias, *shape), {}
        return _LINEAR[format], (x, *packed, bias), {}

    def _pack(self, matrix: Node, weight: Tensor, format: str) -> tuple[Node, ...] | None:
        """Placeholders for what the call reads in place of ``matrix``."""
        blocks = self._context.quantized[id(weight)]
        parts: Sequence[Tensor]
        if self._context.is_native and blocks is not None:
            *parts, self._formats[matrix] = cpu_quantized.pack_native(blocks)
        elif isinstance(blocks, Int4Weight) and format == "int4":
            parts = cpu_quantized.pack_int4(blocks)
        else:
            parts = (cpu_quantized.pack_float16(weight),)
        shape = (format, *weight.shape)
        is_tried = self._context.transparent and matrix not in self._formats
        if is_tried and shape not in self._is_trusted:
            self._is_trusted[shape] = cpu_quantized.is_row_invariant(
                lambda rows: _LINEAR[format](rows, *parts, None), weight.shape[1]
            )
        if is_tried and not self._is_trusted[shape]:
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
        kept = [t for t in context.constants.values() if isinstance(t, Tensor) and not t.is_mkldnn]
        freed -= set(map(_storage, kept))
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


def _tokens_of_step(graph: Graph) -> tuple[str, Node] | None:
    """The number of a step's tokens, as its shapes spell it, and ``query_starts``, whose last entry
    says how many of them are real."""
    for node in graph.nodes:
        if calls_op(node, "paged_attention"):
            shape = shape_of(node.args[0])
            return None if shape is None else (shape[0], node.args[3])
    return None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_LINEAR: dict[str, Callable[..., Tensor]] = {
    "int4": cpu_quantized.linear_int4,
    "float16": cpu_quantized.linear_float16,
}
