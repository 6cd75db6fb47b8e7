"""How the values of a graph lie over the tokens of a step, and which calls compute row by row.

A call is *row-wise* if what it gives for a token follows from what it is given of that token, and
from constants: then it may as well be made for some of the tokens alone. That is decided by a table
of what is known; whatever is not in it mixes rows.

A mixture of experts sorts the rows of all tokens by expert. Its calls are row-wise taken together:
a row is multiplied with the weights of its own expert, wherever the sort has put it, and comes back
to its place. So values have a :class:`Kind` that says in which order they have their rows.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .nodes import GROUPED_MM_NAMES, calls_op, example, is_ours


class Order(enum.Enum):
    """What the rows of a value are, and in which order."""

    ROWS = enum.auto()  # of the tokens, one each, in their order
    FLAT = enum.auto()  # of the tokens, several each, those of a token side by side
    SORTED = enum.auto()  # the same, by expert
    SORT = enum.auto()  # the places in FLAT of what is SORTED
    INVERSE = enum.auto()  # the places in SORTED of what is FLAT
    TOKENS = enum.auto()  # the tokens of what is SORTED
    COUNTS = enum.auto()  # how many rows each expert has
    ENDS = enum.auto()  # where each expert's rows end
    RANGE = enum.auto()  # 0, 1, 2, ... for each of FLAT
    CONSTANT = enum.auto()  # nothing of single tokens


class Kind(NamedTuple):
    """``order`` along ``dim``, with ``count`` rows a token."""

    order: Order
    dim: int = 0
    count: int = 1


_CONSTANT = Kind(Order.CONSTANT)
_IN_PLACE_OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}
_POINTWISE = frozenset(
    {
        "abs", "add", "and", "bfloat16", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "cos",
        "detach", "div", "double", "elu", "empty_like", "eq", "erf", "exp", "float", "floordiv",
        "full_like", "ge", "gelu", "gt", "half", "invert", "le", "leaky_relu", "log", "log1p",
        "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum",
        "mish", "mul", "ne", "neg", "ones_like", "or", "pow", "reciprocal", "relu", "relu6", "rsqrt",
        "rsub", "sigmoid", "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh", "to",
        "true_divide", "truediv", "type", "type_as", "where", "zeros_like",
    }
)  # fmt: skip
_OVER_DIMS = frozenset(
    {"amax", "amin", "argmax", "cumsum", "log_softmax", "mean", "norm", "softmax", "sum", "var"}
)
_MOVES = frozenset({"transpose", "permute", "squeeze", "unsqueeze", "swapaxes", "movedim"})
_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten"})
_SPLITS = {"split": "dim", "chunk": "dim", "unbind": "dim"}
_NORMS = frozenset({"layer_norm", "rms_norm"})
_LINEAR = "linear"

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


class RowKinds:
    """The kinds of a graph's values.

    Args:
        num_tokens: size of the tokens' dim, as recorded: a symbol, or a number that no size of the
            model is.
        communicator: whose sums over the ranks the graph calls.
    """

    def __init__(self, num_tokens: object, communicator: object = None) -> None:
        self._communicator = communicator
        self._num_tokens = num_tokens
        self._multiple = re.compile(rf"(?:(\d+)\*)?{re.escape(str(num_tokens))}")
        self._mentioned = re.compile(rf"\b{re.escape(str(num_tokens))}\b")
        self._kinds: dict[Node, Kind | None] = {}

    # Sizes ------------------------------------------------------------------------------------

    def multiple(self, size: object) -> int | None:
        """How many times the number of tokens a size is: 0 of those without it, None if that is
        no number."""
        if isinstance(size, int) and isinstance(self._num_tokens, int):
            times, rest = divmod(size, self._num_tokens)
            return None if times and rest else times
        text = str(size)
        found = self._multiple.fullmatch(text)
        if found is not None:
            return int(found[1] or 1)
        return None if self._mentioned.search(text) else 0

    def is_size(self, node: Node) -> bool:
        """Is its value a number of the step, the number of tokens say?"""
        return isinstance(example(node), (int, torch.SymInt))

    def _multiples(self, tensor: Tensor) -> list[int] | None:
        found = [self.multiple(size) for size in tensor.shape]
        return None if None in found else [times for times in found if times is not None]

    # Kinds ------------------------------------------------------------------------------------

    def of(self, node: Node) -> Kind | None:
        """The kind of a tensor that ``node`` gives; None if it is not known."""
        if node not in self._kinds:
            self._kinds[node] = None  # no cycle can ask for it
            self._kinds[node] = self._find(node)
        return self._kinds[node]

    def _find(self, node: Node) -> Kind | None:
        value = example(node)
        if not isinstance(value, Tensor):
            return None
        times = self._multiples(value)
        if times is None:
            return None
        dims = [dim for dim, count in enumerate(times) if count]
        if not dims:
            return self.row_wise(node) or _CONSTANT
        if len(dims) > 1:
            return None
        (dim,) = dims
        return Kind(Order.ROWS, dim) if times[dim] == 1 else self.row_wise(node)

    def row_wise(self, node: Node) -> Kind | None:
        """The kind of what ``node`` gives, if it computes row by row what is of tokens; of several
        results, that of those that :meth:`of` does not tell apart. None if it mixes rows."""
        if node.op not in ("call_function", "call_method"):
            return None
        name = _name(node)
        if name == "getitem":
            return self._getitem(node)
        kinds = self._inputs(node)
        if kinds is None or not any(kind.order is not Order.CONSTANT for kind in kinds.values()):
            return self._range(node, name)
        if is_ours(node) or self._is_collective(node):
            return self._ours(node, name, kinds)
        experts = self._experts(node, name, kinds)
        if experts is not None:
            return experts
        return self._torch(node, _IN_PLACE_OPERATORS.get(name, name.rstrip("_")), kinds)

    def _inputs(self, node: Node) -> dict[Node, Kind] | None:
        """The kinds of all tensors it is given; None if one is unknown."""
        found = {}
        for source in node.all_input_nodes:
            if self.is_size(source):
                continue
            kind = self.of(source)
            if kind is None:
                return None
            found[source] = kind
        return found

    def _is_collective(self, node: Node) -> bool:
        owner = getattr(node.target, "__self__", None)
        is_bound = owner is not None and owner is self._communicator
        return (is_bound and _name(node) in _COLLECTIVES) or calls_op(node, "all_reduce")

    # Of torch ---------------------------------------------------------------------------------

    def _torch(self, node: Node, name: str, kinds: dict[Node, Kind]) -> Kind | None:
        if name in _RESHAPES:
            return self._reshaped(node, kinds)
        if name == "expand":
            return self._aligned(node, kinds)
        if any(map(self.is_size, node.all_input_nodes)):
            return None  # it may count the tokens
        if name in _POINTWISE:
            return self._aligned(node, kinds)
        first = node.args[0] if node.args else None
        if not isinstance(first, Node) or first not in kinds:
            return None
        kind, value = kinds[first], example(first)
        assert isinstance(value, Tensor)  # whose kind is known
        if kind.order not in (Order.ROWS, Order.FLAT, Order.SORTED):
            return self._ends(node, name, kind)
        others_are_constant = all(
            kinds[n].order is Order.CONSTANT for n in kinds if n is not first
        )
        if name in _MOVES and others_are_constant:
            return self._like(node, kind)
        if name == _LINEAR and others_are_constant and kind.dim < value.dim() - 1:
            return self._like(node, kind)
        dims = _dims(node, name, value.dim())
        if dims is None or kind.dim in dims:
            return None
        if name in ("gather", "scatter"):
            return self._aligned(node, kinds)
        is_known = name in _OVER_DIMS or name in _SPLITS or name in ("topk", *_NORMS)
        return self._like(node, kind) if is_known and others_are_constant else None

    def _like(self, node: Node, kind: Kind) -> Kind | None:
        """The kind of a result that has the rows of ``kind`` in their order."""
        value = example(node)
        if not isinstance(value, Tensor):  # several, each of which is on record
            return kind
        times = self._multiples(value)
        if times is None or sorted(times)[:-1] != [0] * (len(times) - 1) or not times:
            return None
        dim = times.index(max(times))
        if kind.order is Order.ROWS:
            return Kind(Order.ROWS, dim) if times[dim] == 1 else None
        return kind if dim == 0 and times[0] == kind.count else None

    def _aligned(self, node: Node, kinds: dict[Node, Kind]) -> Kind | None:
        """Of operations that compute each number by itself, broadcasting."""
        value = example(node)
        places = set()
        for source, kind in kinds.items():
            if kind.order is Order.CONSTANT:
                continue
            given = example(source)
            assert isinstance(given, Tensor)
            places.add((kind.order, kind.dim - given.dim(), kind.count))
        if len(places) != 1 or not isinstance(value, Tensor):
            return None
        ((order, place, count),) = places
        name = _name(node)
        if order is Order.SORT:
            # What torch.empty_like makes here is filled behind (:meth:`_experts`).
            if name == "floordiv" and node.args[1] == count:
                return Kind(Order.TOKENS, 0, count)
            return Kind(Order.INVERSE, 0, count) if self._is_filled(node) else None
        if order not in (Order.ROWS, Order.FLAT, Order.SORTED):
            return None
        kind = self._like(node, Kind(order, value.dim() + place, count))
        return kind if kind is not None and kind.dim - value.dim() == place else None

    def _reshaped(self, node: Node, kinds: dict[Node, Kind]) -> Kind | None:
        """Rows stay rows if what lies before them stays as it is; several a token come to lie side
        by side, or apart."""
        source: Any = node.args[0]
        before, after = example(source), example(node)
        kind = kinds.get(source)
        if len(kinds) != 1 or kind is None or not isinstance(before, Tensor):
            return None
        if not isinstance(after, Tensor):
            return None
        times = self._multiples(after) or []
        dims = [dim for dim, count in enumerate(times) if count]
        if len(dims) != 1 or _product(before.shape[: kind.dim]) != _product(after.shape[: dims[0]]):
            return None
        count, is_first = times[dims[0]], _product(after.shape[: dims[0]]) == 1
        if kind.order in (Order.ROWS, Order.FLAT):
            if count == 1:
                return Kind(Order.ROWS, dims[0])
            return Kind(Order.FLAT, 0, count) if is_first and not dims[0] else None
        is_same = kind.order is Order.SORTED and not dims[0] and count == kind.count
        return kind if is_same else None

    def _range(self, node: Node, name: str) -> Kind | None:
        """Of a call that is given nothing of tokens but their number."""
        value = example(node)
        if name != "arange" or len(node.args) != 1 or not isinstance(value, Tensor):
            return None
        count = self.multiple(value.shape[0])
        return Kind(Order.RANGE, 0, count) if count else None

    def _getitem(self, node: Node) -> Kind | None:
        source, index = node.args
        if not isinstance(source, Node):
            return None
        value = example(source)
        if isinstance(value, Tensor):
            if isinstance(index, Node):
                return self._taken(source, index)
            return self._sliced(node, source, index if isinstance(index, tuple) else (index,))
        if not isinstance(index, int):
            return None
        kind = self.row_wise(source)
        parts = _PARTS.get(_name(source))
        if kind is None or parts is None:
            return kind if kind is None else self._part(node, kind)
        order = parts[index]
        return self._part(node, kind) if order is Order.ROWS else Kind(order, 0, kind.count)

    def _part(self, node: Node, kind: Kind) -> Kind | None:
        return self._like(node, kind if kind.order is not Order.SORT else Kind(Order.ROWS))

    def _taken(self, source: Node, index: Node) -> Kind | None:
        """``source[index]``, over its first dim."""
        from_, by = self.of(source), self.of(index)
        if from_ is None or by is None or from_.dim:
            return None
        if (from_.order, by.order) in _TAKEN:
            return Kind(_TAKEN[from_.order, by.order], 0, by.count)
        index_value = example(index)
        assert isinstance(index_value, Tensor)
        if from_.order is Order.CONSTANT and by.order in (Order.ROWS, Order.FLAT, Order.SORTED):
            return by if index_value.dtype != torch.bool else None
        return None

    def _sliced(self, node: Node, source: Node, index: Sequence[Any]) -> Kind | None:
        kind, value = self.of(source), example(source)
        if kind is None or kind.order not in (Order.ROWS, Order.FLAT, Order.SORTED):
            return None
        assert isinstance(value, Tensor)
        if any(isinstance(part, (Node, list)) for part in tree_leaves(list(index))):
            return None
        taken = sum(part is not None and part is not Ellipsis for part in index)
        dim = 0
        for part in index:
            if part is None:
                continue
            if part is Ellipsis:
                dim += value.dim() - taken
                continue
            if dim == kind.dim and part != slice(None):
                return None
            dim += 1
        return self._like(node, kind)

    # Of experts -------------------------------------------------------------------------------

    def _experts(self, node: Node, name: str, kinds: dict[Node, Kind]) -> Kind | None:
        first: Any = node.args[0] if node.args else None
        kind = kinds.get(first)
        if kind is None:
            return None
        if name in ("sort", "argsort") and kind.order is Order.FLAT:
            value = example(first)
            is_flat = isinstance(value, Tensor) and value.dim() == 1
            return Kind(Order.SORT, 0, kind.count) if is_flat else None
        if name == "argsort" and kind.order is Order.SORT:
            return Kind(Order.INVERSE, 0, kind.count)
        if name == "histc" and kind.order in (Order.FLAT, Order.SORTED):
            return Kind(Order.COUNTS, 0, kind.count)
        if name.split(".")[0] in GROUPED_MM_NAMES:
            return self._grouped(kinds, kind)
        if name == "setitem" and self._is_filling(node):
            return kinds[first]
        return None

    def _ends(self, node: Node, name: str, kind: Kind) -> Kind | None:
        is_sum = name == "cumsum" and _dims(node, name, 1) == {0}
        return kind._replace(order=Order.ENDS) if is_sum and kind.order is Order.COUNTS else None

    def _grouped(self, kinds: dict[Node, Kind], kind: Kind) -> Kind | None:
        """A matmul of each row with the weights of its expert."""
        others = [k.order for k in list(kinds.values())[1:] if k.order is not Order.CONSTANT]
        return kind if kind.order is Order.SORTED and others == [Order.ENDS] else None

    def _is_filled(self, node: Node) -> bool:
        """Is it an empty tensor that the inverse of a sort is written to, first of all?"""
        if _name(node) != "empty_like":
            return False
        first = next(iter(node.users), None)
        return first is not None and self._is_filling(first)

    def _is_filling(self, node: Node) -> bool:
        """``inverse[sort] = range``"""
        if _name(node) != "setitem" or not all(isinstance(n, Node) for n in node.args):
            return False
        to, at, values = node.args
        by, kind = self.of(at), self.of(values)  # type: ignore[arg-type]
        is_range = kind is not None and kind.order is Order.RANGE
        return is_range and by is not None and by.order is Order.SORT and _name(to) == "empty_like"

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
        if len(set(orders)) != 1 or orders[0] not in (Order.ROWS, Order.FLAT, Order.SORTED):
            return None
        return self._like(node, given) if all(map(_has_rows_first, kinds, kinds.values())) else None

    def _product(self, node: Node, given: Kind) -> Kind | None:
        x, form = node.args[0], node.args[4]
        value = example(x) if isinstance(x, Node) else None
        if not isinstance(value, Tensor) or given.order is Order.CONSTANT:
            return None
        kept: list[int] = [d for d in range(value.dim()) if d not in form.x_squeezed]  # type: ignore[union-attr]
        summed = form.x_order[len(kept) - form.num_summed :]  # type: ignore[union-attr]
        is_summed = given.dim in [kept[place] for place in summed]
        return None if is_summed else self._like(node, given)

    def _of_experts(
        self, node: Node, name: str, orders: Sequence[Order], given: Kind
    ) -> Kind | None:
        top_k = node.args[_OF_EXPERTS[name].top_k]
        if not isinstance(top_k, int) or tuple(orders) != _OF_EXPERTS[name].orders:
            return None
        order = _OF_EXPERTS[name].result
        if given.order is not Order.ROWS and given.count != top_k:
            return None
        if order is Order.ROWS:
            return self._like(node, Kind(Order.ROWS))
        return Kind(order, 0, top_k)


class _OfExperts(NamedTuple):
    """A call of ours: where its number of experts a token is, the orders of what it is given, in
    turn and without constants, and of its result, or SORT if :data:`_PARTS` has those."""

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
_PARTS = {
    "sort": (Order.SORTED, Order.SORT),
    "sort_by_expert": (Order.SORTED, Order.SORT, Order.INVERSE, Order.ENDS),
    "route_rows": (Order.SORTED, Order.ROWS, Order.INVERSE, Order.ENDS),
}
_TAKEN = {
    (Order.ROWS, Order.TOKENS): Order.SORTED,
    (Order.FLAT, Order.SORT): Order.SORTED,
    (Order.SORTED, Order.INVERSE): Order.FLAT,
}


def _name(node: object) -> str:
    if not isinstance(node, Node):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _product(sizes: Sequence[Any]) -> object:
    """As text, of symbols: comparing these would add guards."""
    numbers = [size for size in sizes if isinstance(size, int)]
    return math.prod(numbers), sorted(str(size) for size in sizes if not isinstance(size, int))


def _has_rows_first(source: Node, kind: Kind) -> bool:
    """Kernels take what lies before the last dim for rows."""
    value = example(source)
    assert isinstance(value, Tensor)
    return kind.order is Order.CONSTANT or kind.dim < max(value.dim() - 1, 1)


def _dims(node: Node, name: str, num_dims: int) -> set[int] | None:
    """Over which dims of its first argument it goes; None if that is not said."""
    if name in _NORMS:
        shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
        if not isinstance(shape, (tuple, list)):
            return None
        return set(range(num_dims - len(shape), num_dims))
    place = {"topk": 2, "split": 2, "chunk": 2, "norm": 2}.get(name, 1)
    default = {"topk": -1, "split": 0, "chunk": 0, "unbind": 0}.get(name)
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
    dims = list(_flat(dim))
    if not dims or not all(isinstance(d, int) for d in dims):
        return None
    return {d % num_dims for d in dims}


def _flat(value: object) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        yield from value
    else:
        yield value
