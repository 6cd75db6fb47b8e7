"""Pass heads of queries and keys to the delta rule directly, not repeated for the value heads that
share them.

::

    repeat_interleave(query, n, dim=2) ─► squeeze ─┐
    repeat_interleave(key, n, dim=2) ───► squeeze ─┴─► delta_rule      becomes

    query ─► squeeze ─┐
    key ───► squeeze ─┴─► delta_rule

The delta rule itself finds the key head of each value head. It computes what depends only on
queries and keys once for all value heads that share them.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ..fx.nodes import tensor_of
from ..fx.pass_context import PassContext
from ..fx.recorder import recording
from ..fx.rules import Match, Pattern, Rest, Rule, call, op, values


def _repeated(name: str) -> Pattern:
    """``[T, H, K]``: the heads of ``[1, T, Hk, K]``, each repeated several times in succession."""
    repeat = call("repeat_interleave", args=values(name, "times"), dim=(2, -2), is_shared=True)
    return call("squeeze", args=(repeat, 0), is_shared=True)


def _are_heads(m: Match) -> bool:
    tensors = map(tensor_of, (m["query"], m["key"]))
    return type(m["times"]) is int and all(t is not None and t.dim() == 4 for t in tensors)


def share_heads(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of recurrences that read shared heads. Results are unchanged bit
    for bit."""

    def replacement(m: Match) -> dict[Node, Node]:
        shared = [m.graph.call_method("squeeze", (m[name], 0)) for name in ("query", "key")]
        for new in shared:
            results.record(new)
        m.root.args = (*shared, *m.root.args[2:])
        return {}

    heads = _repeated("query"), _repeated("key")
    rule = Rule(call(*op("delta_rule"), args=(*heads, Rest())), replacement, (_are_heads,))
    with recording(gm.graph) as results:
        return rule(gm, context)
