"""Reads ``softmax(scale * q k' + bias + mask) v`` off the graph of a module that writes it out."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from ...errors import UnsupportedModelError

_LOWEST = -1e30  # what is below hides a token
_SAME = frozenset({"view", "reshape", "to", "float", "contiguous", "type_as", "type"})
_MATMULS = frozenset({torch.matmul, torch.bmm, operator.matmul})
_ADDS = frozenset({operator.add, operator.iadd, torch.add})
_MULTIPLICATIONS = frozenset({operator.mul, operator.imul, torch.mul})
_DIVISIONS = frozenset({operator.truediv, operator.itruediv, torch.div})


def refusal(module: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(module).__name__} does not take its attention function from transformers' "
        f"AttentionInterface, and {reason}"
    )


@dataclass(slots=True)
class Scores:
    """``scale * query key' + bias_scale * bias + mask``, found in a graph."""

    query: Any
    key: Any
    scale: float
    mask: Node | None
    bias: Node | None = None
    bias_scale: float = 1.0


def find_scores(part: nn.Module, node: Any) -> Scores:
    """Walks up from what a softmax is given to the matmul of queries and keys."""
    scale = bias_scale = 1.0
    mask: Any = None
    bias: Any = None
    while isinstance(node, Node):
        if _name(node) in _SAME:
            node = node.args[0]
        elif node.target in _ADDS and mask is None and _is_mask(node.args[1]):
            node, mask = node.args
        elif node.target in _ADDS and bias is None and _is_input(node.args[1]):
            (node, bias), bias_scale = node.args, scale
        elif _name(node) == "masked_fill" and mask is None and _is_hiding(node):
            node, mask = node.args[:2]
        elif node.target in _MULTIPLICATIONS and isinstance(node.args[1], (int, float)):
            node, scale = node.args[0], scale * node.args[1]
        elif node.target in _DIVISIONS and isinstance(node.args[1], (int, float)):
            node, scale = node.args[0], scale / node.args[1]
        elif node.target is torch.max and _is_lowest(node.args[1]):
            node = node.args[0]
        elif node.target in _MATMULS:
            query, key = _cast_from(node.args[0]), _untransposed(part, node.args[1])
            return Scores(query, key, scale, mask, bias, bias_scale)
        elif _name(node) == "baddbmm" and (_is_zero(node.args[0]) or bias is None):
            operands: dict[str, Any] = dict(
                zip(("input", "batch1", "batch2"), node.args, strict=False)
            )
            operands |= node.kwargs
            if not _is_zero(operands["input"]):
                bias, bias_scale = operands["input"], scale * operands.get("beta", 1.0)
            query, key = operands["batch1"], _untransposed(part, operands["batch2"])
            scale *= operands.get("alpha", 1.0)
            return Scores(_cast_from(query), key, scale, mask, bias, bias_scale)
        else:
            break
    raise refusal(part, f"its scores come from {_name(node)!r}")


def find_product(part: nn.Module, softmax: Node) -> Node:
    """The matmul of the weights and the values."""
    found = [
        user
        for node in weights_from(softmax)
        for user in node.users
        if user.target in _MATMULS and user.args[0] is node
    ]
    if len(found) != 1:
        raise refusal(part, f"its weights are multiplied {len(found)} times")
    return found[0]


def weights_from(softmax: Node) -> list[Node]:
    """The softmax, and what are its weights in another form."""
    found = [softmax]
    for node in found:
        for user in node.users:
            is_dropout = user.target is F.dropout and not _training(user)
            if user.args[0] is node and (is_dropout or _name(user) in _SAME):
                found.append(user)
    return found


def _training(dropout: Node) -> bool:
    given = (*dropout.args[2:3], dropout.kwargs.get("training"))
    return next((bool(value) for value in given if value is not None), True)


def _name(node: Any) -> str:
    target = getattr(node, "target", node)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _is_mask(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "placeholder"


def _is_input(node: Any) -> bool:
    """Whether the module is given it, or a part of it."""
    while isinstance(node, Node) and (_name(node) in _SAME or node.target is operator.getitem):
        node = node.args[0]
    return _is_mask(node)


def _is_hiding(masked_fill: Node) -> bool:
    value: Any = masked_fill.args[2]
    return _is_mask(masked_fill.args[1]) and isinstance(value, float) and value <= _LOWEST


def _is_lowest(node: Any) -> bool:
    value: Any = node.args[1] if isinstance(node, Node) and node.target is torch.full else 0.0
    return bool(value <= _LOWEST)


def _is_zero(node: Any) -> bool:
    return isinstance(node, Node) and node.target is torch.zeros


def _cast_from(node: Any) -> Any:
    """Without a cast of the model's dtype to float32, which kernels do themselves."""
    return node.args[0] if _name(node) in ("to", "float") else node


def _untransposed(part: nn.Module, node: Any) -> Any:
    num_dims = node.meta["example_value"].dim() if "example_value" in node.meta else None
    is_last_two = _name(node) == "transpose" and set(node.args[1:]) in (
        {-1, -2},
        {1, 2} if num_dims == 3 else {2, 3},
    )
    if not is_last_two:
        raise refusal(part, f"its keys come from {_name(node)!r}")
    return _cast_from(node.args[0])
