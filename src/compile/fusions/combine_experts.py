"""Moves rows to experts and back by two kernels of ours: the copy of each token's row for every one
of its experts, and the weighted sum over them.

transformers multiplies the experts' rows by the weights in the order of the experts, brings the
products back into the order of the tokens by indexing, and sums them. Compiled, that is one kernel
that reads rows one number at a time (docs/notes/experts.md);
:func:`.expert_rows.combine_experts` reads them whole, and the weights where the router left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...kernels.experts import expert_rows
from ...kernels.experts.sort_by_expert import sort_by_expert
from ..fx.nodes import (
    calls,
    calls_function,
    cast_source,
    dtype_of,
    erase_unused,
    example,
    last_size,
    only_user,
    operands,
    shape_of,
    tensor_of,
    written_nodes,
)
from ..fx.pass_context import PassContext

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Sum:
    """Nodes of the sum over a token's experts.

    Attributes:
        rows, weights: what the experts give, in their order, and the weights in that of the tokens.
        inverse, sort: of the sort by expert.
        chain: all between those and the result, in order. result: the sum, or its conversion.
    """

    rows: Node
    weights: Node
    inverse: Node
    sort: Node
    chain: tuple[Node, ...]
    result: Node
    top_k: int


def combine_experts(gm: GraphModule, context: PassContext) -> int:
    """Rewrites what :func:`.fuse_expert_sort.fuse_expert_sort` has left, and returns the number of
    sums replaced. Their results are those of eager torch up to the order of additions, but for
    tokens of padding, which no expert gets; copies become one call only beside a sum."""
    graph = gm.graph
    written = written_nodes(graph)
    sums = [found for node in graph.nodes if (found := _sum(node, written)) is not None]
    leave_out_padding = _padding(graph, context)
    for found in sums:
        leave_out_padding(found)
        _replace_sum(graph, found)
    for sort, inverse, top_k in dict.fromkeys((s.sort, s.inverse, s.top_k) for s in sums):
        for copy, tokens in list(_copies(sort, top_k)):
            _replace_copy(graph, copy, tokens, inverse, top_k)
    return len(sums)


def _padding(graph: Graph, context: PassContext) -> Callable[[_Sum], None]:
    """Lets the sort of a sum over experts know how many tokens of the step are real."""
    input_ids, query_starts = (
        context.step_input(graph, name) for name in ("input_ids", "query_starts")
    )
    num_tokens = (shape_of(input_ids) or ())[-1:]

    def leave_out(found: _Sum) -> None:
        rows = (shape_of(found.result) or ())[:1]
        if query_starts is not None and num_tokens and rows == num_tokens:
            found.sort.args = (*found.sort.args[:2], found.top_k, query_starts)

    return leave_out


def _sum(node: Node, written: set[Node]) -> _Sum | None:
    """The sum over experts that ``node`` takes, or None."""
    if not calls(node, "sum") or _arguments(node, "dim") not in ({"dim": 1}, {"dim": -2}):
        return None
    view = node.args[0]
    shape = tensor_of(view)
    if not calls(view, "view", "reshape") or shape is None or shape.dim() != 3:
        return None
    top_k, permuted = shape.shape[1], view.args[0]
    if not isinstance(top_k, int) or not 1 <= top_k <= expert_rows.MAX_TOP_K:
        return None
    if not calls(permuted, "getitem") or last_size(view) is None:
        return None
    product, inverse = permuted.args
    source = tensor_of(product)
    if source is None or source.dim() != 2 or last_size(product) != last_size(view):
        return None
    if not _is_part(inverse, 2) or not calls(product, "mul"):
        return None
    found = _weighted(product, inverse.args[0])
    if found is None:
        return None
    rows, column, sorted_weights = found
    weights = sorted_weights.args[0]
    chain = (sorted_weights, column, product, permuted, view)
    if any(len(each.users) != 1 for each in chain):
        return None
    # The call reads weights and inverse elsewhere than the graph did, the rows where it did.
    if not written.isdisjoint({*chain, weights}) or not _is_only_read(inverse):
        return None
    dtypes = (dtype_of(rows), dtype_of(weights), dtype_of(product), dtype_of(node))
    if any(dtype not in _DTYPES for dtype in dtypes) or dtypes[2] != dtypes[3]:
        return None
    result = node
    converted = only_user(node)
    if converted is not None and dtypes[3] == torch.float32 and cast_source(converted) is node:
        result = converted if dtype_of(converted) in _DTYPES else node
    return _Sum(rows, weights, inverse, inverse.args[0], (*chain, node, result), result, top_k)


def _weighted(product: Node, sort: Node) -> tuple[Node, Any, Any] | None:
    """(rows, weights as a column, weights in the order of the experts) of ``product``, if it
    multiplies each row by its weight."""
    pair = operands(product)
    for rows, column in () if pair is None else (pair, pair[::-1]):
        if not calls(column, "unsqueeze") or _arguments(column, "dim") not in (
            {"dim": -1},
            {"dim": 1},
        ):
            continue
        sorted_weights, tensor = column.args[0], tensor_of(rows)
        if tensor is None or shape_of(rows) != shape_of(product):
            continue
        if not calls(sorted_weights, "getitem"):
            continue
        weights, order = sorted_weights.args
        source = tensor_of(weights)
        if source is None or source.dim() != 1 or not _is_part(order, 1):
            continue
        # Weights by the order and products by its inverse: each row has its own weight again.
        if order.args[0] is sort and _is_only_read(order):
            return rows, column, sorted_weights
    return None


def _is_part(node: object, number: int) -> bool:
    """Is ``node`` this one of the results of a sort by expert?"""
    return (
        calls(node, "getitem")
        and calls_function(node.args[0], sort_by_expert)
        and node.args[1] == number
    )


def _is_only_read(part: Node) -> bool:
    """Is a result of the sort only an index, or divided to be one? :func:`.written_nodes` takes
    all results for written where the sorted ids are."""
    return all(
        calls(user, "floordiv", "floor_divide")
        or (calls(user, "getitem") and user.args[0] is not part)
        for user in part.users
    )


def _arguments(node: Node, *names: str) -> dict[str, Any]:
    """Arguments behind the first, by name."""
    return dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)


def _replace_sum(graph: Graph, found: _Sum) -> None:
    dtype = dtype_of(found.result)
    with graph.inserting_before(found.chain[2]):  # the product, behind the rows and the sort
        call = graph.call_function(
            expert_rows.combine_experts,
            (found.rows, found.weights, found.inverse, found.top_k, dtype),
        )
    call.meta["example_value"] = example(found.result)
    found.result.replace_all_uses_with(call)
    erase_unused(graph, found.chain)


def _copies(sort: Node, top_k: int) -> Iterator[tuple[Node, Node]]:
    """Indexing of tokens' rows by ``order // top_k``, and the rows it reads."""
    for order in (user for user in sort.users if _is_part(user, 1)):
        for token in order.users:
            if not calls(token, "floordiv", "floor_divide") or token.args != (order, top_k):
                continue
            if token.kwargs:
                continue
            for copy in token.users:
                tokens = copy.args[0] if calls(copy, "getitem") else None
                tensor = tensor_of(tokens)
                if tensor is None or copy.args[1] is not token or tensor.dim() != 2:
                    continue
                if tensor.dtype in _DTYPES and last_size(tokens) is not None:
                    yield copy, tokens  # type: ignore[misc]


def _replace_copy(graph: Graph, copy: Node, tokens: Node, inverse: Node, top_k: int) -> None:
    token = copy.args[1]
    with graph.inserting_before(copy):
        call = graph.call_function(expert_rows.spread_rows, (tokens, inverse, top_k))
    call.meta["example_value"] = example(copy)
    copy.replace_all_uses_with(call)
    if isinstance(token, Node):
        erase_unused(graph, (copy, token, *token.all_input_nodes))
