"""Fuses a router, the sort by the experts it chose and the copy of the tokens' rows to them into a
call that is one launch for few tokens.

::

    route(logits) ─┬─► weights
                   └─► ids ─► sort_by_expert(·) ─┬─► offs
                                                 └─► inverse ─► spread_rows(tokens, ·)

It comes after ``combine_experts``, which makes the last of the three.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ...kernels.experts.expert_rows import spread_rows
from ...kernels.experts.route import route
from ...kernels.experts.route_rows import route_rows
from ...kernels.experts.sort_by_expert import sort_by_expert
from ..fx.nodes import (
    calls,
    calls_function,
    example,
    last_size,
    positions,
    tensor_of,
    written_nodes,
)
from ..fx.pass_context import PassContext

_INVERSE, _OFFS = 2, 3  # results of the sort


@dataclass(frozen=True, slots=True)
class _Chain:
    """Nodes of one layer's.

    Attributes:
        views: of the ids, between router and sort.
        weights, inverse, offs: the results that are read, each one node or none.
    """

    router: Any
    views: tuple[Node, ...]
    sort: Any
    copy: Any
    weights: Node | None
    ids: Node
    inverse: Node
    offs: Node | None


def fuse_route_rows(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of routers joined. Results are unchanged, as
    :func:`.route_rows.route_rows` promises."""
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    order = positions(graph)
    for node in list(graph.nodes):
        if not calls_function(node, spread_rows):
            continue
        found = _chain(node)
        if found is None:
            continue
        logits, tokens = found.router.args[0], found.copy.args[0]
        # The call is where the router was, and reads the tokens earlier than the copy did.
        if not written.isdisjoint({logits, tokens}):
            continue
        if order[tokens] > order[found.router] and not _move_view(tokens, found.router, order):
            continue
        _replace(graph, found)
        count += 1
    return count


def _chain(copy: Any) -> _Chain | None:
    """What ends in ``copy``, if nothing else reads what the fused call does not give."""
    inverse: Any
    tokens, inverse, top_k = copy.args
    sort = inverse.args[0] if calls(inverse, "getitem") else None
    if not calls_function(sort, sort_by_expert) or inverse.args[1] != _INVERSE:
        return None
    sorted_parts = _parts(sort)
    if sorted_parts is None or not set(sorted_parts) <= {_INVERSE, _OFFS}:
        return None
    if sum(calls_function(user, spread_rows) for user in inverse.users) != 1:
        return None
    views = []
    ids: Any = sort.args[0]
    while calls(ids, "view", "reshape", "flatten") and len(ids.users) == 1:
        views.append(ids)
        ids = ids.args[0]
    router = ids.args[0] if calls(ids, "getitem") and len(ids.users) == 1 else None
    if not calls_function(router, route) or ids.args[1] != 1 or router.args[1] != top_k:
        return None
    logits, rows = tensor_of(router.args[0]), tensor_of(tokens)
    if logits is None or rows is None or (logits.dim(), rows.dim()) != (2, 2):
        return None
    routed_parts = _parts(router)
    if routed_parts is None or last_size(router.args[0]) != sort.args[1]:
        return None
    # As of a sort that knows nothing of padding, or of this many experts per token.
    if len(sort.args) > 2 and sort.args[2] != top_k:
        return None
    return _Chain(
        router, tuple(views), sort, copy, routed_parts.get(0), ids, inverse, sorted_parts.get(_OFFS)
    )


def _move_view(tokens: Any, router: Node, order: dict[Node, int]) -> bool:
    """Move ``tokens`` before the router if it is a view of something that is there, as that which
    DeepSeek-V2 takes of the rows anew for its experts; returns whether it has been."""
    if not calls(tokens, "view", "reshape", "flatten"):
        return False
    if any(order[source] > order[router] for source in tokens.all_input_nodes):
        return False
    router.prepend(tokens)
    return True


def _parts(node: Node) -> dict[Any, Node] | None:
    """The results of ``node`` that are read, if each is taken once."""
    parts = {user.args[1]: user for user in node.users if calls(user, "getitem")}
    return parts if len(parts) == len(node.users) else None


def _replace(graph: Graph, found: _Chain) -> None:
    logits, top_k, normalisation, dtype = found.router.args
    tokens, query_starts = found.copy.args[0], found.sort.args[3:4]
    with graph.inserting_before(found.router):
        call = graph.call_function(
            route_rows, (logits, tokens, top_k, normalisation, dtype, *query_starts)
        )
        olds = (found.copy, found.weights, found.inverse, found.offs)
        for number, old in enumerate(olds):
            if old is None:
                continue
            new = graph.call_function(operator.getitem, (call, number))
            new.meta["example_value"] = example(old)
            old.replace_all_uses_with(new)
    chain = (found.copy, found.inverse, found.offs, found.sort, *found.views)
    for node in (*chain, found.ids, found.weights, found.router):
        if node is not None:
            graph.erase_node(node)
