"""Cut a graph at its LM head: the nodes that compute logits from hidden states become a separate
function.

::

    hidden [1, T, H] ─► keep_rows(·, logits_to_keep) ─► linear, softcap, ... ─► logits [1, S, V]
           └─► a second result of the graph             └──── the head ────┘

So the head can run over any rows later, with exactly the calls of the graph. The result for a row
is the same to the bit if those calls are batch-invariant. The rest can run alone, for its KV.

``expose_hidden`` runs after all passes and before regions are compiled, and inserts a call that no
region includes. ``extract_head`` and ``without_head`` run last.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..fx.nodes import calls_function, example

_KEPT_ROWS = ("input", "logits_to_keep")
_NUM_KEPT = ("size", "logits_to_keep", 0)


def keep_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """``[1, S, H]`` from ``[1, T, H]``: the start of the head."""
    return hidden[:, rows, :]


def expose_hidden(gm: GraphModule, sources: Mapping[str, tuple[Any, ...]]) -> bool:
    """Make the graph return (logits, hidden states, ...), if the place is found.

    Args:
        sources: of the placeholders that are not constants, see :class:`.dynamo.Traced`.
    """
    graph = gm.graph
    kept = [n for n in graph.nodes if sources.get(n.name) == _KEPT_ROWS and n.op == "placeholder"]
    if len(kept) != 1 or len(kept[0].users) != 1:
        return False
    (cut,) = kept[0].users
    if not calls_function(cut, operator.getitem):
        return False
    hidden, index = cut.args
    if not isinstance(hidden, Node) or index != (slice(None), kept[0], slice(None)):
        return False
    cut.target, cut.args = keep_rows, (hidden, kept[0])
    output = next(n for n in graph.nodes if n.op == "output")
    (results,) = output.args
    output.args = ((results[0], hidden, *results[1:]),)
    gm.recompile()
    return True


class Head:
    """The function from hidden states to logits.

    Args:
        function: of the graph. sources: of its arguments; None for the rows.
    """

    def __init__(
        self, function: Callable[..., Any], sources: Sequence[tuple[Any, ...] | None]
    ) -> None:
        self._function = function
        self._arguments = [None if s is None or s == _NUM_KEPT else s[1] for s in sources]
        self._rows_slot = sources.index(None)
        self._size_slots = [slot for slot, source in enumerate(sources) if source == _NUM_KEPT]

    def __call__(self, rows: Tensor) -> Tensor:
        """Logits ``[R, V]`` of hidden states ``[R, H]``, R at least ``MIN_SIZE``."""
        arguments: list[Any] = self._arguments.copy()
        arguments[self._rows_slot] = rows.unsqueeze(0)
        for slot in self._size_slots:
            arguments[slot] = len(rows)
        logits: Tensor = self._function(*arguments)[0]
        return logits[0]


def extract_head(gm: GraphModule, sources: Sequence[tuple[Any, ...]]) -> Head | None:
    """The head of a graph with exposed hidden states; None if it reads more of a step than those.

    Args:
        sources: of all placeholders, see :meth:`.dynamo.Traced.arguments`.
    """
    nodes = list(gm.graph.nodes)
    places = dict(zip((n for n in nodes if n.op == "placeholder"), sources, strict=True))
    (cut,) = (node for node in nodes if calls_function(node, keep_rows))
    logits: Node = nodes[-1].args[0][0]
    needed: set[Node] = set()
    pending = [logits]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += [] if node is cut else node.all_input_nodes
    read = [place for place in nodes if place in needed and place in places]
    if any(places[node][0] != "constant" and places[node] != _NUM_KEPT for node in read):
        return None
    graph = Graph()
    rows = graph.placeholder("hidden_rows")
    rows.meta["example_value"] = example(cut)
    copies: dict[Node, Node] = {cut: rows}
    for node in nodes:
        if node in needed and node is not cut:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output((copies[logits],))
    graph.lint()
    return Head(GraphModule(gm, graph).forward, [None, *(places[node] for node in read)])


def without_head(gm: GraphModule) -> Callable[..., Any]:
    """The function of a graph with exposed hidden states without its head: it takes the same
    arguments, and returns (hidden states, ...)."""
    graph = Graph()
    results: Any = graph.graph_copy(gm.graph, {})
    graph.output(tuple(results[1:]))
    pending: list[Node] = [results[0]]
    while pending:
        node = pending.pop()
        if not node.users and node.op != "placeholder" and not node._erased:
            pending += node.all_input_nodes
            graph.erase_node(node)
    graph.lint()
    return GraphModule(gm, graph).forward
