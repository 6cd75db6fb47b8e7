"""Identify matmuls of a step's tensor with a constant, in whichever way they are written.

All of them are treated as an equation of ``einsum``. A dimension that both operands share is a
batch dimension if the result has it, and summed otherwise. The result has every dimension that only
one operand has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...kernels.matmul.cpu.products import ProductForm
from .nodes import (
    calls,
    grouped_operands,
    is_in_place,
    is_linear,
    is_ours,
    linear_operands,
    tensor_of,
)

_MATMULS = ("matmul", "mm", "bmm", "mv")
_MATMULS_WITH_ADDEND = ("addmm", "baddbmm", "addmv")
_Dims = Sequence[Hashable]


class Product(NamedTuple):
    """``x`` times ``weight``, which is computed only from constants, plus ``addend``."""

    x: Node
    weight: Node
    addend: Node | None
    form: ProductForm


def product_of(node: Node, is_constant: Callable[[Node], bool]) -> Product | None:
    """The matmul that ``node`` computes. None if it computes none, if not exactly one operand is
    constant, or if at most one term is summed.

    Args:
        is_constant: whether a node is one of :func:`constant_nodes`.
    """
    found = _operands(node)
    if found is None:
        return None
    equation, operands, addend = found
    constant = [is_constant(operand) for operand in operands]
    if sum(constant) != 1:
        return None
    at = constant.index(True)
    x, weight = tensor_of(operands[1 - at]), tensor_of(operands[at])
    if x is None or weight is None:
        return None
    num_dims = [x.dim(), weight.dim()]
    terms = _terms(equation, num_dims if at else num_dims[::-1])
    if terms is None:
        return None
    *inputs, out = terms
    form = _form(inputs[1 - at], inputs[at], out, x, weight)
    return None if form is None else Product(operands[1 - at], operands[at], addend, form)


def _operands(node: Node) -> tuple[str, list[Node], Node | None] | None:
    """(equation, both operands, addend or None)."""
    if is_ours(node) or node.kwargs:
        return None
    args: list[Any] = list(node.args)
    addend, equation = None, None
    if calls(node, "einsum") and len(args) > 1:
        equation, *args = args
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = list(args[0])
    elif calls(node, *_MATMULS_WITH_ADDEND):
        addend, *args = args
        if not isinstance(addend, Node):
            return None
    elif not calls(node, *_MATMULS):
        return None
    if len(args) != 2 or not all(isinstance(arg, Node) for arg in args):
        return None
    if not isinstance(equation, str):
        left, right = (getattr(tensor_of(arg), "ndim", 2) for arg in args)
        rows, columns = "i" * (left > 1), "j" * (right > 1)
        equation = (
            f"{'...' * (left > 1)}{rows}k,{'...' * (right > 1)}k{columns}->...{rows}{columns}"
        )
    return equation, args, addend


def _terms(equation: str, num_dims: Sequence[int]) -> list[list[Hashable]] | None:
    """The dimensions of both operands and of the result; those of "..." have negative numbers."""
    text = equation.replace(" ", "")
    inputs, arrow, out = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        return None
    nums_hidden = [
        num - len(term.replace("...", "")) for term, num in zip(terms, num_dims, strict=True)
    ]
    if any(num < 0 for num in nums_hidden):
        return None
    if not arrow:
        letters = inputs.replace(",", "").replace("...", "")
        once = sorted(letter for letter in letters if letters.count(letter) == 1)
        out = "..." * ("..." in inputs) + "".join(once)
    named: list[list[Hashable]] = []
    for term, num_hidden in zip([*terms, out], [*nums_hidden, max(nums_hidden)], strict=True):
        head, dots, tail = term.partition("...")
        named.append([*head, *(range(-num_hidden, 0) if dots else ()), *tail])
    return named


def _form(
    x_dims: _Dims, weight_dims: _Dims, out: _Dims, x: Tensor, weight: Tensor
) -> ProductForm | None:
    if any(len(set(dims)) < len(dims) for dims in (x_dims, weight_dims, out)):
        return None  # a diagonal
    weight_sizes = dict(zip(weight_dims, weight.shape, strict=False))
    if len(weight_sizes) < weight.dim() or len(x_dims) < x.dim():
        return None
    if not all(isinstance(size, int) for size in weight_sizes.values()):
        return None
    # A single row or matrix for a whole batch is not such a matmul.
    shared = set(x_dims) & set(weight_dims)
    wide = [dim for dim in shared if weight_sizes[dim] != 1]
    x_sizes = dict(zip(x_dims, x.shape, strict=False))
    x_gone = {dim for dim in wide if isinstance(x_sizes[dim], int) and x_sizes[dim] == 1}
    weight_gone = {dim for dim in shared if dim not in wide} - (set(x_dims) - set(out))
    if x_gone - set(out):
        return None  # torch would have expanded a summed dimension
    left = [dim for dim in x_dims if dim not in x_gone]
    right = [dim for dim in weight_dims if dim not in weight_gone]
    batch = [dim for dim in out if dim in left and dim in right]
    summed = [dim for dim in left if dim in right and dim not in out]
    free = [dim for dim in out if dim in left and dim not in right]
    own = [dim for dim in out if dim in right and dim not in left]
    computed = [*batch, *free, *own]
    is_whole = len(batch) + len(free) + len(summed) == len(left)
    is_whole &= len(batch) + len(own) + len(summed) == len(right)
    if not is_whole or len(computed) != len(out):
        return None
    if all(weight_sizes[dim] == 1 for dim in summed):
        return None
    return ProductForm(
        tuple(i for i, dim in enumerate(x_dims) if dim in x_gone),
        tuple(i for i, dim in enumerate(weight_dims) if dim in weight_gone),
        tuple(left.index(dim) for dim in [*batch, *free, *summed]),
        tuple(right.index(dim) for dim in [*batch, *own, *summed]),
        len(batch),
        len(summed),
        tuple(computed.index(dim) for dim in out),
    )


def constant_nodes(graph: Graph, constants: Mapping[str, Tensor]) -> set[Node]:
    """Constants, and nodes computed only from constants: the same in each step.

    Args:
        constants: by the names of their placeholders.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            is_constant = node.name in constants
        else:
            is_call = node.op in ("call_function", "call_method") and not is_in_place(node)
            sources = node.all_input_nodes
            is_constant = is_call and bool(sources) and all(n in found for n in sources)
        if is_constant:
            found.add(node)
    return found


def library_matmul(node: Node, is_constant: Callable[[Node], bool]) -> str | None:
    """The operation's name if ``node`` is a matmul of a step's rows that is left to torch's library
    and has a weight, computed only from constants; else None.

    Args:
        is_constant: whether a node is one of :func:`constant_nodes`.
    """
    if is_ours(node):
        return None
    if is_linear(node):
        return "linear" if is_constant(linear_operands(node)[1]) else None
    if grouped_operands(node) is not None:
        return "grouped_mm"
    return None if product_of(node, is_constant) is None else _name(node)


def library_matmuls(graph: Graph, constants: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the graph's nodes that are a :func:`library_matmul`, by name."""
    known = constant_nodes(graph, constants)
    names = (library_matmul(node, known.__contains__) for node in graph.nodes)
    return dict(Counter(name for name in names if name is not None))


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")


def value_of(node: Node, constants: Mapping[str, Tensor]) -> Tensor:
    """The value of one of :func:`constant_nodes`; a view where the node computes a view."""
    with torch.no_grad():
        return computation_of(node, constants)[0]()


def computation_of(
    node: Node, constants: Mapping[str, Tensor]
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A function that computes one of :func:`constant_nodes` again, and the constants that it
    reads. It refers to no node, so the graph can be freed."""
    leaves: list[Tensor] = []

    def later(node: Node) -> _Later:
        if node.op == "placeholder":
            leaves.append(constants[node.name])
            return _Later(None, leaves[-1:], {})
        target: Any = node.target
        if node.op == "call_method":
            target = partial(_call_method, target)
        inner: Any = later  # its result is not an argument of a node
        args, kwargs = map_arg(node.args, inner), map_arg(node.kwargs, inner)
        return _Later(target, args, kwargs)

    return later(node), leaves


@dataclass(frozen=True, slots=True)
class _Later:
    """A deferred call; without a target, its first argument."""

    target: Any
    args: Any
    kwargs: Any

    def __call__(self) -> Any:
        if self.target is None:
            return self.args[0]
        args, kwargs = (_computed(part) for part in (self.args, self.kwargs))
        return self.target(*args, **kwargs)


def _computed(value: Any) -> Any:
    """``value`` with the results of the calls in it."""
    if isinstance(value, _Later):
        return value()
    if isinstance(value, dict):
        return {key: _computed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value).__module__ != "torch":
        return type(value)(map(_computed, value))
    return value


def _call_method(name: str, source: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(source, name)(*args, **kwargs)


def transposed_matrix(node: Node) -> Node | None:
    """The matrix whose transpose ``node`` is."""
    source: Any = node.args[0] if node.args else None
    matrix, rest = tensor_of(source), node.args[1:]
    if matrix is None or matrix.dim() != 2 or node.kwargs:
        return None
    if calls(node, "t") or (node.target is getattr and rest[0] in ("T", "mT")):
        return source  # type: ignore[no-any-return]
    dims = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
    wanted = {"permute": ([1, 0],), "transpose": ([0, 1], [1, 0])}
    for name, orders in wanted.items():
        if calls(node, name) and all(isinstance(dim, int) for dim in dims):
            return source if [dim % 2 for dim in dims] in orders else None  # type: ignore
    return None
