"""A second form of a graph: what is behind its last attention is computed for kept rows only.

::

    attention, residual [T, ...] ─► projections, norms, experts ─► keep_rows ─► head     whole
    attention, residual [T, ...] ─► take_rows ─► the same, of [S, ...] ────────► head     pruned

Of a prompt's tokens a step keeps the last one's logits. What lies between the last call that mixes
rows (attention, a recurrence) and the head is the *tail*: calls that :mod:`..fx.row_kinds` knows to
be row-wise, and that nothing reads but one another and the head. The pruned form gathers the kept
rows of what the tail reads, the *frontier*, and makes the same calls for those; all before stays as
it is, writes to caches too. Where a row's bits do not depend on the number of rows, both forms give
the same bits.

It comes after all passes and before regions are compiled, which both forms share.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..fx.nodes import (
    calls_function,
    example,
    is_in_place,
    is_linear,
    is_ours,
    may_be_view,
    positions,
)
from ..fx.row_kinds import PADDING_ARGUMENT, RowKinds
from ..fx.token_sizes import Order
from .split_head import KEPT_ROWS, find_cut, take_rows

_TOKENS = ("input", "input_ids")
_MATMULS = ("linear", "mlp", "product", "grouped_mm", "head_values")


class Tail(NamedTuple):
    """Attributes:
    nodes: of the tail. frontier: what they read that has rows of tokens, and along which dim.
    """

    nodes: set[Node]
    frontier: dict[Node, int]


def prune_rows(
    gm: GraphModule, sources: Mapping[str, tuple[Any, ...]], communicator: object = None
) -> GraphModule | None:
    """The pruned form of a graph whose head :func:`.split_head.expose_hidden` has found; the whole
    form then returns the frontier in place of hidden states, and so does this one; ``gm`` is to be
    recompiled.

    Args:
        sources: of the placeholders that are no constants. communicator: as of
            :class:`..fx.row_kinds.RowKinds`.

    Returns:
        None if there is nothing to be saved; ``gm`` is then as it was.
    """
    graph = gm.graph
    cut, num_tokens = find_cut(graph), _num_tokens(graph, sources)
    if cut is None or num_tokens is None:
        return None
    kinds = RowKinds(num_tokens, communicator)
    tail = find_tail(graph, cut, kinds, sources)
    if not any(map(_is_matmul, tail.nodes)):
        return None
    pruned = _Pruned(graph, cut, kinds, tail).build()
    output = graph.output_node()
    output.args = ((output.args[0][0], *tail.frontier),)  # type: ignore[index]
    return GraphModule(gm, pruned)


def _num_tokens(graph: Graph, sources: Mapping[str, tuple[Any, ...]]) -> object:
    """The number of tokens as it is on record."""
    ids = _placeholder(graph, sources, _TOKENS)
    value = None if ids is None else example(ids)
    return value.shape[-1] if isinstance(value, Tensor) else None


def _placeholder(
    graph: Graph, sources: Mapping[str, tuple[Any, ...]], source: tuple[Any, ...]
) -> Node | None:
    nodes = graph.find_nodes(op="placeholder")
    return next((node for node in nodes if sources.get(node.name) == source), None)


def settle_sizes(pruned: GraphModule, sources: Mapping[str, tuple[Any, ...]]) -> None:
    """Give compiled regions of the tail, which may ask for the number of tokens, that of rows.

    Args:
        sources: as of :func:`prune_rows`.
    """
    graph = pruned.graph
    rows, wanted = _placeholder(graph, sources, KEPT_ROWS), str(_num_tokens(graph, sources))
    assert rows is not None  # the graph has a cut
    behind: set[Node] = set()
    for node in list(graph.nodes):
        if calls_function(node, take_rows) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            sizes = [n for n in node.all_input_nodes if n.op == "placeholder"]
            for size in sizes:
                if str(example(size)) == wanted and not isinstance(example(size), Tensor):
                    with graph.inserting_before(node):
                        node.replace_input_with(size, graph.call_method("size", (rows, 0)))
    graph.lint()
    pruned.recompile()


def _is_matmul(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return is_linear(node) or (is_ours(node) and any(part in name for part in _MATMULS))


def find_tail(graph: Graph, cut: Node, kinds: RowKinds, sources: Collection[str]) -> Tail:
    """The largest tail of a graph that keeps rows at ``cut``.

    Args:
        sources: names of the placeholders that are no constants.
    """
    hidden = cut.args[0]
    assert isinstance(hidden, Node)
    nodes = _candidates(graph, cut, hidden, kinds)
    known = _without(graph, sources)
    while leaving := [node for node in nodes if not _may_stay(node, nodes, cut, kinds, known)]:
        nodes.difference_update(leaving)
    order = positions(graph)
    frontier: dict[Node, int] = {}
    for node in sorted(nodes or {cut}, key=order.__getitem__):
        for source in node.all_input_nodes:
            kind = kinds.of(source)
            if source not in nodes and kind is not None and kind.order is Order.ROWS:
                frontier.setdefault(source, kind.dim)
    return Tail(nodes, frontier)


def _without(graph: Graph, sources: Collection[str]) -> set[Node]:
    """Nodes that are the same in every step."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            is_same = node.name not in sources
        else:
            is_same = not is_in_place(node) and all(n in found for n in node.all_input_nodes)
        if is_same:
            found.add(node)
    return found


def _candidates(graph: Graph, cut: Node, hidden: Node, kinds: RowKinds) -> set[Node]:
    """Row-wise calls that nothing reads but one another and the head, and calls that only write to
    what they are given. More than stay: what those write may be of others."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        writers = [user for user in node.users if _only_writes(user)]
        readers = {user for user in node.users if user.op != "output"}.difference(writers)
        is_inside = readers == {cut} if node is hidden else node.users and readers <= found
        if is_inside and node is not cut and _is_row_wise(node, kinds):
            found.add(node)
            found.update(user for user in writers if _is_row_wise(user, kinds))
    return found


def _is_row_wise(node: Node, kinds: RowKinds) -> bool:
    kind = kinds.row_wise(node)
    return kind is not None and kind.order is not Order.CONSTANT


def _only_writes(node: Node) -> bool:
    return not node.users and node.op in ("call_function", "call_method") and is_in_place(node)


def _may_stay(node: Node, nodes: set[Node], cut: Node, kinds: RowKinds, known: set[Node]) -> bool:
    """Whether a node can be of a tail that has no others than ``nodes``."""
    if not all(user in nodes or user is cut or user.op == "output" for user in node.users):
        return False
    if is_in_place(node) and not _owns(node.args[0], nodes):
        return False  # others may read what it writes
    for source in node.all_input_nodes:
        if source in nodes or source in known or _is_padding(node, source):
            continue
        if kinds.is_size(source):
            if not kinds.is_known_size(source):
                return False
            continue
        kind = kinds.of(source)
        # What is sorted by expert is so with all the rows of its sort.
        if kind is None or kind.order is not Order.ROWS:
            return False
    return True


def _is_padding(node: Node, source: Node) -> bool:
    place = PADDING_ARGUMENT.get(getattr(node.target, "__name__", "")) if is_ours(node) else None
    return place is not None and len(node.args) > place and node.args[place] is source


def _owns(node: object, nodes: set[Node]) -> bool:
    """Does a value lie in memory that calls of a tail have made?"""
    while isinstance(node, Node) and node in nodes:
        if not may_be_view(node) and not is_in_place(node):
            return True
        node = node.args[0]
    return False


class _Pruned:
    """Builds the pruned form."""

    def __init__(self, graph: Graph, cut: Node, kinds: RowKinds, tail: Tail) -> None:
        self._whole, self._cut, self._kinds, self._tail = graph, cut, kinds, tail
        self._graph = Graph()
        self._copies: dict[Node, Node] = {}
        self._taken: dict[Node, Node] = {}
        self._sizes: dict[int, Node] = {}

    def build(self) -> Graph:
        tail, rows = self._tail, self._cut.args[1]
        assert isinstance(rows, Node)
        for node in self._whole.nodes:
            if node.op == "output":
                break
            if node is self._cut:
                self._copies[node] = self._copies[node.args[0]]  # type: ignore[index]
            elif node in tail.nodes:
                self._copies[node] = self._copy_of_tail(node)
            else:
                self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
        logits = self._whole.output_node().args[0][0]  # type: ignore[index]
        frontier = [self._copies[node] for node in tail.frontier]
        self._graph.output((self._copies[logits], *frontier))  # type: ignore[index]
        return self._graph

    def _copy_of_tail(self, node: Node) -> Node:
        for source in node.all_input_nodes:
            if source in self._tail.frontier and source not in self._taken:
                self._taken[source] = self._take(source, self._tail.frontier[source])
        # Records stay those of all tokens: a region is then the same one in both forms.
        copy = self._graph.node_copy(node, self._of_tail)
        for place, argument in enumerate(node.args):
            if isinstance(argument, Node) and _is_padding(node, argument):
                copy.update_arg(place, None)
        return copy

    def _take(self, source: Node, dim: int) -> Node:
        rows = self._copies[self._cut.args[1]]  # type: ignore[index]
        taken = self._graph.call_function(take_rows, (self._copies[source], rows, dim))
        taken.meta["example_value"] = example(source)
        return taken

    def _of_tail(self, node: Node) -> Any:
        if node in self._taken:
            return self._taken[node]
        return self._size(example(node)) if self._kinds.is_size(node) else self._copies[node]

    def _size(self, value: Any) -> Any:
        """A number of the step, or a shape, with the kept rows in place of the tokens."""
        if isinstance(value, torch.Size):
            shape = self._graph.call_function(torch.Size, ([self._size(part) for part in value],))
            shape.meta["example_value"] = value
            return shape
        times = self._kinds.multiple(value)
        if not times:
            return value
        if times not in self._sizes:
            rows = self._copies[self._cut.args[1]]  # type: ignore[index]
            size: Any = self._graph.call_method("size", (rows, 0))
            if times > 1:
                size = self._graph.call_function(operator.mul, (size, times))
            size.meta["example_value"] = value
            self._sizes[times] = size
        return self._sizes[times]
