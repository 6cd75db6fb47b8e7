"""Fuse norm, RoPE and KV store, from the q, k, v projections to the cache, into one call.

::

    q [1, Hq, T, D]  ── (norm) ── rotate ── squeeze, transpose ──► paged_attention
    k [1, Hkv, T, D] ── (norm) ── rotate ── squeeze, transpose ──► kv_store ▲ (same caches)
    v ─────────────────────────────────────────────────────────────┘

Results and caches are unchanged bit for bit on a CPU.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from ...kernels.arguments import AttentionParams, PagedKV, RopeInputs
from ...kernels.fused import dispatch as fused
from ..fx.nodes import calls_op, dtype_of, example, last_size, tensor_of
from ..fx.pass_context import PassContext
from ..fx.rules import (
    Guard,
    Match,
    Named,
    Pattern,
    ReadBy,
    Rest,
    Rule,
    Slice,
    Value,
    Where,
    call,
    one_of,
    op,
    shared,
    values,
)
from .fuse_norm import norm_form, rms_norm


def _rotated(source: Pattern, p: str) -> Pattern:
    """All R elements of ``source [1, H, T, R]`` rotated, in one of two spellings::

    x * cos + cat((-x[..., R/2:], x[..., :R/2])) * sin                     cos [.., R]
    cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin)), x1, x2 the halves      cos [.., R / 2]
    """
    x, cos, sin = p + "turned", *(shared("unsqueeze", args=(Value(t), 1)) for t in ("cos", "sin"))
    first, second = p + "first", p + "second"
    swapped = [shared("neg", args=(Slice(Value(x), second),)), Slice(Value(x), first)]
    straight = shared("mul", args=(Named(x, source), cos))
    crossed = shared(
        "mul", args=(shared("cat", args=(swapped,), name=p + "swapped", dim=(-1,)), sin)
    )
    by_negation = shared("add", args=(straight, crossed))

    def times(half: Pattern, table: Pattern) -> Pattern:
        return shared("mul", args=(half, table))

    x1, x2 = Slice(Named(x, source), first), Slice(Value(x), second)
    left = shared("sub", args=(times(x1, cos), times(x2, sin)))
    right = shared("add", args=(times(Value(second), cos), times(Value(first), sin)))
    of_halves = shared("cat", args=([left, right],), dim=(-1,))
    return Where(one_of(by_negation, of_halves), _is_rotation(p))


def _is_rotation(p: str) -> Guard:
    """Whether the halves are halves, and cos and sin ``[1, T, width of table]`` are the same for
    all heads."""

    def holds(m: Match) -> bool:
        x, cos, sin = m[p + "turned"], m["cos"], m["sin"]
        heads = tensor_of(x)
        if heads is None or heads.dim() != 4:
            return False
        one, *_, width = heads.shape
        if str(one) != "1" or not isinstance(width, int) or not width or width % 2:
            return False
        ranges = [m[f"{p}{half}_range"] for half in ("first", "second")]
        if ranges != [(0, width // 2), (width // 2, width)]:
            return False
        table_width = width if m.get(p + "swapped") else width // 2
        for table in map(tensor_of, (cos, sin)):
            if table is None or table.dim() != 3 or table.dtype != heads.dtype:
                return False
            one, _, size = table.shape
            if str(one) != "1" or size != table_width:
                return False
        return True

    return holds


def _is_beginning(p: str) -> Guard:
    def holds(m: Match) -> bool:
        whole, width = m[p + "whole"], last_size(m[p + "turned"])
        parts = [m[f"{p}{part}_range"] for part in ("begun", "rest")]
        return parts == [(0, width), (width, last_size(whole))]

    return holds


def _heads(p: str) -> Pattern:
    """An operand of attention ``[T, H, D]`` from its projection ``source`` on: ``[1, T, H, D]`` if
    it is transposed, else ``[1, H, T, D]``. All of D or its first elements are rotated."""

    def of_tokens(inner: Pattern) -> Pattern:
        name = p + "transposed"
        return one_of(*(shared("transpose", args=(inner, *d), name=name) for d in ((1, 2), (2, 1))))

    source = Value(p + "source")
    normed = one_of(
        of_tokens(rms_norm(source, p)), rms_norm(of_tokens(source), p), rms_norm(source, p)
    )
    projected = one_of(normed, of_tokens(source), source)
    begun = Slice(Named(p + "whole", projected), p + "begun")
    rest = Slice(Value(p + "whole"), p + "rest")
    partly = Where(shared("cat", args=([_rotated(begun, p), rest],), dim=(-1,)), _is_beginning(p))
    rotated = one_of(_rotated(projected, p), partly)
    return shared("transpose", args=(shared("squeeze", args=(rotated, 0)), 0, 1))


def _is_one_call(m: Match) -> bool:
    """Whether one call can serve queries and keys, at the store, before the first attention over
    it."""
    store, attention = m.root, m["attention"]
    readers = [node for node in m["k_cache"].users if calls_op(node, "paged_attention")]
    own = [node for node in readers if node.args[1:3] == attention.args[1:3]]
    if not store < attention or any(node < attention for node in own):
        return False
    sources = [m[name] for name in ("q_source", "k_source", "value", "cos", "sin")]
    if any(store < node for node in sources):
        return False
    (q, q_whole), (k, k_whole) = (
        (m[p + "turned"], m.get(p + "whole") or m[p + "turned"]) for p in ("q_", "k_")
    )
    if dtype_of(q) != dtype_of(k) or last_size(q) != last_size(k):
        return False
    if last_size(q_whole) != last_size(k_whole):
        return False
    norms = [(m.get(p + "eps"), norm_form(m, p)) for p in ("q_", "k_")]
    return norms[0] == norms[1]


def _rope_store(m: Match) -> dict[Node, Node]:
    sources: list[Any] = []
    for p in ("q_", "k_"):
        view = m.graph.call_method("squeeze", (m[p + "source"], 0))
        if not m.get(p + "transposed"):
            view = m.graph.call_method("transpose", (view, 0, 1))
        sources.append(view)
    weights = m.get("q_weight"), m.get("k_weight")
    kind = (m["k_eps"], norm_form(m, "k_")) if m.get("k_weight") else (0.0, "rounded")
    sources += [m["value"], m["cos"], m["sin"], last_size(m["k_turned"]), *weights, *kind]
    inputs: Any = RopeInputs(*sources)
    caches = m["k_cache"], m["v_cache"], m["slots"]
    call = m.call(fused.norm_rope_store, inputs, *caches)
    call.meta["example_value"] = example(m["attention"].args[0])
    m["attention"].update_arg(0, call)
    return {}


_ATTENTION = call(
    *op("paged_attention"),
    args=(_heads("q_"), *values("k_cache", "v_cache"), Rest()),
    name="attention",
    is_shared=True,
)
fuse_rope_store = Rule(
    call(
        *op("kv_store"),
        args=(
            _heads("k_"),
            Value("value"),
            ReadBy(Value("k_cache"), _ATTENTION),
            *values("v_cache", "slots"),
        ),
    ),
    _rope_store,
    guards=(_is_one_call,),
)


def fuse_rope_attention(gm: GraphModule, context: PassContext) -> int:
    """Fuse ``norm_rope_store`` and the attention after it, if the backend has such a call; returns
    the number of attention calls fused. The backend guarantees unchanged results and caches."""
    function = None if context.attention is None else context.attention.fused_rope_attention
    if function is None:
        return 0
    caches = values("k_cache", "v_cache")
    rope = call(fused.norm_rope_store, args=(Value("inputs"), *caches, Value("slots")), name="rope")

    def is_free(m: Match) -> bool:
        """The written values are first read by this attention: they are now written later."""
        params: Any = m.root.args[7:]
        if AttentionParams(*params).indices is not None:  # served by another kernel
            return False
        users = (*m["k_cache"].users, *m["v_cache"].users)
        return not any(m["rope"] < user < m.root for user in users)

    def replacement(m: Match) -> Node:
        args: Any = m.root.args
        kv, params = PagedKV(*args[1:7]), AttentionParams(*args[7:])
        return m.call(function, m["inputs"], m["slots"], kv, params)

    return Rule(
        call(*op("paged_attention"), args=(rope, *caches, Rest())), replacement, guards=(is_free,)
    )(gm, context)
