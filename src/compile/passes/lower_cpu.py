"""Lowers a graph to our CPU kernels, and computes once per step what its layers share.

- ``paged_attention`` becomes an ``attend`` on a layout that is built once a step for each window,
  (chunk, slopes), not once a layer;
- ``index_topk`` becomes a call on such a layout, in any context an invariant one, and so does
  attention over what it chose;
- ``kv_store`` is called without going through the dispatcher;
- matmuls, and the activations whose bits depend on where an element lies, become calls of
  :mod:`.cpu_invariant` if the context is transparent, with packed weights as far as
  the context has room for them; if not, ``linear`` with a float32
  constant weight becomes :func:`~.cpu_few_rows.linear_few_rows`;
- matmuls whose weights are to be kept quantised become calls of :mod:`.cpu_quantized`
  (:mod:`.quantize_linear`), in both cases;
- in a native context, which has such weights, attention and what the fusing passes made become
  calls of :mod:`.native.calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...kernels.arguments import AttentionParams
from ...kernels.attention import cpu_invariant as invariant_attention
from ...kernels.attention import indexer, reference
from ...kernels.fused import cpu_activation
from ...kernels.fused import dispatch as fused
from ...kernels.linear import cpu_invariant as invariant_linear
from ...kernels.linear.cpu_few_rows import linear_few_rows
from ...kernels.linear.recipe_cache import Recipes
from ...kernels.mla import dispatch as mla
from ...kernels.mla.head_matmul import choose_recipe
from ...kernels.native import calls as native
from ..fx.nodes import (
    calls_op,
    example,
    grouped_operands,
    is_linear,
    left_matmul_operands,
    linear_operands,
    tensor_of,
)
from .context import PassContext
from .quantize_linear import QuantizedCalls

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _layout_of_step(
    query: Tensor,
    k_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *mask: Any,
) -> reference.AttentionLayout:
    return reference.build_layout(
        query_starts, context_lens, block_tables, k_cache.shape[1], query.dtype, *mask
    )


def _invariant_layout_of_step(
    _: Tensor,
    k_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *mask: Any,
) -> invariant_attention.AlignedLayout:
    return invariant_attention.build_layout(
        query_starts, context_lens, block_tables, k_cache.shape[1], *mask
    )


def lower_cpu(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of calls replaced."""
    graph, count = gm.graph, 0
    layouts = _Layouts(graph)
    rewritten = _InvariantCalls(context) if context.transparent else _FastCalls(context)
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
            more = (params.indices,) if is_invariant else ()
            with graph.inserting_before(node):
                layout = layouts.get(query, k_cache, batch, mask, is_invariant)
                replacement = graph.call_function(
                    attend,
                    (query, k_cache, v_cache, layout, *params[:3:2], params.sinks, v_dim, *more),
                )
        elif calls_op(node, "index_topk"):
            args: Any = node.args
            with graph.inserting_before(node):
                layout = layouts.get(args[0], args[3], args[5:8], (0, 0, None), True)
                replacement = graph.call_function(
                    indexer.index_topk, (*args[:5], layout, *args[8:])
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
    quantized.release_weights()
    return count


class _Layouts:
    """What builds the layouts of a step, once for each kind."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes: dict[tuple[object, ...], Node] = {}

    def get(
        self, query: Any, cache: Any, batch: Any, mask: tuple[Any, ...], is_invariant: bool
    ) -> Node:
        """The node for a batch under (window, chunk, slopes), made at the insertion point."""
        value = example(query) if isinstance(query, Node) else None
        dtype = None if is_invariant else getattr(value, "dtype", None)
        key = (*batch, *mask, is_invariant, dtype)
        if key not in self._nodes:
            build: Any = _invariant_layout_of_step if is_invariant else _layout_of_step
            node = self._graph.call_function(build, (query, cache, *batch, *mask))
            self._nodes[key] = node
        return self._nodes[key]


def _attention_call(node: Node) -> tuple[Any, ...] | None:
    """(query, keys, values or None, batch, :class:`.AttentionParams`, size of values that lie
    within keys) of a call of attention."""
    if node.target is mla.attention:
        args: Any = node.args
        query, kv, scale, rank, indices = args
        return query, kv[0], None, kv[1:], AttentionParams(scale, indices=indices), rank
    if not calls_op(node, "paged_attention"):
        return None
    params: Any = node.args[6:]
    return *node.args[:3], node.args[3:6], AttentionParams(*params), 0


_NATIVE: dict[object, Callable[..., Any]] = {
    fused.rms_norm: native.rms_norm,
    fused.add_rms_norm: native.add_rms_norm,
    fused.act_mul: native.act_mul,
    fused.norm_rope_store: native.norm_rope_store,
}
"""What the fusing passes left, by what takes the same arguments."""
_NUM_NATIVE_ARGUMENTS = 10
"""Of attention without chunks and slopes."""


def _has_native_call(node: Node) -> bool:
    if not calls_op(node, "paged_attention"):
        return node.target in _NATIVE
    params: Any = AttentionParams(*node.args[6:])
    if params.is_reference_only:
        return False
    query, _, v_cache = (tensor_of(argument) for argument in node.args[:3])
    dims = [] if query is None or v_cache is None else [query.shape[2], v_cache.shape[3]]
    return bool(dims) and all(dim % native.DIM_UNIT == 0 for dim in dims)


class _FastCalls:
    """The quickest matmul, whose order of summation follows the number of rows."""

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


class _InvariantCalls:
    """Calls with the same bits for a row in any batch. A recipe is chosen once for all weights of
    one shape, and kept."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._room = context.packing_bytes
        self._packed: dict[Node, Node] = {}
        self._recipes = Recipes(context.matmul_plan_dir)

    def __call__(self, node: Node) -> _Call | None:
        if is_linear(node):
            x, matrix, addend = linear_operands(node)
            recipe = self._recipe(matrix, (0, 1), may_pack=self._has_room(matrix))
            if recipe.is_packed:
                matrix = self._packed_weight(matrix)
            return invariant_linear.linear, (x, matrix, addend, recipe), {}
        grouped = grouped_operands(node)
        if grouped is not None:
            return invariant_linear.grouped_mm, (*grouped, self._recipe(grouped[1], (2, 1))), {}
        columns = left_matmul_operands(node)
        if columns is not None:
            recipe = self._recipe(columns[0], (-2, -1))
            return invariant_linear.left_matmul, (*columns, recipe), {}
        if node.target in (mla.latent_query, mla.head_values):
            rows, weight = node.args
            value: Any = example(weight)  # type: ignore[arg-type]
            is_transposed = value.stride(1) == 1
            return (
                node.target,
                (rows, weight, choose_recipe(*value.shape, value.dtype, is_transposed)),
                {},
            )
        if node.target in (torch.addmm, "addmm") and not node.kwargs:
            bias, rows, weight = node.args
            if isinstance(weight, Node):
                recipe = self._recipe(weight, (1, 0))
                return invariant_linear.addmm, (bias, rows, weight, recipe), {}
        name = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
        # In float32 rsqrt is the same everywhere, and its input one number a row.
        is_float32 = getattr(example(node), "dtype", None) == torch.float32
        is_in_place = bool(node.kwargs.get("inplace"))
        is_even = name == "rsqrt" and is_float32
        if name in cpu_activation.ELEMENTWISE and not is_in_place and not is_even:
            kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
            return cpu_activation.elementwise, (name, *node.args), kwargs
        return None

    def _has_room(self, weight: Node) -> bool:
        value = self._context.constant(weight)
        return weight in self._packed or (value is not None and value.nbytes <= self._room)

    def _packed_weight(self, weight: Node) -> Node:
        """A placeholder for the packed copy of a constant."""
        if weight not in self._packed:
            value = self._context.constants[weight.name]
            self._room -= value.nbytes
            with weight.graph.inserting_before(weight):
                packed = weight.graph.placeholder(f"packed_{weight.name}")
            packed.meta["example_value"] = example(weight)
            self._context.constants[packed.name] = invariant_linear.pack(value)
            self._packed[weight] = packed
        return self._packed[weight]

    def _recipe(
        self, weight: Node, dims: tuple[int, int], *, may_pack: bool = False
    ) -> invariant_linear.MatmulRecipe:
        """For the weight whose outputs and inputs lie at ``dims``."""
        value: Any = example(weight)
        num_outputs, num_inputs = (int(value.shape[dim]) for dim in dims)
        is_contiguous = dims[0] < dims[1] and value.is_contiguous()
        if dims == (2, 1):
            is_contiguous = value.stride(1) == 1
        return self._recipes.choose(
            num_outputs,
            num_inputs,
            value.dtype,
            is_contiguous=is_contiguous,
            may_pack=may_pack,
        )
