"""Fuse the router of a mixture of experts into one call, and the matmul of its logits into another.

There are two kinds of routers::

    softmax(logits) -> topk -> a division by the sum, if any     (Qwen3-MoE, Mixtral, DeepSeek-V2)
    topk(logits) -> softmax                                      (Granite, GPT-OSS)

followed by a factor of 1 and a conversion, if any. Other routers (sigmoid, groups of experts, a
selection bias) stay as they are. ``fuse_wide_linear`` runs after ``fuse_router``, for which logits
may be any node.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...kernels.matmul import wide_matmul
from ...kernels.moe import route as kernel
from ..fx.nodes import (
    LINEAR,
    calls,
    calls_function,
    cast_source,
    dtype_of,
    erase_unused,
    example,
    last_size,
    only_user,
    shape_of,
    tensor_of,
    written_nodes,
)
from ..fx.pass_context import PassContext
from ..fx.rules import MISSING, Cast, Match, Rule, Value, call, has_dtype, same_dtype

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse_router(gm: GraphModule, _context: PassContext) -> int:
    """Rewrite; returns the number of routers replaced. Weights equal those of torch up to the order
    of additions. Of equal weights the lowest id comes first, which torch leaves open.

    Not a rule: some routers divide the selected weights in place.
    """
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    for node in list(graph.nodes):
        top_k = _top_k(node)
        if top_k is None:
            continue
        source = node.args[0]
        softmax = _softmax_of_chosen(node, written)
        logits = _softmax_source(source, written) if softmax is None else _wide_source(source)
        experts = last_size(logits)
        if logits is None or experts is None or not top_k <= experts <= kernel.MAX_EXPERTS:
            continue
        if not written.isdisjoint({logits, source}):
            continue  # the call may read the logits at another time
        _replace(graph, node, logits, top_k, softmax)
        count += 1
    return count


def _top_k(node: Node) -> int | None:
    """The number of largest elements in the last dimension that ``node`` selects, sorted or not."""
    if not calls(node, "topk") or not isinstance(node.args[0] if node.args else None, Node):
        return None
    given: dict[str, Any] = {"dim": -1, "largest": True, "sorted": True}
    given |= dict(zip(("k", "dim", "largest", "sorted"), node.args[1:], strict=False))
    given |= node.kwargs
    top_k = given.pop("k", None)
    given.pop("sorted")
    if not isinstance(top_k, int) or not 1 <= top_k <= kernel.MAX_TOP_K:
        return None
    if not _is_last(given.pop("dim"), node.args[0]) or given != {"largest": True}:
        return None
    # Only its two results are read.
    parts = [user.args[1] for user in node.users if calls(user, "getitem")]
    return top_k if len(parts) == len(node.users) and set(parts) <= {0, 1} else None


def _is_last(dim: object, source: object) -> bool:
    tensor = tensor_of(source)
    return tensor is not None and tensor.dim() > 0 and dim in (-1, tensor.dim() - 1)


def _softmax_source(node: object, written: set[Node]) -> Node | None:
    """The logits whose float32 softmax over the last dimension ``node`` is, if no other node reads
    it: the probabilities would differ from the weights by a rounding."""
    if not calls(node, "softmax") or len(node.users) != 1 or dtype_of(node) != torch.float32:
        return None
    source = _softmax_operand(node)
    return None if source in written else _wide_source(source)


def _softmax_of_chosen(node: Node, written: set[Node]) -> Node | None:
    """The softmax over the values that top-k ``node`` has selected, if only it reads them."""
    values = [user for user in node.users if user.args[1] == 0]
    softmax = only_user(values[0]) if len(values) == 1 else None
    if not calls(softmax, "softmax") or _softmax_operand(softmax) is not values[0]:
        return None
    # In another dtype than float32, torch rounds the logits to it before and the result after.
    dtypes = (dtype_of(values[0]), torch.float32)
    return softmax if dtype_of(softmax) in dtypes and values[0] not in written else None


def _softmax_operand(node: Node) -> Node | None:
    """The operand of ``node``, a softmax over the last dimension."""
    given: dict[str, Any] = {"dim": None, "dtype": None}
    given |= dict(zip(_positional(node), node.args, strict=False)) | node.kwargs
    source, dim, dtype = given.pop("input", None), given.pop("dim"), given.pop("dtype")
    given.pop("_stacklevel", None)
    if given or not _is_last(dim, source) or dtype not in (None, dtype_of(node)):
        return None
    return source if isinstance(source, Node) else None


def _wide_source(source: object) -> Node | None:
    """The logits that are only visible as ``source``: itself, or the value that it converts to
    float32."""
    logits = cast_source(source) or source
    wide = dtype_of(source)
    if not isinstance(logits, Node) or dtype_of(logits) not in _DTYPES or wide not in _DTYPES:
        return None
    if logits is not source and wide != torch.float32:
        return None  # was rounded before
    return logits


def _positional(node: Node) -> tuple[str, ...]:
    if calls_function(node, torch.nn.functional.softmax):
        return ("input", "dim", "_stacklevel", "dtype")
    return ("input", "dim", "dtype")


def _replace(graph: Graph, node: Node, logits: Node, top_k: int, softmax: Node | None) -> None:
    """The call that replaces top-k ``node``, and the ``softmax`` over the selected values, if
    any."""
    source = node.args[0]
    parts: dict[Any, list[Node]] = {0: [], 1: []}
    for user in node.users:
        parts[user.args[1]].append(user)
    results = parts[0] if softmax is None else [softmax]
    chain: tuple[Node, ...] = () if softmax is None else (softmax,)
    normalisation: kernel.Normalisation = "all" if softmax is None else "chosen"
    if len(results) == 1:
        divided = None if softmax is not None else _division(results[0])
        if divided is not None:
            normalisation, chain = "renormalised", divided
        last = chain[-1] if chain else results[0]
        scaled = only_user(last)
        if calls(scaled, "mul") and scaled.args == (last, 1.0) and not scaled.kwargs:
            chain, last = (*chain, scaled), scaled
        converted = only_user(last)
        # A value that is already rounded would be rounded twice.
        is_cast = cast_source(converted) is last and dtype_of(last) == torch.float32
        if converted is not None and is_cast and dtype_of(converted) in _DTYPES:
            chain, last = (*chain, converted), converted
        results = [last]
    dtype = dtype_of(results[0]) if results else torch.float32
    with graph.inserting_before(node):
        call = graph.call_function(kernel.route, (logits, top_k, normalisation, dtype))
        weights, ids = (graph.call_function(operator.getitem, (call, i)) for i in range(2))
    for new, olds in ((weights, results), (ids, parts[1])):
        for old in olds:
            new.meta["example_value"] = example(old)
            old.replace_all_uses_with(new)
    erase_unused(graph, (*chain, *parts[0], *parts[1], node, weights, ids))
    if isinstance(source, Node) and softmax is None:
        erase_unused(graph, (source, *source.all_input_nodes))
    elif isinstance(source, Node) and source is not logits:
        erase_unused(graph, (source,))


def _division(values: Node) -> tuple[Node, Node] | None:
    """(sum, quotient) if the only reader of ``values`` is their division by their sum."""
    for total in values.users:
        if not calls(total, "sum") or total.args[:1] != (values,):
            continue
        given: dict[str, Any] = dict(zip(("dim", "keepdim"), total.args[1:], strict=False))
        given |= total.kwargs
        if not _is_last(given.pop("dim", None), values) or given != {"keepdim": True}:
            continue
        quotient = only_user(total)
        if quotient is None or set(values.users) != {total, quotient}:
            continue
        if not calls(quotient, "truediv", "itruediv", "div", "div_") or quotient.kwargs:
            continue
        if quotient.args == (values, total) and shape_of(quotient) == shape_of(values):
            return total, quotient
    return None


# linear(rows.to(float32), weight.to(float32)), as transformers computes a router's logits in
# DeepSeek, GLM-4-MoE, Kimi Linear and others. On a GPU this is a conversion of the rows, a
# conversion of the weight in every step, and a matmul without the matrix unit. Results equal those
# of float32 matmuls up to the order of additions.
_ROWS = Cast(Value("rows"), "wide_rows", is_shared=True)
_WEIGHT = Cast(Value("weight"), "wide_weight", is_shared=True)


def _is_wide_weight(m: Match) -> bool:
    constant = m.context.constant(m["weight"])
    if constant is None or m.context.weight_format(constant) is not None:
        return False
    return wide_matmul.fits(constant)


fuse_wide_linear = Rule(
    call(*LINEAR, args=(_ROWS, _WEIGHT), bias=(MISSING, None)),
    lambda m: m.call(wide_matmul.wide_linear, m["rows"], m["weight"]),
    guards=(
        has_dtype(torch.float32, "wide_rows", "wide_weight"),
        same_dtype("rows", "weight"),
        _is_wide_weight,
    ),
)
