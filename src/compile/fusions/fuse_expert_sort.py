"""Fuse the sort of a mixture of experts' rows into one call.

transformers writes it as a sort of the chosen experts' ids, a histogram of the sorted ids, its
running sum, and an inverse of the permutation by an assignment. These are eight kernels for what
:func:`.sort_by_expert.sort_by_expert` does in one. Masks that zero rows without an expert before
and after grouped matmuls are removed as well: the grouped matmul does not read such rows and gives
zeros for them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...kernels.moe.sort_by_expert import sort_by_expert
from ..fx.nodes import (
    calls,
    calls_function,
    erase_unused,
    example,
    grouped_operands,
    tensor_of,
)
from ..fx.pass_context import PassContext


@dataclass(frozen=True, slots=True)
class _Sort:
    """Nodes of one sort.

    Attributes:
        ids: the input of the sort ``node``, which gives ``sorted_ids`` by ``order``. converted,
            counts, offs: the sorted ids as input of ``histc``, the number of rows per expert, and
            the end of each expert's rows.
    """

    node: Node
    ids: Node
    sorted_ids: Node
    order: Node
    converted: Node
    counts: Node
    offs: Node
    num_experts: int


def fuse_expert_sort(gm: GraphModule, _context: PassContext) -> int:
    """Rewrite; returns the number of sorts replaced. The order of rows within an expert may differ
    from the library's sort, which is not stable; no result depends on it."""
    sorts = list(_sorts(gm.graph))
    for sort in sorts:
        _drop_masks(gm.graph, sort)
        _replace(gm.graph, sort)
    return len(sorts)


def _sorts(graph: Graph) -> Iterator[_Sort]:
    for node in list(graph.nodes):
        if not calls_function(node, torch.sort) or len(node.args) != 1 or node.kwargs:
            continue
        ids = tensor_of(node.args[0])
        if ids is None or ids.dim() != 1 or ids.dtype != torch.int64:
            continue
        parts = {user.args[1]: user for user in node.users if calls(user, "getitem")}
        if len(parts) != len(node.users) or set(parts) != {0, 1}:
            continue
        for converted, counts, num_experts in _histograms(parts[0]):
            for offs in filter(_is_running_sum, counts.users):
                yield _Sort(
                    node, node.args[0], parts[0], parts[1], converted, counts, offs, num_experts
                )


def _histograms(sorted_ids: Node) -> Iterator[tuple[Node, Node, int]]:
    """The converted ids, the number of rows per expert, and the number of experts."""
    for converted in sorted_ids.users:
        if not calls(converted, "int", "float"):
            continue
        for node in converted.users:
            if not calls_function(node, torch.histc) or len(node.args) != 1:
                continue
            bins = node.kwargs.get("bins")
            if isinstance(bins, int) and node.kwargs == {"bins": bins, "min": 0, "max": bins - 1}:
                yield converted, node, bins


def _is_running_sum(node: Node) -> bool:
    given: dict[str, Any] = dict(zip(("input", "dim"), node.args, strict=False)) | dict(node.kwargs)
    given.pop("input", None)
    is_sum = calls_function(node, torch.cumsum) or calls(node, "cumsum")
    return is_sum and given == {"dim": 0, "dtype": torch.int32}


def _drop_masks(graph: Graph, sort: _Sort) -> None:
    """Remove ``masked_fill`` of rows without an expert from the inputs and results of the grouped
    matmuls of ``sort``."""
    for beyond in list(sort.sorted_ids.users):
        if not calls(beyond, "ge") or beyond.args[1] != sort.num_experts:
            continue
        masks = [user for user in beyond.users if calls(user, "unsqueeze")]
        for mask in masks:
            for filled in list(mask.users):
                if not calls(filled, "masked_fill", "masked_fill_") or filled.args[1] is not mask:
                    continue
                source = filled.args[0]
                if filled.args[2] != 0 or not isinstance(source, Node):
                    continue
                is_result = _is_of(source, sort)
                is_read = all(_is_of(u, sort) for u in _readers(source) if u is not filled)
                if is_result or (is_read and not filled.users):
                    filled.replace_all_uses_with(source)
                    graph.erase_node(filled)
            erase_unused(graph, (mask,))
        erase_unused(graph, (beyond,))


def _readers(node: Node) -> Iterator[Node]:
    """The nodes that read ``node`` directly or after a conversion."""
    for user in node.users:
        if calls(user, "to"):
            yield from _readers(user)
        else:
            yield user


def _is_of(node: Node, sort: _Sort) -> bool:
    """Whether ``node`` is a grouped matmul of the rows that ``sort`` sorts."""
    operands = grouped_operands(node)
    return operands is not None and operands[2] is sort.offs


def _replace(graph: Graph, sort: _Sort) -> None:
    with graph.inserting_before(sort.node):
        call = graph.call_function(sort_by_expert, (sort.ids, sort.num_experts))
        sorted_ids, order, inverse, offs = (
            graph.call_function(operator.getitem, (call, i)) for i in range(4)
        )
    pairs = [(sorted_ids, sort.sorted_ids), (order, sort.order), (offs, sort.offs)]
    for new, old in [*pairs, (inverse, sort.order)]:
        new.meta["example_value"] = example(old)
    for assignment, empty in list(_inverses(sort.order)):
        numbers: Any = assignment.args[2]
        graph.erase_node(assignment)
        empty.replace_all_uses_with(inverse)
        graph.erase_node(empty)
        erase_unused(graph, (numbers,))
    for new, old in pairs:
        old.replace_all_uses_with(new)
    erase_unused(graph, (inverse, sort.offs, sort.counts, sort.converted))
    erase_unused(graph, (sort.sorted_ids, sort.order, sort.node))
    # Ids that are read only by the nodes that clamp them.
    if all(calls(user, "clamp_") and not user.users for user in sorted_ids.users):
        erase_unused(graph, list(sorted_ids.users))
        erase_unused(graph, (sorted_ids,))


def _inverses(order: Node) -> Iterator[tuple[Node, Node]]:
    """Assignments of 0, 1, 2, ... to a new tensor by ``order``, and that tensor."""
    for node in order.users:
        if node.target is not operator.setitem or node.args[1] is not order:
            continue
        empty, _, numbers = node.args
        if not isinstance(empty, Node):
            continue
        is_new = calls(empty, "empty_like") and empty.args == (order,) and not empty.kwargs
        is_counting = calls(numbers, "arange") and len(numbers.args) == 1
        if is_new and is_counting and not node.users:
            yield node, empty
