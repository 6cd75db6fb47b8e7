"""For a graph run as it is on a CPU: call our kernels directly, and share what a step shares.

- ``paged_attention`` becomes :func:`~pagespec.kernels.reference.attend` on a layout that is built
  once a step for each window, not once a layer;
- ``kv_store`` is called without going through the dispatcher;
- ``linear`` with a float32 constant weight becomes
  :func:`~pagespec.kernels.linear.linear_few_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pagespec.compile.passes.context import PassContext, example
from pagespec.compile.passes.merge_linear import is_linear, linear_operands
from pagespec.kernels import reference
from pagespec.kernels.linear import linear_few_rows


def _layout_of_step(
    query: Tensor,
    k_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    window: int,
) -> reference.AttentionLayout:
    return reference.build_layout(
        query_starts, context_lens, block_tables, k_cache.shape[1], window, query.dtype
    )


def call_cpu_kernels(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of calls replaced."""
    graph, count = gm.graph, 0
    layouts: dict[tuple[object, ...], Node] = {}
    has_onednn = torch.backends.mkldnn.is_available()
    ops = torch.ops.pagespec
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (ops.paged_attention, ops.paged_attention.default):
            query, k_cache, v_cache, starts, lengths, tables, scale, window, softcap, sinks = (
                node.args
            )
            value = example(query) if isinstance(query, Node) else None
            key = (starts, lengths, tables, window, getattr(value, "dtype", None))
            with graph.inserting_before(node):
                if key not in layouts:
                    layouts[key] = graph.call_function(
                        _layout_of_step, (query, k_cache, starts, lengths, tables, window)
                    )
                replacement = graph.call_function(
                    reference.attend,
                    (query, k_cache, v_cache, layouts[key], scale, softcap, sinks),
                )
        elif node.target in (ops.kv_store, ops.kv_store.default):
            node.target = reference.kv_store
            count += 1
            continue
        elif has_onednn and is_linear(node):
            operands = linear_operands(node)
            weight = context.constant(operands[1])
            if weight is None or weight.dtype != torch.float32 or not weight.is_contiguous():
                continue
            with graph.inserting_before(node):
                replacement = graph.call_function(linear_few_rows, operands)
        else:
            continue
        replacement.meta["example_value"] = example(node)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
        count += 1
    return count
