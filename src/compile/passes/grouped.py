"""Finds the products of a mixture of experts, however transformers spells them."""

from __future__ import annotations

from torch.fx import Node

NAMES = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


def grouped_operands(node: Node) -> tuple[Node, Node, Node] | None:
    """(rows ``[S, K]``, weights ``[E, K, N]``, offsets ``[E]``) if ``node`` is a grouped product
    with no other argument (bias, output dtype), else None."""
    if node.op != "call_function":
        return None
    # "name" of a function or a packet of overloads, "name.default" of an overload.
    if getattr(node.target, "__name__", "").split(".")[0] not in NAMES:
        return None
    named = dict(zip(("input", "weight", "offs"), node.args, strict=False)) | dict(node.kwargs)
    rows, weight, offs = (named.pop(name, None) for name in ("input", "weight", "offs"))
    if any(value is not None for value in named.values()):
        return None
    if not (isinstance(rows, Node) and isinstance(weight, Node) and isinstance(offs, Node)):
        return None
    return rows, weight, offs
