"""Fuse norm and RoPE of latent attention into the calls that store latents and absorb queries.

The input is the result of ``cache_latents``, with adjacent elements rotated as in
``write_as_real``::

    latent [1, T, R] ── RMSNorm ──┐
    rope [1, 1, T, P] ── rotate ──┴► store_latent       becomes norm_rope_store_latent
    query [1, H, T, N + P]: [N, rotated P] ► latent_query    becomes rope_latent_query

A model that rotates in halves keeps its calls. On a CPU bits are unchanged. On a GPU they are those
of eager torch; Inductor may contract multiplications and additions of the rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...kernels.arguments import LatentInputs
from ...kernels.mla import dispatch as mla
from ..fx.nodes import dtype_of, last_dim_slice, last_size, shape_of
from ..fx.pass_context import PassContext
from ..fx.rules import (
    Cast,
    Match,
    Named,
    Pattern,
    Rest,
    Rule,
    Slice,
    Value,
    Where,
    call,
    one_of,
    shared,
    values,
)
from .fuse_norm import norm_form, rms_norm


def _maybe_cast(source: Pattern) -> Pattern:
    return one_of(Cast(source, is_shared=True), source)


def _rotated(source: Pattern) -> Pattern:
    """``source [1, H, T, P]`` with adjacent elements rotated, by ``cos`` and ``sin [1, T, P /
    2]``."""
    wide = _maybe_cast(Named("turned", source))
    pairs = shared("reshape", "view", args=(wide, Rest()), name="pairs")
    a = shared("getitem", args=(pairs, (Ellipsis, 0)), name="a")
    b = shared("getitem", args=(Value("pairs"), (Ellipsis, 1)), name="b")
    cos, sin = (shared("unsqueeze", args=(Value(t), 1), name=t + "4") for t in ("cos", "sin"))

    def times(half: Pattern, table: Pattern) -> Pattern:
        return shared("mul", args=(half, table))

    real = shared("sub", args=(times(a, cos), times(b, sin)), name="real")
    crossed = times(Value("a"), Value("sin4")), times(Value("b"), Value("cos4"))
    stack = shared("stack", args=([real, shared("add", args=crossed)], -1))
    flat = one_of(*(shared("flatten", args=(stack, dim)) for dim in (3, -2)))
    return Where(Named("rotated", _maybe_cast(flat)), _is_rotation)


def _is_rotation(m: Match) -> bool:
    source, pairs = m["turned"], m["pairs"]
    shape, width = shape_of(source), last_size(source)
    if shape is None or width is None or len(shape) != 4 or shape[0] != "1":
        return False
    if shape != shape_of(m["rotated"]) or dtype_of(source) != dtype_of(m["rotated"]):
        return False
    if shape_of(pairs) != (*shape[:-1], str(width // 2), "2"):
        return False
    wide = {dtype_of(m[name]) for name in ("pairs", "real", "cos", "sin")}
    table = ("1", shape[2], str(width // 2))
    return wide == {torch.float32} and shape_of(m["cos"]) == shape_of(m["sin"]) == table


_NORM = rms_norm(Value("x"))
_VIEW = one_of(shared("view", "reshape", args=(_NORM, Rest())), _NORM)


def _store(m: Match) -> dict[Node, Node]:
    rotated = m["turned"], m["cos"], m["sin"]
    inputs: Any = LatentInputs(m["x"], *rotated, m["weight"], m["eps"], norm_form(m))
    m.call(mla.norm_rope_store_latent, inputs, m["cache"], m["slots"])
    return {}


_STORE = Rule(
    call(
        mla.store_latent,
        args=(Named("latent", _VIEW), _rotated(Value("source")), *values("cache", "slots")),
    ),
    _store,
    guards=(lambda m: last_size(m["latent"]) == last_size(m["normed"]),),
)
_JOINED = shared(
    "cat",
    args=([Slice(Value("whole"), "left"), _rotated(Slice(Value("whole"), "right"))],),
    dim=(-1,),
)
_QUERY = shared("transpose", args=(shared("squeeze", args=(_JOINED, 0)), 0, 1))


def _is_whole(m: Match) -> bool:
    (begin, middle), right = (last_dim_slice(m[part])[1:] for part in ("left", "right"))  # type: ignore
    return begin == 0 and right == (middle, last_size(m["whole"]))


def _absorb(m: Match) -> Node:
    heads = m.graph.call_method("squeeze", (m["whole"], 0))
    heads = m.graph.call_method("transpose", (heads, 0, 1))
    return m.call(mla.rope_latent_query, heads, m["cos"], m["sin"], m["absorbing"])


_ABSORB = Rule(
    call(mla.latent_query, args=(_QUERY, Value("absorbing"))), _absorb, guards=(_is_whole,)
)


def fuse_rope_latent(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of calls."""
    return _STORE(gm, context) + _ABSORB(gm, context)
