"""Reads ``topk(sum_h weights * relu(scale * query key') + mask)`` off the graph of an indexer."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from ..fx.nodes import calls, calls_function

_CASTS = ("to", "float", "int", "long")
_MATMULS = (torch.matmul, torch.bmm, operator.matmul)
_RELUS = (F.relu, torch.relu)


class NoIndexer(Exception):
    """The graph computes something else; the message says what, as what the indexer has."""


class IndexScores(NamedTuple):
    """Found in a graph of one text.

    Attributes:
        query: ``[1, T, H, D]``. weights: ``[1, T, H]``.
        mask: an input of the graph, added to the scores.
        scale: factor on the products. num_chosen: how many positions the highest scores choose.
    """

    query: Node
    weights: Node
    mask: Node
    scale: float
    num_chosen: int


def find_index_scores(gm: GraphModule, keys: Node) -> IndexScores:
    """Walks up from the graph's only result to ``keys``, ``[1, any, D]``.

    Raises:
        NoIndexer: it is computed otherwise.
    """
    (result,) = _result(gm)
    picked = _uncast(result)
    if not calls(picked, "getitem") or picked.args[1] != 1 or not calls(picked.args[0], "topk"):
        raise NoIndexer(f"a result of {_name(picked)!r}")
    num_chosen = _num_chosen(picked.args[0])
    masked = picked.args[0].args[0]
    if not calls(masked, "add") or not _is_input(masked.args[1]):
        raise NoIndexer(f"a mask from {_name(masked)!r}")
    weighed, mask = masked.args
    if calls(weighed, "squeeze") and weighed.args[1:] == (-2,):
        weighed = weighed.args[0]
    if not calls_function(weighed, *_MATMULS):
        raise NoIndexer(f"scores from {_name(weighed)!r}")
    row, products = weighed.args
    if not calls(row, "unsqueeze") or row.args[1] != -2:
        raise NoIndexer(f"weights from {_name(row)!r}")
    if not calls_function(products, *_RELUS):
        raise NoIndexer(f"products through {_name(products)!r}, not relu")
    product, scale = products.args[0], 1.0
    while calls_function(product, operator.mul, torch.mul) and _is_number(product.args[1]):
        product, scale = product.args[0], scale * product.args[1]
    if not calls_function(product, *_MATMULS):
        raise NoIndexer(f"products from {_name(product)!r}")
    query, columns = product.args
    if not _are_columns(columns, keys):
        raise NoIndexer("products with something else than its keys")
    weights = row.args[0]
    shapes = [tuple(node.meta["example_value"].shape) for node in (query, weights, keys)]
    (_, num_tokens, num_heads, dim), of_weights, (*_, key_dim) = shapes
    if of_weights != (1, num_tokens, num_heads) or dim != key_dim:
        raise NoIndexer(f"shapes {shapes}")
    return IndexScores(query, weights, mask, float(scale), num_chosen)


def _result(gm: GraphModule) -> tuple[Any, ...]:
    output = next(iter(reversed(gm.graph.nodes)))
    results: Any = output.args[0]
    if len(results) != 1:
        raise NoIndexer(f"{len(results)} results")
    return tuple(results)


def _num_chosen(topk: Node) -> int:
    names = ("input", "k", "dim", "largest", "sorted")
    given: dict[str, Any] = {**dict(zip(names, topk.args, strict=False)), **topk.kwargs}
    is_last = given.get("dim", -1) == -1 and given.get("largest", True)
    if not is_last or not isinstance(given["k"], int):
        raise NoIndexer(f"a choice of {given['k']} in another form")
    return int(given["k"])


def _are_columns(node: Any, keys: Node) -> bool:
    """Are these the keys as ``[1, 1, D, any]``?"""
    steps = []
    while node is not keys:
        if calls(node, *_CASTS):
            node = node.args[0]
        elif calls(node, "transpose", "unsqueeze"):
            steps.append((node.target, *node.args[1:]))
            node = node.args[0]
        else:
            return False
    return sorted(steps) in (
        [("transpose", -1, -2), ("unsqueeze", 1)],
        [("transpose", -2, -1), ("unsqueeze", 1)],
    )


def _uncast(node: Any) -> Any:
    while calls(node, *_CASTS):
        node = node.args[0]
    return node


def _is_input(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "placeholder"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _name(node: Any) -> str:
    target = getattr(node, "target", node)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
