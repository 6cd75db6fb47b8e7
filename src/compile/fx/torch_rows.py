"""Which calls of torch compute row by row, and in which order their results have the rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .nodes import example
from .token_sizes import CONSTANT, PER_TOKEN, Kind, Order, TokenSizes, name_of

_IN_PLACE_OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}
_POINTWISE = frozenset(
    {
        "abs", "add", "and", "bfloat16", "bool", "clamp", "clamp_max", "clamp_min", "clone",
        "contiguous", "cos", "detach", "div", "double", "elu", "empty_like", "eq", "erf", "exp",
        "float", "floordiv",
        "full_like", "ge", "gelu", "gt", "half", "invert", "le", "leaky_relu", "log", "log1p",
        "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum",
        "mish", "mul", "ne", "neg", "ones_like", "or", "pow", "reciprocal", "relu", "relu6",
        "rsqrt", "rsub", "sigmoid", "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh",
        "to",
        "true_divide", "truediv", "type", "type_as", "where", "zeros_like",
    }
)  # fmt: skip
_OVER_DIMS = frozenset(
    {"amax", "amin", "argmax", "cumsum", "log_softmax", "mean", "norm", "softmax", "sum", "var"}
)
_MOVES = frozenset({"transpose", "permute", "squeeze", "unsqueeze", "swapaxes", "movedim"})
_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten"})
_SPLITS = {"split": "dim", "chunk": "dim", "unbind": "dim"}
_ALONG = frozenset({"index_select", "topk"})
_NORMS = frozenset({"layer_norm", "rms_norm"})
_LINEAR = "linear"

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


class TorchRows(TokenSizes, ABC):
    """The kinds of a graph's values, but for rules of calls of ours and of experts.

    Args:
        num_tokens: as of :class:`.token_sizes.TokenSizes`.
    """

    def __init__(self, num_tokens: object) -> None:
        super().__init__(num_tokens)
        self._kinds: dict[Node, Kind | None] = {}

    @abstractmethod
    def by_table(self, node: Node, kinds: dict[Node, Kind]) -> tuple[bool, Kind | None]:
        """Whether a call is of ours or of experts, and then the kind of its results."""

    # Kinds ------------------------------------------------------------------------------------

    def of(self, node: Node) -> Kind | None:
        """The kind of a tensor that ``node`` gives; None if it is not known."""
        if node not in self._kinds:
            self._kinds[node] = None  # for who asks while it is being found
            self._kinds[node] = self._find(node)
        return self._kinds[node]

    def _find(self, node: Node) -> Kind | None:
        value = example(node)
        if not isinstance(value, Tensor):
            return None
        times = self.multiples(value)
        if times is None:
            return None
        dims = [dim for dim, count in enumerate(times) if count]
        if not dims:
            return self.row_wise(node) or CONSTANT
        if len(dims) > 1:
            return None
        (dim,) = dims
        return Kind(Order.ROWS, dim) if times[dim] == 1 else self.row_wise(node)

    def row_wise(self, node: Node) -> Kind | None:
        """The kind of what ``node`` gives, if it computes row by row what is of tokens; of several
        results, that of those that :meth:`of` does not tell apart. None if it mixes rows."""
        if node.op not in ("call_function", "call_method"):
            return None
        name = name_of(node)
        if name == "getitem":
            return self._getitem(node)
        kinds = self._inputs(node)
        if kinds is None or not any(kind.order is not Order.CONSTANT for kind in kinds.values()):
            return self._range(node, name)
        is_known, found = self.by_table(node, kinds)
        if is_known:
            return found
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
        if kind.order not in PER_TOKEN:
            return None
        others_are_constant = all(kinds[n].order is Order.CONSTANT for n in kinds if n is not first)
        if name in _MOVES and others_are_constant:
            return self.like(node, kind)
        if name == _LINEAR and others_are_constant and kind.dim < value.dim() - 1:
            return self.like(node, kind)
        dims = dims_of(node, name, value.dim())
        if dims is None or kind.dim in dims:
            return None
        if name in ("gather", "scatter"):
            return self._aligned(node, kinds)
        is_known = name in _OVER_DIMS or name in _SPLITS or name in _ALONG or name in _NORMS
        return self.like(node, kind) if is_known and others_are_constant else None

    def _aligned(self, node: Node, kinds: dict[Node, Kind]) -> Kind | None:
        """Of operations that compute each number by itself, broadcasting."""
        value = example(node)
        places = set()
        for source, kind in kinds.items():
            if kind.order is Order.CONSTANT:
                continue
            given = example(source)
            assert isinstance(given, Tensor)
            places.add((kind.order, kind.dim - given.dim(), kind.per_token))
        if len(places) != 1 or not isinstance(value, Tensor):
            return None
        ((order, place, count),) = places
        if order not in PER_TOKEN:
            return None
        found = self.like(node, Kind(order, value.dim() + place, count))
        return found if found is not None and found.dim - value.dim() == place else None

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
        times = self.multiples(after) or []
        dims = [dim for dim, count in enumerate(times) if count]
        if len(dims) != 1 or _product(before.shape[: kind.dim]) != _product(after.shape[: dims[0]]):
            return None
        count = times[dims[0]]
        if kind.order in (Order.ROWS, Order.FLAT):
            if count == 1:
                return Kind(Order.ROWS, dims[0])
            return Kind(Order.FLAT, 0, count) if not dims[0] else None
        is_same = kind.order is Order.SORTED and not dims[0] and count == kind.per_token
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
        parts = _PARTS.get(name_of(source))
        if kind is None or parts is None:
            return kind if kind is None else self._part(node, kind)
        order = parts[index]
        return self._part(node, kind) if order is Order.ROWS else Kind(order, 0, kind.per_token)

    def _part(self, node: Node, kind: Kind) -> Kind | None:
        return self.like(node, kind if kind.order is not Order.SORT else Kind(Order.ROWS))

    def _taken(self, source: Node, index: Node) -> Kind | None:
        """``source[index]``, over its first dim."""
        from_, by = self.of(source), self.of(index)
        if from_ is None or by is None or from_.dim:
            return None
        if (from_.order, by.order) in _TAKEN:
            return Kind(_TAKEN[from_.order, by.order], 0, by.per_token)
        index_value = example(index)
        assert isinstance(index_value, Tensor)
        if from_.order is Order.CONSTANT and by.order in PER_TOKEN:
            return by if index_value.dtype != torch.bool else None
        return None

    def _sliced(self, node: Node, source: Node, index: Sequence[Any]) -> Kind | None:
        kind, value = self.of(source), example(source)
        if kind is None or kind.order not in PER_TOKEN:
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
        return self.like(node, kind)


def _product(sizes: Sequence[Any]) -> object:
    """As text, of symbols: comparing these would add guards."""
    numbers = [size for size in sizes if isinstance(size, int)]
    return math.prod(numbers), sorted(str(size) for size in sizes if not isinstance(size, int))


def dims_of(node: Node, name: str, num_dims: int) -> set[int] | None:
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
