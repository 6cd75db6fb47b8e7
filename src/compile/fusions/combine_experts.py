"""Move rows to experts and back with two kernels: the copy of each token's row for every one of its
experts, and the weighted sum over them.

transformers multiplies the experts' rows by the weights in the order of the experts, permutes the
results into the order of the tokens by indexing, and sums them. Compiled, that is one kernel that
reads rows one element at a time (docs/notes/experts.md). :func:`.expert_rows.combine_experts` reads
whole rows, and reads the weights where the router stored them.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from ...kernels.moe import expert_rows
from ...kernels.moe.sort_by_expert import sort_by_expert
from ..fx.nodes import calls_function, dtype_of, last_size, shape_of, tensor_of
from ..fx.pass_context import PassContext
from ..fx.rules import (
    Cast,
    Match,
    Pattern,
    ReadBy,
    Rest,
    Rule,
    Value,
    call,
    one_of,
    product,
    same_dtype,
    same_shape,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ORDER, _INVERSE = 1, 2  # results of the sort


def _part(number: int, name: str) -> Pattern:
    return call(operator.getitem, args=(Value("sort"), number), name=name, is_shared=True)


_BY_EXPERT = call("getitem", args=(Value("weights"), _part(_ORDER, "order")))
_WEIGHTED = product(Value("rows"), call("unsqueeze", args=(_BY_EXPERT,), dim=(-1, 1)), "product")
# Weights in sorted order, and weighted rows in the inverse order: each row has its own weight.
_BY_TOKEN = call("getitem", args=(_WEIGHTED, _part(_INVERSE, "inverse")))
_VIEW = call("view", "reshape", args=(_BY_TOKEN, Rest()), name="view")
_SUM = call("sum", args=(_VIEW,), dim=(1, -2), name="sum")


def _is_sum_over_experts(m: Match) -> bool:
    by_token, weighted, weights = (tensor_of(m[name]) for name in ("view", "product", "weights"))
    if by_token is None or weighted is None or weights is None:
        return False
    if m["sort"].target is not sort_by_expert:
        return False
    if (by_token.dim(), weighted.dim(), weights.dim()) != (3, 2, 1):
        return False
    top_k, width = by_token.shape[1], last_size(m["view"])
    if not isinstance(top_k, int) or not 1 <= top_k <= expert_rows.MAX_TOP_K:
        return False
    if width is None or width != last_size(m["product"]):
        return False
    # A conversion of the sum belongs to it only from float32. Other sums would be rounded twice.
    if m.root is not m["sum"] and dtype_of(m["sum"]) != torch.float32:
        return False
    return all(dtype_of(m[name]) in _DTYPES for name in ("rows", "weights", "sum", "root"))


def _combine(m: Match) -> Node:
    top_k = m["view"].meta["example_value"].shape[1]
    # ``query_starts`` gives the sort the number of tokens without padding.
    input_ids, query_starts = (
        m.context.step_input(m.graph, name) for name in ("input_ids", "query_starts")
    )
    num_tokens = (shape_of(input_ids) or ())[-1:]
    if query_starts is not None and num_tokens and (shape_of(m.root) or ())[:1] == num_tokens:
        m["sort"].args = (*m["sort"].args[:2], top_k, query_starts)
    sources = m["rows"], m["weights"], m["inverse"]
    return m.call(expert_rows.combine_experts, *sources, top_k, dtype_of(m.root))


_COMBINE = Rule(
    one_of(Cast(_SUM), _SUM),
    _combine,
    guards=(
        _is_sum_over_experts,
        same_shape("rows", "product"),
        same_dtype("sum", "product"),
    ),
    at="product",  # after the rows and the sort
)

_SORT = ReadBy(Value("sort"), _part(_INVERSE, "inverse"))
_CHOICES = call(operator.getitem, args=(_SORT, _ORDER), is_shared=True)
_TOKENS = call("floordiv", "floor_divide", args=(_CHOICES, Value("top_k")), is_shared=True)


def _are_summed_rows(m: Match) -> bool:
    """Whether they are a matrix's rows, and there is a sum over the results for the copies."""
    readers = m["inverse"].users
    sums = [node for node in readers if calls_function(node, expert_rows.combine_experts)]
    if not any(node.args[3] == m["top_k"] for node in sums):
        return False
    tokens = tensor_of(m["tokens"])
    if tokens is None or tokens.dim() != 2 or last_size(m["tokens"]) is None:
        return False
    return tokens.dtype in _DTYPES


_SPREAD = Rule(
    call("getitem", args=(Value("tokens"), _TOKENS)),
    lambda m: m.call(expert_rows.spread_rows, m["tokens"], m["inverse"], m["top_k"]),
    guards=(_are_summed_rows,),
)


def combine_experts(gm: GraphModule, context: PassContext) -> int:
    """Rewrite the result of :func:`.fuse_expert_sort.fuse_expert_sort`; returns the number of sums
    replaced. Results equal those of eager torch up to the order of additions, except for padding
    tokens, which no expert gets. Copies become one call only if the sum is replaced as well."""
    count = _COMBINE(gm, context)
    _SPREAD(gm, context)
    return count
