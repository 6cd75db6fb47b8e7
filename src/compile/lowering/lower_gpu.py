"""Lower a graph to GPU kernels, and choose a kernel or cuBLAS for each matmul.

- ``kv_store`` and ``paged_attention`` become the functions of the attention backend selected at
  startup. An indexer, and attention over its selection, become Triton kernels with any backend.
- ``linear`` with a constant weight becomes :func:`.dispatch.linear`, which has a separate kernel
  for few rows. A gated activation that is its only reader is fused with it.
- A matmul of such a weight with columns, from the left (Mamba's steps in time), is replaced in the
  same way.
- ``linear`` with a weight that stays quantised becomes a call of the kernel for its format
  (:mod:`...kernels.families` lists where it is available), including a gated activation after it if
  that kernel supports one.
- A matmul of a mixture of experts becomes :func:`.grouped_mm.grouped_mm`, also with the gated
  activation after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...kernels.arguments import AttentionParams, PagedKV
from ...kernels.fused import dispatch as fused
from ...kernels.matmul import dispatch as gpu_linear
from ...kernels.matmul.plan_cache import LinearPlans
from ...kernels.matmul.quantized import dispatch_fp8, dispatch_int4
from ...kernels.matmul.quantized.int4_packing import pack
from ...kernels.matmul.quantized.plan_int4 import RowLimits
from ...kernels.matmul.quantized.quantized_weight import GROUP
from ...kernels.moe import grouped_mm
from ...kernels.sparse import chosen, index_kernels
from ..fx.nodes import (
    calls,
    calls_op,
    example,
    grouped_operands,
    is_linear,
    last_dim_slice,
    last_size,
    left_matmul_operands,
    linear_operands,
    only_user,
    tensor_of,
)
from ..fx.pass_context import PassContext
from .quantize_linear import Kernel, KernelTable, QuantizedCalls

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lower_gpu(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of calls replaced."""
    graph, count = gm.graph, 0
    plans = LinearPlans(context.transparent, context.matmul_plan_dir)
    dtype = next((p.dtype for p in context.module.parameters()), torch.float32)
    quantized = QuantizedCalls(graph, context, _kernels(dtype, plans))
    matmuls = {
        node: _constants(*linear_operands(node)[1:], only_gate(node) is not None, context)
        for node in filter(is_linear, graph.nodes)
    }
    columns = {
        node: found for node in graph.nodes if (found := left_matmul_operands(node)) is not None
    }
    for node, (weight, _) in columns.items():
        matmuls[node] = _constants(weight, None, False, context)
    old_offs: set[Node] = set()  # of experts' matmuls that an earlier matmul has used
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
        elif (matmul := matmuls.get(node)) is not None and node in columns:
            node.target, node.kwargs = gpu_linear.left_matmul, {}
            node.args = (*columns[node], plans.max_custom_rows(*matmul))
        else:
            gated = only_gate(node)
            made: Any = None
            if matmul is not None:
                function = gpu_linear.linear_silu_mul if gated else gpu_linear.linear
                made = function, (*linear_operands(node), plans.max_custom_rows(*matmul)), {}
            elif (operands := grouped_operands(node)) is not None and _fits_our_kernel(operands):
                *_, offs = operands
                options = {"has_gate": gated is not None, "has_old_offs": offs in old_offs}
                old_offs.add(offs)
                made = grouped_mm.grouped_mm, operands, options
            elif gated is None or (made := quantized(node, has_gate=True)) is None:
                made, gated = quantized(node), None
            if made is None:
                continue
            _put(node, gated, made)
        count += 1
    quantized.release_weights()
    return count


def _kernels(dtype: torch.dtype, plans: LinearPlans) -> KernelTable:
    """By format, the kernel that multiplies rows of ``dtype`` with a weight that stays quantised.
    ``plans`` are those of the matmuls with dequantised weights."""

    def fp8(weight: Any) -> Kernel:
        return Kernel(dispatch_fp8.linear, dispatch_fp8.pack(weight), pack=dispatch_fp8.pack)

    def integers(weight: Any) -> Kernel:
        packed = pack(weight)
        chosen = limits.choose(packed, weight.scales.shape[1] * GROUP)
        data = (*packed[2:], *chosen)
        return Kernel(dispatch_int4.linear, packed[:2], data, dispatch_int4.linear_silu_mul)

    limits = RowLimits(dtype, plans)
    return {"fp8": fp8, "int4": integers, "int8": integers}


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
    rows, weight, offs = map(tensor_of, operands)
    if rows is None or weight is None or offs is None:
        return False
    return (rows.dim(), weight.dim()) == (2, 3) and rows.dtype in _DTYPES


def only_gate(node: Node) -> Node | None:
    """The ``act_mul(gate, up, "silu")`` that is the only reader of the two halves of ``node``, or
    None."""
    halves = only_user(node)
    if not calls(halves, "split", "chunk") or (width := last_size(node)) is None:
        return None
    readers = {user for half in halves.users for user in half.users}
    reader = readers.pop() if len(readers) == 1 and len(halves.users) == 2 else None
    if reader is None or reader.target is not fused.act_mul or reader.args[2] != "silu":
        return None
    middle = width // 2
    cuts = [last_dim_slice(half) for half in reader.args[:2]]
    return reader if cuts == [(node, 0, middle), (node, middle, width)] else None


def _put(node: Node, gated: Node | None, made: tuple[Any, Any, Any]) -> None:
    """A call that replaces ``node``, or everything from it to ``gated``, which no other node
    reads."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(*made)
    last = gated or node
    call.meta["example_value"] = example(last)
    last.replace_all_uses_with(call)
    chain = [] if gated is None else [gated, *gated.all_input_nodes, *node.users]
    for each in (*chain, node):
        node.graph.erase_node(each)
