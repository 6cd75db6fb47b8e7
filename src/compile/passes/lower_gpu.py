"""Lowers a graph to our GPU kernels, and chooses a kernel or cuBLAS for each matmul.

- ``kv_store`` and ``paged_attention`` become the functions of the attention implementation chosen
  at start-up;
- ``linear`` with a constant weight becomes :func:`.dispatch.linear`, which has a
  kernel of its own for few rows; a gated activation behind it that nothing else reads joins it;
- a matmul of such a weight with columns, from the left (Mamba's steps in time), becomes the same;
- a matmul of a mixture of experts becomes :func:`.grouped_mm.grouped_mm`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...kernels.arguments import AttentionParams, PagedKV
from ...kernels.fused import dispatch as fused
from ...kernels.linear import dispatch as gpu_linear
from ...kernels.linear import grouped_mm
from ...kernels.linear.plan_cache import LinearPlans
from ..fx.nodes import (
    calls_op,
    example,
    grouped_operands,
    is_linear,
    left_matmul_operands,
    linear_operands,
)
from .context import PassContext

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lower_gpu(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of calls replaced."""
    graph, count = gm.graph, 0
    plans = LinearPlans(context.transparent, context.matmul_plan_dir)
    matmuls = {
        node: _matmul(linear_operands(node), context) for node in graph.nodes if is_linear(node)
    }
    columns = {
        node: found for node in graph.nodes if (found := left_matmul_operands(node)) is not None
    }
    for node, (weight, right) in columns.items():
        matmuls[node] = _matmul((right, weight, None), context)
    plans.prepare([matmul for matmul in matmuls.values() if matmul is not None])
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        attention = context.attention
        if attention is not None and calls_op(node, "paged_attention"):
            query, *rest = node.args
            node.target = attention.attend
            node.args = (query, PagedKV(*rest[:5]), AttentionParams(*rest[5:]))
        elif attention is not None and calls_op(node, "kv_store"):
            node.target = attention.store
        elif (operands := grouped_operands(node)) is not None:
            if not _fits_our_kernel(operands):
                continue
            node.target, node.args, node.kwargs = grouped_mm.grouped_mm, operands, {}
        elif (matmul := matmuls.get(node)) is not None:
            max_custom_rows = plans.max_custom_rows(*matmul)
            if node in columns:
                node.target, node.args = gpu_linear.left_matmul, (*columns[node], max_custom_rows)
                node.kwargs = {}
            else:
                _replace_linear(graph, node, max_custom_rows)
        else:
            continue
        count += 1
    return count


def _replace_linear(graph: Graph, node: Node, max_custom_rows: int) -> None:
    source, weight, bias = linear_operands(node)
    gated = _only_gate(node)
    function = gpu_linear.linear if gated is None else gpu_linear.linear_silu_mul
    with graph.inserting_before(node):
        call = graph.call_function(function, (source, weight, bias, max_custom_rows))
    replaced = gated or node
    call.meta["example_value"] = example(replaced)
    replaced.replace_all_uses_with(call)
    _erase_chain(graph, replaced, node)


def _matmul(
    operands: tuple[Node, Node, Node | None], context: PassContext
) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of (input, weight, bias), if they are constants that our kernel can
    multiply."""
    _, weight, bias = operands
    tensor = context.constant(weight)
    bias_tensor = context.constant(bias) if bias is not None else None
    if tensor is None or tensor.dim() != 2 or tensor.dtype not in _DTYPES:
        return None
    if (bias is not None and bias_tensor is None) or not tensor.is_contiguous():
        return None
    return tensor, bias_tensor


def _fits_our_kernel(operands: tuple[Node, Node, Node]) -> bool:
    rows, weight, offs = map(example, operands)
    return (
        isinstance(rows, Tensor)
        and isinstance(weight, Tensor)
        and isinstance(offs, Tensor)
        and (rows.dim(), weight.dim()) == (2, 3)
        and rows.dtype in _DTYPES
    )


def _only_gate(node: Node) -> Node | None:
    """The ``act_mul(gate, up, "silu")`` that alone reads the two halves of ``node``, or None."""
    users = list(node.users)
    if len(users) != 1 or users[0].target != "split" or len(users[0].users) != 2:
        return None
    halves = sorted(users[0].users, key=lambda part: part.args[1])  # type: ignore[arg-type, return-value]
    readers = {user for half in halves for user in half.users}
    if len(readers) != 1:
        return None
    (reader,) = readers
    if reader.target is not fused.act_mul or reader.args[:2] != tuple(halves):
        return None
    sizes = users[0].args[1]
    is_halved = isinstance(sizes, (list, tuple)) and len(sizes) == 2 and sizes[0] == sizes[1]
    return reader if is_halved and reader.args[2] == "silu" else None


def _erase_chain(graph: Graph, last: Node, first: Node) -> None:
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
