"""Pattern-matching helpers for the nodes of a Dynamo graph: operations, operands, shapes, users.

A match only concerns values: it determines which nodes compute a known function of which sources. A
rewrite puts the new call after all sources, redirects the users of the result and lets
:func:`erase_unused` remove what is no longer read. So a value that is also read elsewhere stays.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, Node

PLAIN = (type(None), bool, int, float, str)
"""Types of values that are equal if their texts are."""
RECURRENT_KINDS = ("short_conv", "delta_rule", "ssd_scan", "selective_scan")
"""pagespec's operators that read and write the states of requests."""

CASTS = frozenset({"to", "type", "float", "half", "bfloat16", "type_as"})
"""Methods that may convert to another dtype."""
_VIEWS = frozenset(
    {
        "view", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "expand", "split",
        "chunk", "flatten", "unflatten", "view_as_complex", "view_as_real", "real", "imag",
        "getattr",
    }
)  # fmt: skip
_IN_PLACE_OPERATORS = frozenset(
    {
        "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift",
        "isub", "itruediv", "ixor", "setitem", "delitem",
    }
)  # fmt: skip


def calls(node: object, *names: str) -> TypeGuard[Any]:
    """Whether ``node`` calls a function, operator or method of one of these names.

    A type checker treats the node as Any: arguments of nodes have no useful type.
    """
    if not isinstance(node, Node):
        return False
    if node.op == "call_method":
        return node.target in names
    return node.op == "call_function" and getattr(node.target, "__name__", "") in names


def calls_function(node: object, *functions: Any) -> TypeGuard[Any]:
    """Whether ``node`` calls exactly one of these functions."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in functions


def calls_op(node: object, name: str) -> TypeGuard[Any]:
    """Whether ``node`` calls pagespec's operator of this name, for example ``paged_attention``."""
    op = getattr(torch.ops.pagespec, name)
    return calls_function(node, op, op.default)


def recurrent_interval(node: Node) -> int | None:
    """The index of the interval among the arguments of a recurrent operator; None for any other
    node."""
    for name in RECURRENT_KINDS:
        if calls_op(node, name):
            schema = getattr(torch.ops.pagespec, name).default._schema
            return [argument.name for argument in schema.arguments].index("interval")
    return None


def is_ours(node: Node) -> bool:
    """Whether ``node`` calls a kernel or an operator of this package."""
    module = getattr(node.target, "__module__", None) or ""
    return module.startswith("pagespec") or str(node.target).startswith("pagespec.")


def tensor_of(node: object) -> Tensor | None:
    """The fake tensor recorded for ``node``, or None."""
    value = example(node) if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def shape_of(node: object) -> tuple[str, ...] | None:
    """Sizes as text: comparing the symbols themselves would add guards to the capture."""
    tensor = tensor_of(node)
    return None if tensor is None else tuple(str(size) for size in tensor.shape)


def dtype_of(node: object) -> torch.dtype | None:
    """The dtype recorded for ``node``, or None."""
    tensor = tensor_of(node)
    return None if tensor is None else tensor.dtype


def last_size(node: object) -> int | None:
    """The last size of ``node``, if it is known and fixed."""
    tensor = tensor_of(node)
    if tensor is None or not tensor.dim() or not isinstance(tensor.shape[-1], int):
        return None
    return tensor.shape[-1]


def operands(node: Node) -> tuple[Node, Node] | None:
    """Both operands of a call with exactly two operands, both of them nodes."""
    if len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    return (left, right) if isinstance(left, Node) and isinstance(right, Node) else None


def only_user(node: Node) -> Node | None:
    """The only node that reads ``node``, if there is exactly one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def cast_source(node: object) -> Node | None:
    """The node that ``node`` converts to another dtype, if it does nothing else."""
    if not calls(node, *CASTS) or node.op != "call_method":
        return None
    source = node.args[0]
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.device != after.device:
        return None
    return source


def last_dim_slice(node: object) -> tuple[Node, int, int] | None:
    """(source, begin, end) if ``node`` is a contiguous slice of ``source`` in its last dim."""
    if not calls(node, "getitem"):
        return None
    source, index = node.args
    if isinstance(index, tuple):
        size = last_size(source)
        if size is None or len(index) != 2 or index[0] is not Ellipsis:
            return None
        part = index[1]
        if not isinstance(part, slice) or part.step not in (None, 1):
            return None
        if not all(bound is None or isinstance(bound, int) for bound in (part.start, part.stop)):
            return None
        begin, end, _ = part.indices(size)
        return source, begin, max(begin, end)
    if not calls(source, "chunk", "split") or not isinstance(index, int):
        return None
    names = ("source", "sizes", "dim")
    given = dict(zip(names, source.args, strict=False)) | dict(source.kwargs)
    whole, dim = given.pop("source", None), given.pop("dim", 0)
    (sizes,) = given.values() if len(given) == 1 else (None,)
    width, tensor = last_size(whole), tensor_of(whole)
    if tensor is None or width is None or dim not in (-1, tensor.dim() - 1):
        return None
    if calls(source, "chunk") and isinstance(sizes, int) and width % sizes == 0:
        sizes = [width // sizes] * sizes
    if not isinstance(sizes, list | tuple) or not all(isinstance(size, int) for size in sizes):
        return None
    begin = sum(sizes[:index])
    return whole, begin, begin + sizes[index]


def written_nodes(graph: Graph) -> set[Node]:
    """Nodes whose memory some call of the graph may change in place, and all views of it.

    pagespec's operators write only into KV caches and states, which no pattern reads.
    """
    written: set[Node] = set()
    nodes = list(graph.nodes)
    writing = set(filter(_writes, {node.target for node in nodes}))
    stack = [
        node.args[0]
        for node in nodes
        if (node.target in writing or node.kwargs) and node.args and is_in_place(node)
    ]
    while stack:
        node = stack.pop()
        if not isinstance(node, Node) or node in written:
            continue
        written.add(node)
        if _is_view(node):
            stack.append(node.args[0])
        stack.extend(user for user in node.users if _is_view(user) and user.args[0] is node)
    return written


def is_in_place(node: Node) -> bool:
    """Whether ``node`` may be a call that changes its first argument."""
    if node.op not in ("call_method", "call_function"):
        return False
    return bool(node.kwargs.get("inplace") or "out" in node.kwargs or _writes(node.target))


def _writes(target: object) -> bool:
    """Whether the name of ``target`` indicates that a call of it changes its first argument."""
    name: str = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_marked = name.endswith("_") and not name.endswith("__")
    return is_marked or name in _IN_PLACE_OPERATORS


def _is_view(node: Node) -> bool:
    # Conversions and contiguous() may return their argument itself.
    if calls(node, *_VIEWS, *CASTS, "contiguous", "detach"):
        return True
    if not calls(node, "getitem"):
        return False
    source, index = node.args
    if isinstance(index, int) and tensor_of(source) is None and is_ours(source):
        return False  # one of several results, which do not overlap
    index = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(part, Node | list) for part in index)


def erase_unused(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those of ``nodes`` that are not read (any more), users before sources."""
    for node in sorted(set(nodes).intersection(graph.nodes), reverse=True):
        if not node.users:
            graph.erase_node(node)


def example(node: Node) -> object:
    """The fake tensor (or other value) that Dynamo recorded for a node's result, or None."""
    return node.meta.get("example_value")


LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)
"""The functions that :func:`is_linear` accepts."""


def is_linear(node: Node) -> bool:
    """Whether ``node`` is a call of ``torch.nn.functional.linear``."""
    return calls_function(node, *LINEAR)


def linear_operands(node: Node) -> tuple[Node, Node, Node | None]:
    """(input, weight, bias or None) of a linear call."""
    names = ("input", "weight", "bias")
    found = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return found["input"], found["weight"], found.get("bias")  # type: ignore[return-value]


def left_matmul_operands(node: Node) -> tuple[Node, Node] | None:
    """(weight ``[O, I]``, columns ``[..., I, T]``) if ``node`` multiplies columns from the left
    with a constant matrix, or a batch of columns with a batch of matrices; else None."""
    if not calls_function(node, operator.matmul, torch.matmul):
        return None
    pair = operands(node)
    weight, columns = (None, None) if pair is None else map(tensor_of, pair)
    if pair is None or weight is None or columns is None or weight.dim() < 2:
        return None
    source = pair[0].args[0] if calls(pair[0], "getitem") else pair[0]
    if not isinstance(source, Node) or source.op != "placeholder":
        return None
    if not all(isinstance(size, int) for size in weight.shape):
        return None  # a step's input
    is_batch = weight.dim() == columns.dim() and weight.shape[:-2] == columns.shape[:-2]
    return pair if is_batch or weight.dim() == 2 < columns.dim() else None


GROUPED_MM_NAMES = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


def grouped_operands(node: Node) -> tuple[Node, Node, Node] | None:
    """(rows ``[S, K]``, weights ``[E, K, N]``, offsets ``[E]``) if ``node`` is a grouped matmul
    with no other argument (bias, output dtype), else None."""
    if node.op != "call_function":
        return None
    # "name" of a function or a packet of overloads, "name.default" of an overload.
    if getattr(node.target, "__name__", "").split(".")[0] not in GROUPED_MM_NAMES:
        return None
    named = dict(zip(("input", "weight", "offs"), node.args, strict=False)) | dict(node.kwargs)
    rows, weight, offs = (named.pop(name, None) for name in ("input", "weight", "offs"))
    if any(value is not None for value in named.values()):
        return None
    if not (isinstance(rows, Node) and isinstance(weight, Node) and isinstance(offs, Node)):
        return None
    return rows, weight, offs
