"""Lowers a graph to our GPU kernels, and chooses a kernel or cuBLAS for each matmul.

- ``kv_store`` and ``paged_attention`` become the functions of the attention implementation chosen
  at start-up; an indexer, and attention to what it chose, become Triton kernels of any;
- ``linear`` with a constant weight becomes :func:`.dispatch.linear`, which has a
  kernel of its own for few rows; a gated activation behind it that nothing else reads joins it;
- a matmul of such a weight with columns, from the left (Mamba's steps in time), becomes the same;
- ``linear`` with a weight that stays quantised becomes a call of the kernel for its format
  (:mod:`...kernels.families` say where it is served), a gated activation behind it included where
  that has one;
- a matmul of a mixture of experts becomes :func:`.grouped_mm.grouped_mm`, with the gated activation
  behind it likewise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...kernels.arguments import AttentionParams, PagedKV
from ...kernels.attention import chosen, index_kernels
from ...kernels.experts import grouped_mm
from ...kernels.fused import dispatch as fused
from ...kernels.linear import dispatch as gpu_linear
from ...kernels.linear.plan_cache import LinearPlans
from ...kernels.quantized import dispatch_fp8, dispatch_int4
from ...kernels.quantized.int4_packing import pack
from ...kernels.quantized.plan_int4 import RowLimits
from ...kernels.quantized.quantized_weight import GROUP
from ..fx.nodes import (
    calls,
    calls_op,
    example,
    grouped_operands,
    is_linear,
    last_size,
    left_matmul_operands,
    linear_operands,
    tensor_of,
)
from ..fx.pass_context import PassContext
from .quantize_linear import Kernel, KernelTable, QuantizedCalls

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lower_gpu(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of calls replaced."""
    graph, count = gm.graph, 0
    plans = LinearPlans(context.transparent, context.matmul_plan_dir)
    dtype = next((p.dtype for p in context.module.parameters()), torch.float32)
    quantized = QuantizedCalls(graph, context, _kernels(dtype, plans))
    matmuls = {node: _matmul(node, context) for node in filter(is_linear, graph.nodes)}
    columns = {
        node: found for node in graph.nodes if (found := left_matmul_operands(node)) is not None
    }
    for node, (weight, _) in columns.items():
        matmuls[node] = _constants(weight, None, False, context)
    old_offs: set[Node] = set()  # of matmuls of experts, by which an earlier one has gone
    plans.prepare([matmul for matmul in matmuls.values() if matmul is not None])
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        attention = context.attention
        if calls_op(node, "index_topk"):
            node.target = index_kernels.index_topk
        elif attention is not None and calls_op(node, "paged_attention"):
            query, *rest = node.args
            params = AttentionParams(*rest[6:])
            node.target = attention.attend if params.indices is None else chosen.chosen_attention
            node.args = (query, PagedKV(*rest[:6]), params)
        elif attention is not None and calls_op(node, "kv_store"):
            node.target = attention.store
        elif (operands := grouped_operands(node)) is not None:
            if not _fits_our_kernel(operands):
                continue
            gated = only_gate(node)
            *_, offs = operands
            options: dict[str, Any] = {
                "has_gate": gated is not None,
                "has_old_offs": offs in old_offs,
            }
            old_offs.add(offs)
            with graph.inserting_before(node):
                call = graph.call_function(grouped_mm.grouped_mm, operands, options)
            _put(graph, call, gated or node, node)
        elif (matmul := matmuls.get(node)) is not None and node in columns:
            node.target, node.kwargs = gpu_linear.left_matmul, {}
            node.args = (*columns[node], plans.max_custom_rows(*matmul))
        elif matmul is not None:
            source, weight, bias = linear_operands(node)
            max_custom_rows = plans.max_custom_rows(*matmul)
            gated = only_gate(node)
            with graph.inserting_before(node):
                if gated is not None:
                    call = graph.call_function(
                        gpu_linear.linear_silu_mul, (source, weight, bias, max_custom_rows)
                    )
                else:
                    call = graph.call_function(
                        gpu_linear.linear, (source, weight, bias, max_custom_rows)
                    )
            _put(graph, call, gated or node, node)
        elif (made := quantized(node)) is not None:
            gated = only_gate(node)
            made_gated = None if gated is None else quantized(node, has_gate=True)
            with graph.inserting_before(node):
                call = graph.call_function(*(made_gated or made))
            _put(graph, call, node if gated is None or made_gated is None else gated, node)
        else:
            continue
        count += 1
    quantized.release_weights()
    return count


def _kernels(dtype: torch.dtype, plans: LinearPlans) -> KernelTable:
    """By format, what multiplies rows of ``dtype`` with a weight that stays quantised; ``plans``
    are of the matmuls with dequantised weights."""

    def fp8(weight: Any) -> Kernel:
        return Kernel(dispatch_fp8.linear, dispatch_fp8.pack(weight), pack=dispatch_fp8.pack)

    def integers(weight: Any) -> Kernel:
        packed = pack(weight)
        chosen = limits.choose(packed, weight.scales.shape[1] * GROUP)
        data = (*packed[2:], *chosen)
        return Kernel(dispatch_int4.linear, packed[:2], data, dispatch_int4.linear_silu_mul)

    limits = RowLimits(dtype, plans)
    return {"fp8": fp8, "int4": integers, "int8": integers}


def _matmul(node: Node, context: PassContext) -> tuple[Tensor, Tensor | None, bool] | None:
    """Weight and bias of a linear layer, if they are constants that our kernel can multiply, and
    whether a gated activation joins it."""
    _, weight, bias = linear_operands(node)
    return _constants(weight, bias, only_gate(node) is not None, context)


def _constants(
    weight: Node, bias: Node | None, has_gate: bool, context: PassContext
) -> tuple[Tensor, Tensor | None, bool] | None:
    tensor = context.constant(weight)
    bias_tensor = context.constant(bias) if bias is not None else None
    if tensor is None or tensor.dim() != 2 or tensor.dtype not in _DTYPES:
        return None
    if context.weight_format(tensor) is not None:
        return None
    if (bias is not None and bias_tensor is None) or not tensor.is_contiguous():
        return None
    return tensor, bias_tensor, has_gate


def _fits_our_kernel(operands: tuple[Node, Node, Node]) -> bool:
    rows, weight, offs = map(example, operands)
    return (
        isinstance(rows, Tensor)
        and isinstance(weight, Tensor)
        and isinstance(offs, Tensor)
        and (rows.dim(), weight.dim()) == (2, 3)
        and rows.dtype in _DTYPES
    )


def only_gate(node: Node) -> Node | None:
    """The ``act_mul(gate, up, "silu")`` that alone reads the two halves of ``node``, or None."""
    users = list(node.users)
    if len(users) != 1 or not _is_halving(users[0]) or len(users[0].users) != 2:
        return None
    halves = sorted(users[0].users, key=lambda part: part.args[1])  # type: ignore[arg-type, return-value]
    readers = {user for half in halves for user in half.users}
    if len(readers) != 1:
        return None
    (reader,) = readers
    if reader.target is not fused.act_mul or reader.args[:2] != tuple(halves):
        return None
    return reader if reader.args[2] == "silu" else None


def _is_halving(node: Node) -> bool:
    """Does ``node`` cut its last dimension, whose size is even, in two equal parts?"""
    if not calls(node, "split", "chunk") or len(node.args) not in (2, 3):
        return False
    source, sizes, *rest = node.args
    tensor = tensor_of(source)
    dim = rest[0] if rest else node.kwargs.get("dim", 0)
    is_last = tensor is not None and dim in (-1, tensor.dim() - 1)
    if calls(node, "chunk"):
        return is_last and sizes == 2 and (last_size(source) or 1) % 2 == 0
    # The halves of a merged weight, which ``merge_linear`` cuts along their last dimension.
    return isinstance(sizes, (list, tuple)) and len(sizes) == 2 and sizes[0] == sizes[1]


def _put(graph: torch.fx.Graph, call: Node, last: Node, first: Node) -> None:
    """``call`` in place of ``last``, of ``first``, and of what lies between."""
    call.meta["example_value"] = example(last)
    last.replace_all_uses_with(call)
    _erase_chain(graph, last, first)


def _erase_chain(graph: torch.fx.Graph, last: Node, first: Node) -> None:
    """Erase ``last`` and all between it and ``first`` that nothing else reads."""
    pending = [last]
    while pending:
        node = pending.pop()
        if node.users:
            continue
        pending += [n for n in node.all_input_nodes if n is not first and n.op != "placeholder"]
        graph.erase_node(node)
        if node is not first and first not in pending and not first.users:
            pending.append(first)
