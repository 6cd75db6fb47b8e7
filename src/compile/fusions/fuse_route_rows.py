"""Fuse a router, the sort by the selected experts and the copy of the tokens' rows to them into a
call that is one launch for few tokens.

::

    route(logits) ─┬─► weights
                   └─► ids ─► sort_by_expert(·) ─┬─► offs
                                                 └─► inverse ─► spread_rows(tokens, ·)

Runs after ``combine_experts``, which creates the last of the three. :func:`.route_rows.route_rows`
guarantees unchanged results.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from ...kernels.moe.expert_rows import spread_rows
from ...kernels.moe.route import route
from ...kernels.moe.route_rows import route_rows
from ...kernels.moe.sort_by_expert import sort_by_expert
from ..fx.nodes import calls, calls_function, last_size, tensor_of
from ..fx.rules import Chain, Match, Rest, Rule, Value, call

_VIEWS = ("view", "reshape", "flatten")
_WEIGHTS, _IDS, _INVERSE, _OFFS = 0, 1, 2, 3  # results of the router, and of the sort

_ROUTER = call(route, args=(Value("logits"), Value("top_k"), Rest()), name="router", is_shared=True)
_CHOSEN = Chain(call(operator.getitem, args=(_ROUTER, _IDS)), _VIEWS)
_SORT = call(
    sort_by_expert, args=(_CHOSEN, Value("num_experts"), Rest()), name="sort", is_shared=True
)
_TO_EXPERTS = call(operator.getitem, args=(_SORT, _INVERSE), name="inverse", is_shared=True)


def _parts(node: Node) -> dict[Any, Node]:
    """The results of ``node`` that are read, by number; none if one is read twice."""
    parts = {user.args[1]: user for user in node.users if calls(user, "getitem")}
    return parts if len(parts) == len(node.users) else {}


def _is_chain(m: Match) -> bool:
    """Whether all other readers of router and sort read results that the fused call returns."""
    logits, rows, tokens = tensor_of(m["logits"]), tensor_of(m["tokens"]), m["tokens"]
    if logits is None or rows is None or (logits.dim(), rows.dim()) != (2, 2):
        return False
    if not _parts(m["router"]) or set(_parts(m["sort"])) not in ({_INVERSE}, {_INVERSE, _OFFS}):
        return False
    if sum(calls_function(user, spread_rows) for user in m["inverse"].users) != 1:
        return False
    # A sort without padding arguments, or with those of this ``top_k``.
    padding = m["sort"].args[2:3]
    if last_size(m["logits"]) != m["num_experts"] or padding not in ((), (m["top_k"],)):
        return False
    return tokens < m["router"] or _is_early_view(tokens, m["router"])


def _is_early_view(tokens: Node, router: Node) -> bool:
    """Whether ``tokens`` is a view of a value that exists before the router, such as the second
    view of the rows that DeepSeek-V2 takes for its experts."""
    return calls(tokens, *_VIEWS) and all(node < router for node in tokens.all_input_nodes)


def _route_rows(m: Match) -> dict[Node, Node]:
    logits, *routing = m["router"].args
    if m["router"] < m["tokens"]:
        m["router"].prepend(m["tokens"])
    joined = m.call(route_rows, logits, m["tokens"], *routing, *m["sort"].args[3:4])
    weights, offs = _parts(m["router"]).get(_WEIGHTS), _parts(m["sort"]).get(_OFFS)
    results = enumerate((m.root, weights, m["inverse"], offs))
    return {
        old: m.call(operator.getitem, joined, number) for number, old in results if old is not None
    }


fuse_route_rows = Rule(
    call(spread_rows, args=(Value("tokens"), _TO_EXPERTS, Value("top_k"))),
    _route_rows,
    guards=(_is_chain,),
    at="router",
)
