"""Recognises RMSNorm in a Dynamo graph, however a model spells it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...kernels.fused.dispatch import NormForm
from ..fx.nodes import (
    calls,
    cast_source,
    dtype_of,
    last_size,
    only_user,
    other_operand,
    shape_of,
    written_nodes,
)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """``output`` is the RMSNorm of ``source`` over its last dim.

    Attributes:
        nodes: all that was computed between the two, ``output`` included.
    """

    source: Node
    weight: Node
    eps: float
    form: NormForm
    output: Node
    nodes: tuple[Node, ...]


def rms_norms(gm: GraphModule) -> Iterator[RmsNorm]:
    """Every RMSNorm of the graph, as Hugging Face's models spell it, in the order of the graph.

    ::

        x32 = x.to(float32)
        y = x32 * rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        rounded:  weight * y.to(dtype)
        wide:     (weight * y).to(dtype)
        plus_one: (y * (1.0 + weight.float())).to(dtype)
    """
    written = written_nodes(gm.graph)
    for node in gm.graph.nodes:
        if calls(node, "rsqrt"):
            norm = _rms_norm(node)
            if norm is not None and written.isdisjoint({norm.source, *norm.nodes}):
                yield norm


def _rms_norm(rsqrt: Any) -> RmsNorm | None:
    added = rsqrt.args[0]
    if len(rsqrt.args) != 1 or not calls(added, "add") or len(added.args) != 2 or added.kwargs:
        return None
    mean, eps = added.args
    if not isinstance(eps, float) or not calls(mean, "mean"):
        return None
    found = {**dict(zip(("", "dim", "keepdim"), mean.args, strict=False)), **mean.kwargs}
    square = mean.args[0]
    if found != {"": square, "dim": -1, "keepdim": True}:
        return None
    if not calls(square, "pow") or square.args[1:] != (2,) or square.kwargs:
        return None
    wide = square.args[0]
    product = only_user(rsqrt)
    if product is None or not calls(product, "mul") or other_operand(product, rsqrt) is not wide:
        return None
    source: Any = cast_source(wide) or wide
    if dtype_of(wide) != torch.float32 or last_size(source) is None:
        return None
    # A conversion before the norm is part of it only if it comes from the dtype of the result.
    scaled = _scaled(product, source) or (_scaled(product, wide) if source is not wide else None)
    if scaled is None:
        return None
    source, weight, form, after = scaled
    before = {wide} - {source}
    nodes = (*before, square, mean, added, rsqrt, product, *after)
    return RmsNorm(source, weight, eps, form, after[-1], nodes)


def _scaled(product: Node, source: Any) -> tuple[Any, Any, NormForm, list[Node]] | None:
    """From the normalised float32 value to the result: (source, weight, form, nodes passed)."""
    dtype = dtype_of(source)
    step = only_user(product)
    if step is None:
        return None
    if cast_source(step) is product:
        result = only_user(step)
        if dtype_of(step) != dtype or result is None or not calls(result, "mul"):
            return None
        weight = other_operand(result, step)
        if not _is_weight(weight, source) or dtype_of(result) != dtype:
            return None
        return source, weight, "rounded", [step, result]
    if not calls(step, "mul"):
        return None
    factor: Any = other_operand(step, product)
    nodes: list[Node] = [step]
    form: NormForm = "wide"
    if calls(factor, "add") and factor.args[0] in (1, 1.0) and len(factor.args) == 2:
        wide_weight = factor.args[1]
        nodes, form = [factor, step], "plus_one"
        factor = cast_source(wide_weight) or wide_weight
        nodes = nodes if factor is wide_weight else [wide_weight, *nodes]
    if not _is_weight(factor, source) or dtype_of(step) != torch.float32:
        return None
    if dtype != torch.float32:
        result = only_user(step)
        if result is None or cast_source(result) is not step or dtype_of(result) != dtype:
            return None
        nodes = [*nodes, result]
    return source, factor, form, nodes


def _is_weight(node: Node | None, source: Node) -> bool:
    """A vector of the width and dtype of ``source`` that is there from the beginning."""
    if node is None or node.op != "placeholder":
        return False
    return shape_of(node) == (str(last_size(source)),) and dtype_of(node) == dtype_of(source)
