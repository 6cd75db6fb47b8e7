"""Hands heads of queries and keys to the delta rule as they are, not repeated for the heads of
values that share them.

::

    repeat_interleave(query, n, dim=2) ─► squeeze ─┐
    repeat_interleave(key, n, dim=2) ───► squeeze ─┴─► delta_rule      becomes

    query ─► squeeze ─┐
    key ───► squeeze ─┴─► delta_rule

which finds a value's head of keys by itself, and computes once for all heads of values what follows
from queries and keys alone.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from ..fx.nodes import calls, calls_op, erase_unused, tensor_of, written_nodes
from ..fx.pass_context import PassContext
from ..fx.recorder import recording


def share_heads(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of recurrences that read shared heads. Results are unchanged
    bit for bit."""
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    with recording(graph) as results:
        for node in list(graph.nodes):
            if not calls_op(node, "delta_rule"):
                continue
            found = [_repeated(argument) for argument in node.args[:2]]
            times = {pair[1] for pair in found if pair is not None}
            if None in found or len(times) != 1:
                continue
            sources = [pair[0] for pair in found if pair is not None]
            if not written.isdisjoint(sources):
                continue
            with graph.inserting_before(node):
                shared = [graph.call_method("squeeze", (source, 0)) for source in sources]
            for new in shared:
                results.record(new)
            old = node.args[:2]
            node.args = (*shared, *node.args[2:])
            erase_unused(graph, [n for argument in old for n in (argument, argument.args[0])])
            count += 1
    return count


def _repeated(node: Any) -> tuple[Node, int] | None:
    """(source, times) if ``node`` is ``[T, H, K]`` whose heads are those of ``source``
    ``[1, T, Hk, K]``, each several times in succession."""
    if not calls(node, "squeeze") or node.args[1:] != (0,) or node.kwargs:
        return None
    repeat = node.args[0]
    if not calls(repeat, "repeat_interleave") or not isinstance(repeat.args[0], Node):
        return None
    given = dict(zip(("repeats", "dim"), repeat.args[1:], strict=False)) | repeat.kwargs
    repeats, dim = given.pop("repeats", None), given.pop("dim", None)
    source = tensor_of(repeat.args[0])
    is_of_heads = source is not None and source.dim() == 4 and dim in (2, -2)
    if given or not is_of_heads or type(repeats) is not int or repeats < 1:
        return None
    return repeat.args[0], repeats
