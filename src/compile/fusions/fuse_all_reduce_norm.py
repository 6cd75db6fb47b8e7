"""Fuses an all-reduce, the residual behind it and the norm of their sum into one launch.

::

    all_reduce(partial) ─► add_rms_norm(·, residual) ──┬─► normed
                                                       └─► the sum, for the next residual
    all_reduce(partial) ─► rms_norm(·) ──────────────────► normed

The second form is that of models with norms behind their layers. It comes after
``fuse_norm_linear``: a norm that has joined its matmul stays there.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from ...kernels.collectives.communicator import Communicator
from ...kernels.fused import dispatch as fused
from ..fx.nodes import calls, calls_function, example, last_size, only_user
from ..fx.pass_context import PassContext


class _Sum(NamedTuple):
    """``source`` is the result of ``all_reduce``, or a view of it; nothing else reads either."""

    source: Node
    all_reduce: Any


def fuse_all_reduce_norm(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of norms joined. Bits are unchanged, as
    :meth:`.communicator.Communicator.all_reduce_norm` promises. Run it after
    ``bind_collectives``.

    Shapes alone decide, so that all ranks have the same collectives in the same order.
    """
    graph, communicator, count = gm.graph, context.communicator, 0
    if communicator is None:
        return 0
    for norm in list(graph.nodes):
        if not calls_function(norm, fused.add_rms_norm, fused.rms_norm):
            continue
        has_residual = norm.target is fused.add_rms_norm
        sources = norm.args[: 2 if has_residual else 1]
        weight, eps, form = norm.args[len(sources) :]
        found = _sum_among(sources, communicator)
        # The weight is read early, so nothing of a step may compute it.
        if found is None or context.constant(weight) is None:
            continue
        residual = next((source for source in sources if source is not found.source), None)
        with graph.inserting_before(norm):
            partial = found.all_reduce.args[0]
            if found.source is not found.all_reduce:  # then the same view of this rank's part
                view = found.source
                arguments = (partial, *view.args[1:])
                partial = graph.call_method(str(view.target), arguments, view.kwargs)
                partial.meta["example_value"] = example(view)
            joined = graph.call_function(
                communicator.all_reduce_norm, (partial, residual, weight, eps, form)
            )
            if has_residual:
                result = joined
            else:
                result = graph.call_function(operator.getitem, (joined, 0))
                result.meta["example_value"] = example(norm)
        norm.replace_all_uses_with(result)
        for node in dict.fromkeys((norm, *found)):
            graph.erase_node(node)
        count += 1
    return count


def _sum_among(sources: tuple[Node, ...], communicator: Communicator) -> _Sum | None:
    """The sum that a norm reads, if there is one and it is not added to itself."""
    if len(set(sources)) < len(sources):
        return None
    for source in sources:
        all_reduce = source.args[0] if _is_view_of_rows(source) else source
        if calls_function(all_reduce, communicator.all_reduce) and all(
            map(only_user, (source, all_reduce))
        ):
            return _Sum(source, all_reduce)
    return None


def _is_view_of_rows(node: Node) -> bool:
    """Of other leading dimensions, as experts have them."""
    if node.op != "call_method" or not calls(node, "view", "reshape"):
        return False
    return last_size(node) == last_size(node.args[0]) is not None
