"""Fuses the sum over a token's experts, the addition of a shared expert if there is one, that of
the residual, and the norm of the result into a call that is one launch for few tokens.

::

    combine_experts(·) ─► view ─► [add(·, shared) ─► view] ─► add_rms_norm(·, residual) ─┬─► normed
                                                                                         └─► sum

``shared`` may be ``sigmoid(logits) * rows`` with one logit per token. If anything else stands in
between, a factor of the sum say, nothing is fused. The pass comes after those that join such norms
to what reads them: those stay there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from torch.fx import GraphModule, Node

from ...kernels.experts.expert_rows import combine_add_rms_norm, combine_experts
from ...kernels.fused import dispatch as fused
from ..fx.nodes import (
    calls,
    calls_function,
    dtype_of,
    erase_unused,
    last_size,
    operands,
    shape_of,
    written_nodes,
)
from ..fx.pass_context import PassContext


@dataclass(frozen=True, slots=True)
class _Sum:
    """Nodes of a sum over a token's experts.

    Attributes:
        combined: the call that sums. chain: what comes behind it, itself included.
        shared: what is added to it: nothing, or the shared expert's rows, or those and the logits
            of their factors.
    """

    combined: Any
    chain: list[Node]
    shared: tuple[Node, ...]


def fuse_combine_norm(gm: GraphModule, _context: PassContext) -> int:
    """Rewrites, and returns the number of norms joined. Results are unchanged, as
    :func:`.combine_norm.combine_add_rms_norm` promises."""
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    for norm in list(graph.nodes):
        if not calls_function(norm, fused.add_rms_norm):
            continue
        for source, residual in (norm.args[:2], norm.args[1::-1]):
            found = _sum(source)
            if found is None:
                continue
            rows, weights, inverse, top_k, dtype = found.combined.args
            # The rows are read where the norm is.
            inputs = {rows, weights, inverse, residual, *found.shared}
            if dtype != dtype_of(residual) or not written.isdisjoint({*inputs, *found.chain}):
                continue
            norm.target = combine_add_rms_norm
            norm.args = (rows, weights, inverse, top_k, residual, *norm.args[2:], *found.shared)
            erase_unused(graph, found.chain)
            count += 1
            break
    return count


def _sum(source: Node) -> _Sum | None:
    """The sum over experts that ``source`` is a view of, a shared expert added or not."""
    behind = _views(source)
    if _is_combined(behind[-1]):
        return _Sum(behind[-1], behind, ())
    total: Any = behind[-1]
    pair = operands(total) if calls(total, "add") and len(total.users) == 1 else None
    for routed, shared in () if pair is None else (pair, pair[::-1]):
        views = _views(routed)
        combined = views[-1]
        if not _is_combined(combined) or last_size(total) != last_size(combined):
            continue
        # Nothing is broadcast, and nothing converted.
        shape = shape_of(total)
        if shape is None or not shape == shape_of(routed) == shape_of(shared):
            continue
        if not dtype_of(shared) == dtype_of(total) == combined.args[4]:
            continue
        gated = _gated(shared)
        chain = [*behind, *views]
        if gated is None:
            return _Sum(combined, chain, (shared,))
        factor, *parts = gated
        return _Sum(combined, [*chain, shared, factor], tuple(parts))
    return None


def _is_combined(node: Node) -> TypeGuard[Any]:
    """Is ``node`` a sum over experts that is read once?"""
    return calls_function(node, combine_experts) and len(node.users) == 1


def _gated(node: Node) -> tuple[Node, Node, Node] | None:
    """(factor, rows, logits) if ``node`` is ``sigmoid(logits) * rows`` with a logit per row, which
    nothing else reads."""
    pair = operands(node) if calls(node, "mul") and len(node.users) == 1 else None
    for factor, rows in () if pair is None else (pair, pair[::-1]):
        if not calls(factor, "sigmoid") or len(factor.users) != 1 or len(factor.args) != 1:
            continue
        logits: Any = factor.args[0]
        shape = shape_of(rows)
        if shape is None or shape != shape_of(node) or shape_of(logits) != (*shape[:-1], "1"):
            continue
        if factor.kwargs or not dtype_of(logits) == dtype_of(rows) == dtype_of(node):
            continue
        return factor, rows, logits
    return None


def _views(node: Any) -> list[Node]:
    """``node`` and what it is a view of, down to the first that others read as well."""
    found = [node]
    while calls(node, "view", "reshape") and len(node.users) == 1:
        node = node.args[0]
        found.append(node)
    return found
