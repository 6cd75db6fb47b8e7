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
    """``scale * query key' + bias_scale * bias + mask``, found in a graph.

    Attributes:
        own_window: of a causal mask that the module keeps itself, 0 for all; None without one.
    """

    query: Any
    key: Any
    scale: float
    mask: Node | None
    bias: Node | None = None
    bias_scale: float = 1.0
    own_window: int | None = None


def find_scores(part: nn.Module, node: Any) -> Scores:
    """Walks up from what a softmax is given to the matmul of queries and keys."""
    scale = bias_scale = 1.0
    mask: Any = None
    bias: Any = None
    own_window: int | None = None
    while isinstance(node, Node):
        if _name(node) in _SAME:
            node = node.args[0]
        elif node.target in _ADDS and mask is None and _is_mask(node.args[1]):
            node, mask = node.args
        elif node.target in _ADDS and bias is None and _is_input(node.args[1]):
            (node, bias), bias_scale = node.args, scale
        elif _name(node) == "masked_fill" and mask is None and _is_hiding(node):
            node, mask = node.args[:2]
        elif own_window is None and (masked := _masked_by_itself(node)) is not None:
            node, own_mask = masked
            own_window = _window_of(part, own_mask)
        elif node.target in _MULTIPLICATIONS and isinstance(node.args[1], (int, float)):
            node, scale = node.args[0], scale * node.args[1]
        elif node.target in _DIVISIONS and isinstance(node.args[1], (int, float)):
            node, scale = node.args[0], scale / node.args[1]
        elif node.target is torch.max and _is_lowest(node.args[1]):
            node = node.args[0]
        elif node.target in _MATMULS:
            query, key = _cast_from(node.args[0]), _untransposed(node.args[1])
            return Scores(query, key, scale, mask, bias, bias_scale, own_window)
        elif _name(node) == "baddbmm" and (_is_zero(node.args[0]) or bias is None):
            operands: dict[str, Any] = dict(
                zip(("input", "batch1", "batch2"), node.args, strict=False)
            )
            operands |= node.kwargs
            if not _is_zero(operands["input"]):
                bias, bias_scale = operands["input"], scale * operands.get("beta", 1.0)
            query, key = operands["batch1"], _untransposed(operands["batch2"])
            scale *= operands.get("alpha", 1.0)
            return Scores(_cast_from(query), key, scale, mask, bias, bias_scale, own_window)
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


def _masked_by_itself(node: Node) -> tuple[Any, Any] | None:
    """The scores and the mask of ``where(mask, scores, lowest)`` or
    ``scores * mask + -1e4 * (1 - mask)``."""
    if node.target is torch.where and _is_lowest_number(node.args[2]):
        return node.args[1], node.args[0]
    if node.target not in _ADDS:
        return None
    kept, hidden = (_factors(term) for term in node.args)
    if kept is None or hidden is None or not isinstance(hidden[0], float):
        return None
    is_inverse = hidden[1].target is operator.sub and hidden[1].args == (1, kept[1])
    # As transformers' first models write it: enough to hide, unless scores are in the thousands.
    return kept if is_inverse and hidden[0] <= -1e4 else None


def _factors(node: Any) -> tuple[Any, Any] | None:
    is_product = isinstance(node, Node) and node.target in _MULTIPLICATIONS
    return (node.args[0], node.args[1]) if is_product else None


def _is_lowest_number(node: Any) -> bool:
    value: Any = node.args[0] if isinstance(node, Node) and node.target is torch.tensor else node
    return isinstance(value, float) and value <= _LOWEST


def _window_of(part: nn.Module, mask: Any) -> int:
    """The window of a causal mask that is cut from a buffer ``[1, 1, P, P]``; 0 for all."""
    buffer: Any = None
    if isinstance(mask, Node) and mask.target is operator.getitem and _begins_at_0(mask.args[1]):
        whole: Any = mask.args[0]
        if whole.op == "get_attr":
            buffer = whole.graph.owning_module.get_buffer(whole.target)
    if buffer is None or buffer.dim() != 4 or buffer.shape[2] != buffer.shape[3]:
        raise refusal(part, "its mask is not cut from a buffer of it")
    shown = buffer[0, 0].bool()
    hides_0 = (~shown[:, 0]).nonzero()
    window = int(hides_0[0]) if len(hides_0) else 0
    at = torch.arange(len(shown), device=shown.device)
    expected = at <= at[:, None]
    if window:
        expected &= at > at[:, None] - window
    if buffer.shape[:2] != (1, 1) or not torch.equal(shown, expected):
        raise refusal(part, "its own mask is neither causal nor a causal window")
    return window


def _begins_at_0(slices: Any) -> bool:
    starts = [part.start for part in slices if isinstance(part, slice)]
    values = [x.meta.get("example_value") if isinstance(x, Node) else x for x in starts]
    return len(starts) == len(slices) and all(value is None or value == 0 for value in values)


def _untransposed(node: Any) -> Any:
    num_dims = node.meta["example_value"].dim() if "example_value" in node.meta else None
    is_last_two = _name(node) == "transpose" and set(node.args[1:]) in (
        {-1, -2},
        {1, 2} if num_dims == 3 else {2, 3},
    )
    if is_last_two:
        return _cast_from(node.args[0])
    with node.graph.inserting_after(node):
        return node.graph.call_method("transpose", (node, -1, -2))
