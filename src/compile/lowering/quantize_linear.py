"""Matmuls whose weights stay quantised, as lowered by :func:`.lower_cpu.lower_cpu` and
:func:`.lower_gpu.lower_gpu`; on a GPU with a table of kernels by format.

Afterwards the float weights are freed, if there were any: a checkpoint's quantised layers have
stand-ins from the beginning. Code that reads such a parameter of the model reads NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...errors import UnsupportedModelError
from ...kernels import e4m3
from ...kernels.matmul.cpu import expanded as cpu_expanded
from ...kernels.matmul.cpu import quantized as cpu_quantized
from ...kernels.matmul.quantized.quantized_weight import Int4Weight, Int8Weight, QuantizedWeight
from ...kernels.native import calls as native
from ..fx.fake_tensors import fake_of
from ..fx.nodes import calls_op, example, is_linear, linear_operands, shape_of
from ..fx.pass_context import PassContext
from ..weights import Pack, is_stand_in

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Kernel(NamedTuple):
    """A kernel that multiplies rows with a quantised weight.

    Attributes:
        function: takes the rows, the weight's parts, the bias or None, and ``data``.
        gated: the same, but returns ``silu(gate) * up`` of the result's halves; None if
            unavailable.
        pack: creates the parts for another weight of this shape, in the same form; None if only a
            start can.
    """

    function: Callable[..., Tensor]
    parts: tuple[Tensor, ...]
    data: tuple[Any, ...] = ()
    gated: Callable[..., Tensor] | None = None
    pack: Pack | None = None


KernelTable = Mapping[str, Callable[[QuantizedWeight], Kernel]]
"""Creates the kernel of a quantised weight, by its format."""


class _Packed(NamedTuple):
    """A kernel with placeholders for its parts, and for an order of inputs if it is not their
    own."""

    kernel: Kernel
    parts: list[Node]
    order: Node | None


class QuantizedCalls:
    """Calls that replace linear layers, for the weights in ``context.quantized``.

    With torch's operations, a trial with the first weight of a shape checks whether a row's bits
    depend on the number of rows. If they do and the context is transparent, a weight stays as it
    is, or is expanded in every call.

    Args:
        kernels: those of a GPU; None for a CPU.
    """

    def __init__(
        self, graph: Graph, context: PassContext, kernels: KernelTable | None = None
    ) -> None:
        self._context = context
        self._kernels = kernels
        self._tokens = _tokens_of_step(graph) if context.is_native else None
        self._packed: dict[Node, _Packed | None] = {}  # None: stays as it is
        self._orders: dict[str, Node] = {}
        self._ordered: dict[tuple[Node, Node], Node] = {}  # by rows and order
        self._trials: dict[tuple[object, ...], bool] = {}
        self._recipes: dict[tuple[int, ...], cpu_expanded.ExpandedRecipe] = {}

    def __call__(self, node: Node, *, has_gate: bool = False) -> _Call | None:
        """The call that replaces ``node``, or ``node`` and the gate after it; None if there is
        none."""
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
        kernel, parts, order = packed
        function, data = kernel.gated if has_gate else kernel.function, kernel.data
        if function is None:
            return None
        if order is not None:
            x = self._in_order(x, order, node)
        if function is native.linear:
            data = (*data, self._query_starts(x))
        return function, (x, *parts, bias, *data), {}

    def _in_order(self, x: Node, order: Node, node: Node) -> Node:
        """The rows of ``node`` with their elements in this order, for all nodes that read them
        so."""
        if (x, order) not in self._ordered:
            with node.graph.inserting_before(node):
                gathered = node.graph.call_function(torch.index_select, (x, -1, order))
            like = example(x)
            assert isinstance(like, Tensor)  # they are rows
            gathered.meta["example_value"] = like.new_empty(like.shape)
            self._ordered[x, order] = gathered
        return self._ordered[x, order]

    def _query_starts(self, x: object) -> Node | None:
        """The tensor that gives the number of real rows, if they are the tokens of a step."""
        if self._tokens is None or (shape_of(x) or ())[-2:-1] != self._tokens[:1]:
            return None
        return self._tokens[1]

    def _pack(self, matrix: Node, weight: Tensor, format: str) -> _Packed | None:
        """The kernel to call, with placeholders for its operands instead of ``matrix``."""
        held = self._context.quantized[id(weight)]
        order = None
        if held is not None and held.order is not None:
            name = self._context.input_order(weight) or ""
            if name not in self._orders:
                [self._orders[name]] = self._placeholders("order", matrix, [held.order])
            order, held = self._orders[name], held.in_order()
        kernel = self._kernel(weight, held, format)
        if kernel is None:
            return None
        count = self._context.weight_formats
        count[format] = count.get(format, 0) + weight.numel()
        nodes = self._placeholders(format, matrix, kernel.parts)
        inputs = None if order is None else self._context.constants[order.name]
        self._context.weights.packed(weight, kernel.parts, kernel.pack, format, inputs)
        return _Packed(kernel, nodes, order)

    def _placeholders(self, kind: str, matrix: Node, parts: Iterable[Tensor]) -> list[Node]:
        """The placeholders of ``parts``, inserted at ``matrix``."""
        nodes = []
        for i, part in enumerate(parts):
            with matrix.graph.inserting_before(matrix):
                node = matrix.graph.placeholder(f"{kind}_{i}_{matrix.name}")
            recorded = example(matrix)
            assert isinstance(recorded, Tensor)  # it stands for a weight
            # For FBGEMM's objects the only record is that of the weight.
            node.meta["example_value"] = (
                fake_of(part, recorded) if isinstance(part, Tensor) else recorded
            )
            self._context.constants[node.name] = part
            nodes.append(node)
        return nodes

    def _kernel(self, weight: Tensor, held: QuantizedWeight | None, format: str) -> Kernel | None:
        if self._kernels is not None:
            assert held is not None  # all other formats were refused earlier
            return self._kernels[format](held)
        kernel: Kernel | None = None
        if self._context.is_native and isinstance(held, Int4Weight | Int8Weight):
            native_format = cpu_quantized.native_format(held)
            pack: Pack = partial(cpu_quantized.pack_native, format=native_format)
            parts = tuple(pack(held))
            return Kernel(native.linear, parts, (len(weight), native_format), pack=pack)
        if format == "float16":
            kernel = Kernel(cpu_quantized.linear_float16, (cpu_quantized.pack_float16(weight),))
        elif cpu_quantized.fits_int4(held) and cpu_quantized.reason_against() is None:
            make: Pack = cpu_quantized.pack_int4
            kernel = Kernel(cpu_quantized.linear_int4, tuple(make(held)), pack=make)
        if kernel is not None and self._is_trusted(kernel, format, weight.shape):
            return kernel
        return self._expanded(weight.shape, held) if held and is_stand_in(weight) else None

    def _is_trusted(self, kernel: Kernel, format: str, shape: torch.Size) -> bool:
        """Whether the kernel may be used: in a transparent context, a row's bits must not depend on
        the number of rows."""
        context, key = self._context, (format, shape)
        if context.transparent and key not in self._trials:
            self._trials[key] = cpu_quantized.is_row_invariant(
                lambda rows: kernel.function(rows, *kernel.parts, None), shape[1], context.threads
            )
        return not context.transparent or self._trials[key]

    def _expanded(self, shape: torch.Size, held: QuantizedWeight) -> Kernel:
        if shape not in self._recipes:
            self._recipes[shape] = cpu_expanded.choose_expanded_recipe(
                *shape, transparent=self._context.transparent, threads=self._context.threads
            )
        is_fp8 = held.format == "fp8"
        function = cpu_expanded.linear_fp8 if is_fp8 else cpu_expanded.linear_int4
        pack: Pack = _fp8_parts if is_fp8 else tuple
        return Kernel(function, tuple(pack(held)), self._recipes[shape], pack=pack)

    def release_weights(self) -> None:
        """Free the memory of the weights that no call uses any more.

        Raises:
            UnsupportedModelError: something other than a linear layer reads a stand-in.
        """
        context = self._context
        if not context.quantized:
            return
        freed: set[int] = set()
        for matrix, packed in self._packed.items():
            if packed is not None and not matrix.users:
                freed.add(_storage(context.constants.pop(matrix.name)))
                matrix.graph.erase_node(matrix)
        # Packed weights are in memory of their library.
        read = {
            name: tensor
            for name, tensor in context.constants.items()
            if isinstance(tensor, Tensor) and not tensor.is_mkldnn
        }
        for name, tensor in read.items():
            if is_stand_in(tensor):
                raise UnsupportedModelError(
                    f"{type(context.module).__name__}: {name}, quantised, is read by more than its "
                    "linear layer"
                )
        freed -= set(map(_storage, read.values()))
        with torch.inference_mode(False), torch.no_grad():
            for name, parameter in context.module.named_parameters():
                if is_stand_in(parameter):
                    continue
                if _storage(parameter) in freed:
                    nan = parameter.new_full((1,), torch.nan)
                    parameter.data = nan.expand(parameter.shape)
                    continue
                count, dtype = context.weight_formats, str(parameter.dtype).removeprefix("torch.")
                count[dtype] = count.get(dtype, 0) + parameter.numel()
                if parameter.dim() > 1:
                    context.float32_matrices.append(name)
        context.quantized.clear()


def _tokens_of_step(graph: Graph) -> tuple[str, Node] | None:
    """A step's token count, as its shapes express it, and ``query_starts``, whose last entry is the
    count without padding."""
    for node in graph.nodes:
        if calls_op(node, "paged_attention"):
            shape = shape_of(node.args[0])
            return None if shape is None else (shape[0], node.args[3])
    return None


def _fp8_parts(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """The operands of :func:`.cpu_expanded.linear_fp8`."""
    return weight.values, weight.scales * e4m3.DECODED_UNIT


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
