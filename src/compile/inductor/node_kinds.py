"""What a node of a graph is to Inductor: a call it only passes on, a view, a copy."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Node

from ..fx.fake_tensors import memory_of
from ..fx.nodes import calls, example, is_ours

_MATMULS = frozenset(
    {
        torch.nn.functional.linear,
        torch._C._nn.linear,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        operator.matmul,
        "matmul",
        "mm",
        "bmm",
    }
)
_MATMUL_NAMES = ("grouped_mm", "scaled_mm", "_grouped_linear")
# They make no new tensor: not worth a compiled region of their own.
_VIEWS = frozenset(
    {
        "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "split", "chunk",
        "expand", "t", "size", "flatten", "unflatten", "unbind", "contiguous",
    }
)  # fmt: skip
_MAYBE_COPIES = ("reshape", "flatten", "contiguous")
# They move numbers: one kernel each, compiled or not.
COPIES = frozenset({torch.nn.functional.embedding, operator.getitem, *_MAYBE_COPIES})


def is_opaque(node: Node) -> bool:
    """Is ``node`` a call that Inductor would only pass on: a matmul, a kernel of ours, or one that
    reads or makes complex numbers, of which torch's own kernels run either way?"""
    values = map(example, (node, *node.all_input_nodes))
    if any(isinstance(value, Tensor) and value.is_complex() for value in values):
        return True
    if node.op == "call_method":
        return node.target in _MATMULS
    if node.op != "call_function":
        return node.op in ("call_module", "get_attr")
    if node.target in _MATMULS:
        return True
    name = getattr(node.target, "__name__", "")
    if any(part in name for part in _MATMUL_NAMES):
        return True
    return is_ours(node)


def is_view(node: Node) -> bool:
    """Does ``node`` compute nothing: a view of its argument, a part of it, a size?"""
    if calls(node, *_VIEWS):
        return not is_copy(node)
    if node.target is operator.getitem:
        index = node.args[1]
        # Indexing by a tensor makes a new one.
        return not any(isinstance(part, Node) and is_tensor(part) for part in _flat(index))
    # Arithmetic on sizes.
    return not is_tensor(node) and isinstance(example(node), (int, torch.SymInt))


def is_copy(node: Node) -> bool:
    """Is ``node``, by name a view, a copy, as no strides over its argument give its result?"""
    if not calls(node, *_MAYBE_COPIES):
        return False
    source, result = example(node.args[0]), example(node)  # type: ignore[arg-type]
    if not isinstance(source, Tensor) or not isinstance(result, Tensor):
        return False
    return memory_of(source) != memory_of(result)


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, slice):
        yield from _flat((value.start, value.stop, value.step))
    else:
        yield value


def is_tensor(node: Node) -> bool:
    """Is the result of ``node`` one tensor?"""
    return isinstance(example(node), Tensor)
