"""Lower a graph to CPU kernels, and compute once per step what its layers share.

- ``paged_attention`` becomes an ``attend`` on a layout. A layout is built once per step for each
  (window, chunk, slopes), not once per layer.
- ``index_topk`` becomes a call on such a layout, a batch-invariant one in any context, and so does
  attention over the selected positions.
- ``kv_store`` is called directly, without the dispatcher.
- Matmuls, and activations whose bits depend on the place of an element, become batch-invariant
  calls if the context is transparent (:mod:`.invariant_calls`). If not, ``linear`` with a float32
  constant weight becomes :func:`~.few_rows.linear_few_rows`.
- In both cases, matmuls whose weights stay quantised become calls of
  :mod:`...kernels.matmul.cpu.quantized` (:mod:`.quantize_linear`).
- In a native context, which has such weights, attention and the results of the fusion passes become
  calls of :mod:`...kernels.native.calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...kernels.arguments import AttentionParams
from ...kernels.attention import cpu_invariant as invariant_attention
from ...kernels.attention import reference, reference_layout
from ...kernels.fused import dispatch as fused
from ...kernels.matmul.cpu.few_rows import linear_few_rows
from ...kernels.mla import dispatch as mla
from ...kernels.native import calls as native
from ...kernels.sparse import indexer
from ..fx.nodes import calls_op, example, is_linear, linear_operands, tensor_of
from ..fx.pass_context import PassContext
from .invariant_calls import InvariantCalls
from .quantize_linear import QuantizedCalls

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def lower_cpu(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of calls replaced."""
    graph, count = gm.graph, 0
    layouts = _Layouts(graph)
    rewritten = InvariantCalls(graph, context) if context.transparent else _FastCalls(context)
    quantized = QuantizedCalls(graph, context)
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if context.is_native and _has_native_call(node):
            if node.target not in _NATIVE:
                node.args = node.args[:_NUM_NATIVE_ARGUMENTS]
            node.target = _NATIVE.get(node.target, native.attention)
            count += 1
            continue
        if (call := _attention_call(node)) is not None:
            query, k_cache, v_cache, batch, params, v_dim = call
            slopes = None if params.alibi_slopes is None else tuple(params.alibi_slopes)
            mask = params.window, params.chunk, slopes
            is_invariant = context.transparent or params.indices is not None
            attend = invariant_attention.attend if is_invariant else reference.attend
            more: tuple[Any, ...] = ()
            if isinstance(rewritten, InvariantCalls):
                more = (rewritten.attention_recipe(query, k_cache, v_cache, v_dim),)
            with graph.inserting_before(node):
                layout = layouts.get(query, k_cache, batch, mask, is_invariant)
                replacement = graph.call_function(
                    attend, (query, k_cache, v_cache, layout, params, v_dim, *more)
                )
        elif calls_op(node, "index_topk"):
            args: Any = node.args
            with graph.inserting_before(node):
                layout = layouts.get(args[0], args[3], args[5:9], (0, 0, None), True)
                replacement = graph.call_function(
                    indexer.index_topk, (*args[:5], layout, *args[9:])
                )
        elif calls_op(node, "kv_store"):
            node.target = fused.kv_store
            count += 1
            continue
        else:
            call = quantized(node) or rewritten(node)
            if call is None:
                continue
            with graph.inserting_before(node):
                replacement = graph.call_function(*call)
        replacement.meta["example_value"] = example(node)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
        count += 1
    if isinstance(rewritten, InvariantCalls):
        rewritten.erase_unused()
    quantized.release_weights()
    return count


class _Layouts:
    """Builds the layouts of a step, one per kind."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes: dict[tuple[object, ...], Node] = {}

    def get(
        self, query: Any, cache: Any, batch: Any, mask: tuple[Any, ...], is_invariant: bool
    ) -> Node:
        """The node for a batch under (window, chunk, slopes), created at the insertion point."""
        value = example(query) if isinstance(query, Node) else None
        dtype = None if is_invariant else getattr(value, "dtype", None)
        key = (*batch, *mask, is_invariant, dtype)
        if key not in self._nodes:
            build: Any = reference_layout.build_layout
            given = (query, cache, *batch, *mask)
            if is_invariant:
                build, given = invariant_attention.build_layout, given[1:]
            self._nodes[key] = self._graph.call_function(build, given)
        return self._nodes[key]


def _attention_call(node: Node) -> tuple[Any, ...] | None:
    """(query, keys, values or None, batch, :class:`.AttentionParams`, size of values that are part
    of the keys) of an attention call."""
    if node.target is mla.attention:
        args: Any = node.args
        query, kv, scale, rank, indices = args
        return query, kv[0], None, kv[1:], AttentionParams(scale, indices=indices), rank
    if not calls_op(node, "paged_attention"):
        return None
    params: Any = node.args[7:]
    return *node.args[:3], node.args[3:7], AttentionParams(*params), 0


_NATIVE: dict[object, Callable[..., Any]] = {
    fused.rms_norm: native.rms_norm,
    fused.add_rms_norm: native.add_rms_norm,
    fused.act_mul: native.act_mul,
    fused.norm_rope_store: native.norm_rope_store,
}
"""Native functions with the same arguments, by the fused call that they replace."""
_NUM_NATIVE_ARGUMENTS = 11
"""For attention without chunks and slopes."""


def _has_native_call(node: Node) -> bool:
    if not calls_op(node, "paged_attention"):
        return node.target in _NATIVE
    params: Any = AttentionParams(*node.args[7:])
    if params.is_reference_only or params.indices is not None:
        return False
    query, _, v_cache = (tensor_of(argument) for argument in node.args[:3])
    dims = [] if query is None or v_cache is None else [query.shape[2], v_cache.shape[3]]
    return bool(dims) and all(dim % native.DIM_UNIT == 0 for dim in dims)


class _FastCalls:
    """The fastest matmuls, whose order of summation depends on the number of rows."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._has_onednn = torch.backends.mkldnn.is_available()

    def __call__(self, node: Node) -> _Call | None:
        if not self._has_onednn or not is_linear(node):
            return None
        operands = linear_operands(node)
        weight = self._context.constant(operands[1])
        if weight is None or weight.dtype != torch.float32 or not weight.is_contiguous():
            return None
        return linear_few_rows, operands, {}
