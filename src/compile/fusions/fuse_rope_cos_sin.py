"""Fuse the cosines and sines of rotary embeddings into one call.

::

    angles = (frequencies * positions.float()).transpose(1, 2)  # columns of frequencies
    angles = positions.float() * frequencies  # or rows of them, in later transformers
    angles = cat((angles, angles), dim=-1)
    cos, sin = (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)

Results are unchanged bit for bit on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...kernels.fused.dispatch import rope_table
from ..fx.nodes import calls, cast_source, dtype_of, example, only_user, shape_of
from ..fx.rules import Cast, Match, Named, Rule, Value, call, has_dtype, one_of, product, shared

_PRODUCT = product(
    Value("frequencies"), Cast(Value("positions"), "wide", is_shared=True), "product", True
)
_COLUMNS = one_of(
    *(shared("transpose", args=(_PRODUCT, *d), name="columns") for d in ((1, 2), (2, 1)))
)
_HALF = Named("half", one_of(_COLUMNS, _PRODUCT))


def _are_vectors(m: Match) -> bool:
    """Whether they are ``[1, H, 1]`` and ``[1, 1, T]``, or ``[H]`` and ``[1, T, 1]``."""
    sizes, places = (shape_of(m[name]) or () for name in ("frequencies", "positions"))
    is_one_row = places[::2] == ("1", "1")
    if m.get("columns"):
        is_one_row = sizes[::2] == places[:2] == ("1", "1")
        sizes = sizes[1:2]
    return is_one_row and len(places) == 3 and len(sizes) == 1 and sizes[0].isdigit()


def _table(angles: Node, name: str) -> tuple[Node, float] | None:
    """The table and its factor, if a single node computes this function of the angles."""
    found = [user for user in angles.users if calls(user, name) and user.args == (angles,)]
    if len(found) != 1:
        return None
    last, factor = found[0], 1.0
    scaled: Any = only_user(last)
    if calls(scaled, "mul") and len(scaled.args) == 2 and scaled.args[0] is last:
        if not isinstance(scaled.args[1], (int, float)):
            return None
        last, factor = scaled, float(scaled.args[1])
    rounded = only_user(last)
    return (rounded, factor) if rounded and cast_source(rounded) is last else (last, factor)


def _are_tables(m: Match) -> bool:
    """Whether cosines and sines are scaled and rounded in the same way, and no node between is
    written in place."""
    cos, sin = (_table(m.root, name) for name in ("cos", "sin"))
    if cos is None or sin is None or cos[1] != sin[1] or dtype_of(cos[0]) != dtype_of(sin[0]):
        return False
    nodes = [m.root]
    table: Any
    for table, _ in (cos, sin):
        while table is not m.root:
            nodes.append(table)
            table = table.args[0]
    return m.written.isdisjoint(nodes)


def _view(m: Match, name: str, source: Node, *args: int) -> Node:
    made = m.graph.call_method(name, (source, *args))
    made.meta["example_value"] = getattr(example(source), name)(*args)
    return made


def _rope_table(m: Match) -> dict[Node, Node]:
    (cos, factor), (sin, _) = filter(None, (_table(m.root, name) for name in ("cos", "sin")))
    frequencies, positions = m["frequencies"], m["positions"]
    if not m.get("columns"):
        frequencies = _view(m, "reshape", frequencies, 1, -1, 1)
        positions = _view(m, "transpose", positions, 1, 2)
    joined = m.call(rope_table, frequencies, positions, factor, dtype_of(cos))
    joined.meta["example_value"] = example(cos), example(sin)
    return m.results(joined, cos, sin)


fuse_rope_cos_sin = Rule(
    call("cat", args=([_HALF, Value("half")],), dim=(-1, 2)),
    _rope_table,
    guards=(
        has_dtype(torch.float32, "frequencies", "wide", "product"),
        has_dtype(torch.int64, "positions"),
        _are_vectors,
        _are_tables,
    ),
    at="product",
)
