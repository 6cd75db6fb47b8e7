"""How the values of a graph lie over the tokens of a step, and which calls compute row by row.

A call is *row-wise* if what it gives for a token follows from what it is given of that token, and
from constants: then it may as well be made for some of the tokens alone. That is decided by a table
of what is known; whatever is not in it mixes rows.

A mixture of experts sorts the rows of all tokens by expert. Its calls are row-wise taken together:
a row is multiplied with the weights of its own expert, wherever the sort has put it, and comes
back to its place. So values have a :class:`.token_sizes.Kind` that says in which order they have
their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from .nodes import GROUPED_MM_NAMES, calls_op, example, is_ours
from .token_sizes import PER_TOKEN, Kind, Order, name_of
from .torch_rows import TorchRows, dims_of

# Calls of ours that compute each row of all that they are given of tokens by itself.
_ROW_WISE = {
    "kernels.fused.dispatch": ("rms_norm", "add_rms_norm", "act_mul"),
    "kernels.fused.cpu_activation": ("elementwise",),
    "kernels.linear.dispatch": ("linear", "linear_silu_mul", "norm_linear"),
    "kernels.linear.dispatch_fp8": (
        "linear", "norm_linear", "add_norm_linear", "act_linear", "mlp", "norm_mlp", "add_norm_mlp",
    ),
    "kernels.linear.dispatch_int4": ("linear", "linear_silu_mul"),
    "kernels.linear.cpu_invariant": ("linear",),
    "kernels.linear.cpu_few_rows": ("linear_few_rows",),
    "kernels.linear.cpu_expanded": ("linear_fp8", "linear_int4"),
    "kernels.linear.cpu_quantized": ("linear_int4", "linear_float16"),
    "kernels.linear.route": ("route",),
    "kernels.linear.row_parallel": ("linear_norm",),
    "kernels.mla.dispatch": ("head_values",),
    "kernels.native.calls": ("linear", "rms_norm", "add_rms_norm", "act_mul"),
}  # fmt: skip
_OURS = frozenset((module, name) for module, names in _ROW_WISE.items() for name in names)
_COLLECTIVES = ("all_reduce", "all_reduce_norm")


class _OfExperts(NamedTuple):
    """A call of ours: where its number of experts a token is, the orders of what it is given, in
    turn and without constants, and of its result, or SORT if ``torch_rows`` has those of each."""

    top_k: int
    orders: tuple[Order, ...]
    result: Order


_OF_EXPERTS = {
    "sort_by_expert": _OfExperts(2, (Order.FLAT,), Order.SORT),
    "route_rows": _OfExperts(2, (Order.ROWS, Order.ROWS), Order.SORT),
    "spread_rows": _OfExperts(2, (Order.ROWS, Order.INVERSE), Order.SORTED),
    "combine_experts": _OfExperts(3, (Order.SORTED, Order.FLAT, Order.INVERSE), Order.ROWS),
    "combine_add_rms_norm": _OfExperts(
        3, (Order.SORTED, Order.FLAT, Order.INVERSE, Order.ROWS), Order.ROWS
    ),
}
PADDING_ARGUMENT = {"sort_by_expert": 3, "route_rows": 5}
"""Of calls that take ``query_starts``, to leave out the rows of padding behind those of the tokens:
its place. Rows that were chosen among the tokens have no padding behind them."""


class RowKinds(TorchRows):
    """The kinds of a graph's values.

    Args:
        num_tokens: as of :class:`.token_sizes.TokenSizes`.
        communicator: whose sums over the ranks the graph calls.
    """

    def __init__(self, num_tokens: object, communicator: object = None) -> None:
        super().__init__(num_tokens)
        self._communicator = communicator

    def by_table(self, node: Node, kinds: dict[Node, Kind]) -> tuple[bool, Kind | None]:
        name = name_of(node)
        if is_ours(node) or self._is_collective(node):
            return True, self._ours(node, name, kinds)
        found = self._experts(node, name, kinds)
        return found is not None, found

    def _is_collective(self, node: Node) -> bool:
        owner = getattr(node.target, "__self__", None)
        is_bound = owner is not None and owner is self._communicator
        return (is_bound and name_of(node) in _COLLECTIVES) or calls_op(node, "all_reduce")

    # Of experts -------------------------------------------------------------------------------

    def _experts(self, node: Node, name: str, kinds: dict[Node, Kind]) -> Kind | None:
        first: Any = node.args[0] if node.args else None
        kind = kinds.get(first)
        if kind is None:
            return None
        if name in ("sort", "argsort") and kind.order is Order.FLAT:
            value = example(first)
            is_flat = isinstance(value, Tensor) and value.dim() == 1
            return Kind(Order.SORT, 0, kind.per_token) if is_flat else None
        if name == "argsort" and kind.order is Order.SORT:
            return Kind(Order.INVERSE, 0, kind.per_token)
        if name == "histc" and kind.order in (Order.FLAT, Order.SORTED):
            return Kind(Order.COUNTS, 0, kind.per_token)
        if name.split(".")[0] in GROUPED_MM_NAMES:
            return self._grouped(kinds, kind)
        if name == "cumsum" and kind.order is Order.COUNTS:
            return kind._replace(order=Order.ENDS) if dims_of(node, name, 1) == {0} else None
        if name == "floordiv" and kind.order is Order.SORT:
            is_token = node.args[1] == kind.per_token
            return kind._replace(order=Order.TOKENS) if is_token else None
        if name == "empty_like" and kind.order is Order.SORT:
            return kind._replace(order=Order.INVERSE) if self._is_filled(node) else None
        if name == "setitem" and self._is_filling(node):
            return kinds[first]
        return None

    def _grouped(self, kinds: dict[Node, Kind], kind: Kind) -> Kind | None:
        """A matmul of each row with the weights of its expert."""
        others = [k.order for k in list(kinds.values())[1:] if k.order is not Order.CONSTANT]
        return kind if kind.order is Order.SORTED and others == [Order.ENDS] else None

    def _is_filled(self, node: Node) -> bool:
        """Is it an empty tensor that the inverse of a sort is written to, first of all?"""
        if name_of(node) != "empty_like":
            return False
        first = next(iter(node.users), None)
        return first is not None and self._is_filling(first)

    def _is_filling(self, node: Node) -> bool:
        """``inverse[sort] = range``"""
        if name_of(node) != "setitem" or not all(isinstance(n, Node) for n in node.args):
            return False
        to, at, values = node.args
        by, kind = self.of(at), self.of(values)  # type: ignore[arg-type]
        is_range = kind is not None and kind.order is Order.RANGE
        return (
            is_range and by is not None and by.order is Order.SORT and name_of(to) == "empty_like"
        )

    # Of ours ----------------------------------------------------------------------------------

    def _ours(self, node: Node, name: str, kinds: dict[Node, Kind]) -> Kind | None:
        orders = [kind.order for kind in kinds.values() if kind.order is not Order.CONSTANT]
        given = next(kind for kind in kinds.values() if kind.order is not Order.CONSTANT)
        module = (getattr(node.target, "__module__", None) or "").removeprefix("pagespec.")
        if name == "grouped_mm":
            return self._grouped(kinds, given)
        if module.startswith("kernels.linear.") and name in _OF_EXPERTS:
            return self._of_experts(node, name, orders, given)
        if (module, name) == ("kernels.linear.cpu_product", "product"):
            return self._product(node, given) if len(orders) == 1 else None
        if (module, name) not in _OURS and not self._is_collective(node):
            return None
        if any(self.is_size(source) for source in node.all_input_nodes):
            return None
        if len(set(orders)) != 1 or orders[0] not in PER_TOKEN:
            return None
        return self.like(node, given) if all(map(_has_rows_first, kinds, kinds.values())) else None

    def _product(self, node: Node, given: Kind) -> Kind | None:
        x, form = node.args[0], node.args[4]
        value = example(x) if isinstance(x, Node) else None
        if not isinstance(value, Tensor) or given.order is Order.CONSTANT:
            return None
        kept: list[int] = [d for d in range(value.dim()) if d not in form.x_squeezed]  # type: ignore[union-attr]
        summed = form.x_order[len(kept) - form.num_summed :]  # type: ignore[union-attr]
        is_summed = given.dim in [kept[place] for place in summed]
        return None if is_summed else self.like(node, given)

    def _of_experts(
        self, node: Node, name: str, orders: Sequence[Order], given: Kind
    ) -> Kind | None:
        top_k = node.args[_OF_EXPERTS[name].top_k]
        if not isinstance(top_k, int) or tuple(orders) != _OF_EXPERTS[name].orders:
            return None
        order = _OF_EXPERTS[name].result
        if given.order is not Order.ROWS and given.per_token != top_k:
            return None
        if order is Order.ROWS:
            return self.like(node, Kind(Order.ROWS))
        return Kind(order, 0, top_k)


def _has_rows_first(source: Node, kind: Kind) -> bool:
    """Kernels take what lies before the last dim for rows."""
    value = example(source)
    assert isinstance(value, Tensor)
    return kind.order is Order.CONSTANT or kind.dim < max(value.dim() - 1, 1)
