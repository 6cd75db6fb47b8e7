"""Cuts a graph at its head: what computes logits from hidden states becomes a function of its own.

::

    hidden [1, T, H] ─► keep_rows(·, logits_to_keep) ─► linear, softcap, ... ─► logits [1, S, V]
           └─► a second result of the graph   └──── the head ────┘

So the head can run over any rows later, by the very calls that the graph makes: what it gives for a
row is the same to the bit wherever those calls are batch-invariant. Of a graph that
:mod:`.prune_rows` has given a second form, the head begins behind the last attention, and what is
in front of it are several tensors, the *frontier*.

``expose_hidden`` comes after all passes and before regions are compiled, as a call of ours that no
region takes in; ``extract_head`` comes last.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..fx.nodes import calls_function

KEPT_ROWS = ("input", "logits_to_keep")
_NUM_KEPT = ("size", "logits_to_keep", 0)


def keep_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """``[1, S, H]`` of ``[1, T, H]``: where the head begins."""
    return hidden[:, rows, :]


def take_rows(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """``x`` at the places ``rows`` of ``dim``."""
    if x.dtype.itemsize == 1 and x.is_floating_point():  # torch has no such kernel for e4m3
        return x.view(torch.uint8).index_select(dim, rows).view(x.dtype)
    return x.index_select(dim, rows)


def find_cut(graph: Graph) -> Node | None:
    """The call of :func:`keep_rows`, if the graph has one."""
    return next((node for node in graph.nodes if calls_function(node, keep_rows)), None)


def expose_hidden(gm: GraphModule, sources: Mapping[str, tuple[Any, ...]]) -> bool:
    """Make the graph return (logits, hidden states), if the place is found. It is to be recompiled.

    Args:
        sources: of the placeholders that are no constants, as of :class:`.dynamo.Traced`.
    """
    graph = gm.graph
    kept = [n for n in graph.nodes if sources.get(n.name) == KEPT_ROWS and n.op == "placeholder"]
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
    output.args = ((*results, hidden),)
    return True


class Head:
    """From what is in front of the head to logits.

    Args:
        function: of the graph. sources: where its arguments come from; of what steps bring,
            ``("frontier", number)``, ``KEPT_ROWS`` or ``_NUM_KEPT``.
        dims: of the frontier, the dim of the tokens.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        sources: Sequence[tuple[Any, ...]],
        dims: Sequence[int],
    ) -> None:
        self._function, self._sources, self._dims = function, sources, tuple(dims)

    def __call__(self, hidden: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Logits ``[R, V]`` of the tokens ``rows`` int64 ``[R]``, R at least ``MIN_SIZE``.

        Args:
            hidden: as of :class:`..step_inputs.StepOutputs`.
        """
        arguments: list[Any] = []
        for source in self._sources:
            if source[0] == "frontier":
                arguments.append(hidden[source[1]])
            elif source[0] == "constant":
                arguments.append(source[1])
            else:
                arguments.append(rows if source == KEPT_ROWS else len(rows))
        logits: Tensor = self._function(*arguments)[0]
        return logits[0]

    def blank(self, hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same of one token, zeros."""
        firsts = (x.narrow(dim, 0, 1) for x, dim in zip(hidden, self._dims, strict=True))
        return tuple(map(torch.zeros_like, firsts))


def extract_head(gm: GraphModule, sources: Sequence[tuple[Any, ...]]) -> Head | None:
    """The head of a graph that returns what is in front of it; None if it reads more of a step.

    Args:
        gm: whole or pruned. sources: of all placeholders, as of :meth:`.dynamo.Traced.arguments`.
    """
    nodes = list(gm.graph.nodes)
    places = dict(zip((n for n in nodes if n.op == "placeholder"), sources, strict=True))
    logits, *frontier = nodes[-1].args[0]
    needed: set[Node] = set()
    pending = [logits]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            if node not in frontier and node.op != "placeholder":
                pending += node.all_input_nodes
                # What only writes to it gives nothing that is read.
                pending += [n for n in node.users if not n.users and n.op != "output"]
    read = [place for place in nodes if place in needed and place in places]
    if any(places[n][0] != "constant" and places[n] not in (KEPT_ROWS, _NUM_KEPT) for n in read):
        return None
    graph = Graph()
    copies: dict[Node, Node] = {}
    for number, node in enumerate(frontier):
        copies[node] = graph.placeholder(f"frontier_{number}")
    taken = [node for node in nodes if calls_function(node, keep_rows, take_rows)]
    dims = {node.args[0]: 1 if node.target is keep_rows else node.args[2] for node in taken}
    for node in nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output((copies[logits],))
    graph.lint()
    given = [("frontier", number) for number in range(len(frontier))]
    return Head(
        GraphModule(gm, graph).forward,
        [*given, *(places[node] for node in read)],
        [dims[node] for node in frontier],
    )
