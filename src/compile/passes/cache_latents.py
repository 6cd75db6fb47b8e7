"""Cache a token's latent vector instead of every head's key and value, if attention is multi-head
latent attention (DeepSeek-V2, 2024).

With H heads, a latent of R elements and a rotated key of P elements, which heads share::

    latent [1, 1, T, R] ─ linear(W) ─ view [1, T, H, N + V] ─ transpose ─ split ─► k' [1, H, T, N]
                                                                             └───► v [1, H, T, V]
    rope [1, 1, T, P] ─ expand ─► [1, H, T, P];   key = [k', expanded rope], value = v
    kv_store(key, value, ..);   out = paged_attention(query [T, H, N + P], ..)

is rewritten to, with W_k ``[H, N, R]`` and W_v ``[H, R, V]`` views of W
(:mod:`...kernels.mla.dispatch`)::

    store_latent(latent, rope, cache);   q = latent_query(query, W_k)
    out = head_values(attention(q, cache), W_v)

The attention must be plain (no window, chunk, softcap, sinks, slopes), of one dtype, and the only
one over its caches. A graph that differs anywhere stays as it is. An indexer may select the tokens
that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...kernels.arguments import AttentionParams, LatentKV
from ...kernels.mla import dispatch as mla
from ..fx.fake_tensors import fake_of
from ..fx.nodes import (
    LINEAR,
    calls,
    dtype_of,
    erase_unused,
    example,
    last_dim_slice,
    last_size,
    only_user,
    shape_of,
    tensor_of,
    written_nodes,
)
from ..fx.pass_context import PassContext
from ..fx.rules import (
    MISSING,
    NOTHING,
    Bound,
    Match,
    Named,
    Pattern,
    ReadBy,
    Rest,
    Slice,
    Value,
    call,
    one_of,
    op,
    shared,
    values,
)
from ..weights import is_stand_in

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Joined(Pattern):
    """Two values concatenated in the last dimension: a ``cat``, or a ``new_empty`` with copies into
    two slices."""

    left: Pattern
    right: Pattern

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        nodes: list[Node] = [value]
        parts = _joined(value, nodes)
        if parts is not None:
            for found in self.left.match(parts[0], bound.with_nodes(*nodes)):
                yield from self.right.match(parts[1], found)


def _joined(key: Node, nodes: list[Node]) -> tuple[Node, Node] | None:
    """The two tensors that are concatenated in the last dimension of ``key``."""
    if calls(key, "cat"):
        (parts, *rest), dims = key.args, key.kwargs
        if (rest, dims) not in (([], {"dim": -1}), ([-1], {}), ([], {"dim": 3}), ([3], {})):
            return None
        return tuple(parts) if len(parts) == 2 else None
    if not calls(key, "new_empty"):
        return None
    slices: dict[int, tuple[int, Node]] = {}
    readers = 0
    for user in key.users:
        cut = last_dim_slice(user)
        if cut is None:
            # Only one reader, which comes after all copies.
            readers += 1
            continue
        copy = only_user(user)
        if not calls(copy, "copy_") or copy.users or copy.kwargs or len(copy.args) != 2:
            return None
        if copy.args[0] is not user or shape_of(copy.args[1]) != shape_of(user):
            return None
        slices[cut[1]] = (cut[2], copy.args[1])
        nodes += [user, copy]
    if readers != 1 or len(slices) != 2:
        return None
    last: Node = next(node for node in key.users if last_dim_slice(node) is None)
    if any(last < node for node in nodes if calls(node, "copy_")):
        return None
    (first, (middle, left)), (second, (end, right)) = sorted(
        slices.items(), key=lambda item: item[0]
    )
    is_whole = first == 0 and middle == second and end == last_size(key)
    return (left, right) if is_whole else None


def _heads(source: Pattern) -> Pattern:
    """``[T, H, D]`` from ``[1, H, T, D]``."""
    return shared("transpose", args=(shared("squeeze", args=(source, 0)), 0, 1))


_LINEAR = shared(*LINEAR, args=values("latent", "weight"), bias=(MISSING, None))
_VIEW = shared("view", "reshape", args=(_LINEAR, Rest()), name="view")
_MADE = one_of(*(shared("transpose", args=(_VIEW, *dims)) for dims in ((1, 2), (2, 1))))
_ROPE = shared("expand", args=(Value("rope"), Rest()), name="expanded")
_KEY = _heads(_Joined(Slice(Named("made", _MADE), "k"), _ROPE))
_VALUE = _heads(Slice(Value("made"), "v"))
_STORE = shared(
    *op("kv_store"), args=(_KEY, _VALUE, *values("k_cache", "v_cache", "slots")), name="store"
)
_ATTENTION = call(
    *op("paged_attention"),
    args=(Value("query"), ReadBy(Value("k_cache"), _STORE), Value("v_cache"), Rest()),
)


def cache_latents(gm: GraphModule, context: PassContext) -> int:
    """Rewrite the graph, and the specs of its calls in the context; returns the number of calls.

    Tokens stay those of the model, but bits do not: sums have another order.
    """
    if not context.caches_latents:
        return 0
    graph, count = gm.graph, 0
    written = written_nodes(graph)
    for node in list(graph.nodes):
        for bound in _ATTENTION.match(node, NOTHING):
            # Not a rule: the matched copies themselves write ``new_empty`` in place.
            match = Match(graph, context, written, node, *bound)
            if _is_latent(match) and _is_served(match):
                _replace(match)
                count += 1
                break
    return count


def _is_latent(m: Match) -> bool:
    """Whether these keys and values are exactly the linear layer's results for the latents, and a
    rotated key that heads share."""
    tensor, width = m.context.constant(m["weight"]), last_size(m["made"])
    if tensor is None or tensor.dim() != 2 or not tensor.is_contiguous() or width is None:
        return False
    # A weight in another format has no rows with which queries could be multiplied.
    if is_stand_in(tensor) or m.context.weight_format(tensor) is not None:
        return False
    (k_begin, middle), (v_begin, end) = (_range(m[part]) for part in ("k", "v"))
    if (k_begin, v_begin, end) != (0, middle, width):
        return False
    one, num_heads, num_tokens, _ = shape_of(m["made"]) or ("",) * 4
    latent, rope, expanded = (shape_of(m[name]) or () for name in ("latent", "rope", "expanded"))
    if one != "1" or not num_heads.isdigit() or int(num_heads) * width != tensor.shape[0]:
        return False
    if (shape_of(m["view"]) or ())[1:3] != (num_tokens, num_heads):
        return False
    if latent[-2:] != (num_tokens, str(tensor.shape[1])) or {*latent[:-2]} != {"1"}:
        return False
    is_rope = len(rope) == 4 and rope[:3] == ("1", "1", num_tokens) and rope[3].isdigit()
    return is_rope and expanded == ("1", num_heads, *rope[2:])


def _range(part: Node) -> tuple[int, int]:
    cut = last_dim_slice(part)
    assert cut is not None  # it was matched
    return cut[1:]


def _is_served(m: Match) -> bool:
    """Whether the attention is plain and the only one over its caches, and the latents have fewer
    elements."""
    attention, store, call = m.root, m["store"], m.context.calls.get(m["k_cache"].name)
    users = {attention, store}
    if call is None or {*m["k_cache"].users} != users or {*m["v_cache"].users} != users:
        return False
    spec, params = m.context.specs[call], AttentionParams(*_args(attention)[7:])
    masks = spec.window or spec.chunk or spec.softcap or spec.has_sinks or spec.alibi_slopes
    if masks or params._replace(indices=None) != AttentionParams(params.scale):
        return False
    num_heads, nope_dim = _sizes(m["made"])[1], _range(m["k"])[1]
    rank, rope_dim = (_sizes(m[name])[-1] for name in ("latent", "rope"))
    expected = num_heads, num_heads, nope_dim + rope_dim, _sizes(m["made"])[-1] - nope_dim
    if (spec.num_q_heads, spec.num_kv_heads, spec.k_dim, spec.v_dim) != expected:
        return False
    dtypes = {dtype_of(m[name]) for name in ("query", "latent", "rope", "weight")}
    if len(dtypes) != 1 or not dtypes <= {*_DTYPES} or attention < store:
        return False
    if not m.written.isdisjoint({m["latent"], m["rope"], m["query"]}):
        return False
    device = _fake(m["query"]).device
    return rank + rope_dim < spec.num_kv_elements and mla.is_served(rank, rope_dim, device)


def _fake(node: object) -> Tensor:
    tensor = tensor_of(node)
    assert tensor is not None  # its shape was checked
    return tensor


def _sizes(node: object) -> Any:
    return _fake(node).shape


def _args(node: Node) -> Any:
    return node.args


def _replace(m: Match) -> None:
    graph, context, attention = m.graph, m.context, m.root
    query, k_cache, v_cache, *batch = _args(attention)[:7]
    rank, rope_dim = (_sizes(m[name])[-1] for name in ("latent", "rope"))
    to_latent, to_values = _weights(m)
    with graph.inserting_before(m["store"]):
        m.call(mla.store_latent, m["latent"], m["rope"], k_cache, m["slots"])
    with graph.inserting_before(attention):
        absorbed = m.call(mla.latent_query, query, to_latent)
        kv: Any = LatentKV(k_cache, *batch)
        params = AttentionParams(*_args(attention)[7:])
        mixed = m.call(mla.attention, absorbed, kv, params.scale, rank, params.indices)
        out = m.call(mla.head_values, mixed, to_values)
    num_tokens, num_heads, _ = _sizes(query)
    for node, width in ((absorbed, rank + rope_dim), (mixed, rank)):
        node.meta["example_value"] = _fake(query).new_empty((num_tokens, num_heads, width))
    out.meta["example_value"] = example(attention)
    num_blocks, page = _sizes(k_cache)[:2]
    k_cache.meta["example_value"] = _fake(k_cache).new_empty((num_blocks, page, 1, rank + rope_dim))
    attention.replace_all_uses_with(out)
    graph.erase_node(attention)
    graph.erase_node(m["store"])
    erase_unused(graph, (*m.nodes, v_cache))
    if not m["weight"].users:
        context.constants.pop(m["weight"].name)
        graph.erase_node(m["weight"])
    call = context.calls[k_cache.name]
    context.specs[call] = replace(
        context.specs[call], num_kv_heads=1, k_dim=rank + rope_dim, v_dim=rank, is_latent=True
    )


def _weights(m: Match) -> list[Node]:
    """Placeholders for W_k ``[H, N, R]`` and W_v ``[H, R, V]``, which are views of W."""
    name, nope_dim = m["weight"].name, _range(m["k"])[1]
    # Normal tensors even if a capture runs in inference mode, because the parameter may be trained.
    with torch.inference_mode(False):
        whole = m.context.constants[name].detach()
        per_head = whole.view(_sizes(m["made"])[1], -1, whole.shape[1])
        views = {
            f"latent_query_{name}": per_head[:, :nope_dim],
            f"head_values_{name}": per_head[:, nope_dim:].transpose(1, 2),
        }
    made = []
    for view_name, view in views.items():
        with m.graph.inserting_before(m["weight"]):
            node = m.graph.placeholder(view_name)
        node.meta["example_value"] = fake_of(view, _fake(m["weight"]))
        m.context.constants[node.name] = view
        made.append(node)
    return made
