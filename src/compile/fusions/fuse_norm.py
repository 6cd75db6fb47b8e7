"""Replace RMSNorm by one call, including the addition of the residual before it, if there is one.

Results are unchanged bit for bit on a CPU. ``fuse_rope_store`` has already matched the norms of
queries and keys.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ...kernels.fused import dispatch as fused
from ..fx.nodes import dtype_of, last_size, shape_of
from ..fx.pass_context import PassContext
from ..fx.rules import (
    Cast,
    Guard,
    Match,
    Named,
    Pattern,
    Rule,
    Value,
    Where,
    call,
    one_of,
    product,
    same_dtype,
    same_shape,
    values,
)


def rms_norm(source: Pattern, p: str = "") -> Pattern:
    """RMSNorm over the last dimension, as written in Hugging Face's models.

    ::

        x32 = x.to(float32)
        y = x32 * rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        rounded:  weight * y.to(dtype)
        wide:     (weight * y).to(dtype)
        plus_one: (y * (1.0 + weight.float())).to(dtype)

    Binds ``x``, which ``source`` matches, ``weight``, ``eps`` and ``normed``, with the prefix
    ``p``.
    """
    square = call("pow", args=(Value(p + "wide"), 2), is_shared=True)
    mean = call("mean", args=(square,), is_shared=True, dim=(-1,), keepdim=(True,))
    root = call("rsqrt", args=(call("add", args=(mean, Value(p + "eps")), is_shared=True),))
    x = Named(p + "x", source)
    x32 = one_of(Cast(x, p + "wide", is_shared=True), Named(p + "wide", x))
    normed, weight = product(root, x32), Value(p + "weight")
    wide_weight = one_of(Cast(weight, is_shared=True), weight)
    plus_one = call("add", args=(one_of(1.0, 1), wide_weight), name=p + "plus_one", is_shared=True)
    rounded = product(Cast(normed, p + "rounded"), weight, is_shared=True)
    narrow, wide = (
        one_of(*(product(normed, factor, is_shared=last) for factor in (plus_one, weight)))
        for last in (False, True)
    )
    spelled = one_of(rounded, Cast(narrow, is_shared=True), wide)
    return Where(Named(p + "normed", spelled), _is_rms_norm(p))


def _is_rms_norm(p: str) -> Guard:
    def holds(m: Match) -> bool:
        x, weight, result = m[p + "x"], m[p + "weight"], m[p + "normed"]
        dtypes = {dtype_of(node) for node in (x, weight, result, m.get(p + "rounded") or x)}
        is_input = isinstance(weight, Node) and weight.op == "placeholder"
        is_vector = is_input and shape_of(weight) == (str(last_size(x)),)
        is_wide = dtype_of(m[p + "wide"]) == torch.float32
        return len(dtypes) == 1 and is_vector and is_wide and isinstance(m[p + "eps"], float)

    return holds


def norm_form(m: Match, p: str = "") -> fused.NormForm:
    """The form of a norm that :func:`rms_norm` has matched."""
    return "plus_one" if m.get(p + "plus_one") else "rounded" if m.get(p + "rounded") else "wide"


def _add_rms_norm(m: Match) -> dict[Node, Node]:
    norm = m.call(
        fused.add_rms_norm, m["added"], m["residual"], m["weight"], m["eps"], norm_form(m)
    )
    return m.results(norm, m.root, m["sum"])


_SUM = call("add", args=values("residual", "added"), name="sum", is_shared=True)
_ADD_RMS_NORM = Rule(
    rms_norm(_SUM),
    _add_rms_norm,
    guards=(
        same_shape("residual", "sum"),
        same_shape("added", "sum"),
        same_dtype("residual", "sum"),
        same_dtype("added", "sum"),
        lambda m: m["sum"].op == "call_function",
    ),
    # The weight is a placeholder, so all inputs exist where the sum is.
    at="sum",
)
_RMS_NORM = Rule(
    rms_norm(Value("x")),
    lambda m: m.call(fused.rms_norm, m["x"], m["weight"], m["eps"], norm_form(m)),
)


def fuse_norm(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of norms replaced."""
    return _ADD_RMS_NORM(gm, context) + _RMS_NORM(gm, context)
