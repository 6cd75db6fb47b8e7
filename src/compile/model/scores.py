"""Trace a part of a model alone, and derive from its graph how it computes scores: ``scale * q k' +
bias + mask``. Attention passes the scores to a softmax. An indexer passes them, through a relu and
a weighted sum of heads, to a topk.

Both are matched upwards, from the result to the matmul of queries and keys, by a table of the kinds
of nodes that may be in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from transformers import PreTrainedModel

from ..fx.nodes import calls

_LOWEST = -1e30  # lower scores hide a token
_CASTS = ("to", "float", "int", "long")
_SAME = ("view", "reshape", "to", "float", "contiguous", "type_as", "type")
_MATMULS = ("matmul", "bmm")
_ADDS = ("add", "iadd")
_MULTIPLICATIONS = ("mul", "imul")
_DIVISIONS = ("truediv", "itruediv", "div")


class Unreadable(Exception):
    """The part computes something else, which the message names."""


def run_few_tokens(module: PreTrainedModel, num_tokens: int) -> None:
    """A pass of the whole model.

    Raises:
        Unreadable: the pass fails.
    """
    ids = torch.arange(num_tokens, device=module.device).unsqueeze(0)
    try:
        with torch.no_grad():
            module(input_ids=ids, use_cache=False)
    except Exception as error:
        raise Unreadable(f"a pass of it fails ({type(error).__name__}: {error})") from error


def trace_part(
    part: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> GraphModule:
    """The graph of a call of the part, with symbols for sizes.

    Raises:
        Unreadable: Dynamo cannot trace it.
    """
    try:
        with torch.no_grad():
            export: Any = torch._dynamo.export(
                part, tracing_mode="symbolic", assume_static_by_default=False
            )
            gm: GraphModule = export(*args, **kwargs)[0]
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise Unreadable(f"does not trace ({type(error).__name__}: {reason})") from error
    return gm


def prune(gm: GraphModule) -> None:
    """Erase nodes that no result of the graph needs."""
    gm.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    gm.recompile()


def own_forward(gm: GraphModule) -> Callable[..., Any]:
    """As a plain function: a module that is set as an attribute of another becomes a part of it."""
    return lambda *args, **kwargs: gm(*args, **kwargs)


@dataclass(slots=True)
class Scores:
    """``scale * query key' + bias_scale * bias + mask``, found in a graph.

    Attributes:
        own_window: window of the module's own causal mask, 0 for all; None without such a mask.
    """

    query: Any = None
    key: Any = None
    scale: float = 1.0
    mask: Node | None = None
    bias: Node | None = None
    bias_scale: float = 1.0
    own_window: int | None = None


_Kind = Callable[[Node, Scores], Any]
"""For a node of this kind, the scores that it is computed from; the rest is recorded. None for any
other node."""


def _walk_up(node: Any, scores: Scores, kinds: Sequence[_Kind]) -> Any:
    """The first node upwards that is of none of the kinds."""
    while isinstance(node, Node):
        sources = (kind(node, scores) for kind in kinds)
        above = next((source for source in sources if source is not None), None)
        if above is None:
            break
        node = above
    return node


def _operands(node: Any, num: int, *names: str) -> tuple[Any, ...] | None:
    """The operands of a call of one of these names, if it has this number of operands and no
    keyword arguments."""
    is_plain = calls(node, *names) and len(node.args) == num and not node.kwargs
    return node.args if is_plain else None


def _pair(node: Any, *names: str) -> tuple[Any, ...] | None:
    return _operands(node, 2, *names)


def _cast(node: Node, _: Scores) -> Any:
    return node.args[0] if calls(node, *_CASTS) else None


def _same(node: Node, _: Scores) -> Any:
    return node.args[0] if calls(node, *_SAME) else None


def _added_mask(node: Node, scores: Scores) -> Any:
    pair = _pair(node, *_ADDS)
    if pair is None or scores.mask is not None or not _is_input(pair[1]):
        return None
    scores.mask = pair[1]
    return pair[0]


def _added_bias(node: Node, scores: Scores) -> Any:
    """An input of the module, or a part of one."""
    pair = _pair(node, *_ADDS)
    if pair is None or scores.bias is not None:
        return None
    source = pair[1]
    while calls(source, *_SAME, "getitem"):
        source = source.args[0]
    if not _is_input(source):
        return None
    scores.bias, scores.bias_scale = pair[1], scores.scale
    return pair[0]


def _filled_mask(node: Node, scores: Scores) -> Any:
    above, mask, value = _operands(node, 3, "masked_fill") or (None, None, None)
    if scores.mask is not None or not _is_input(mask) or not _hides(value):
        return None
    scores.mask = mask
    return above


def _own_mask(node: Node, scores: Scores) -> Any:
    """``where(mask, scores, lowest)`` or ``scores * mask + -1e4 * (1 - mask)``."""
    if scores.own_window is not None:
        return None
    chosen = _operands(node, 3, "where")
    if chosen is not None and node.op == "call_function":
        mask, above, value = chosen
        if not _hides(value.args[0] if calls(value, "tensor") else value):
            return None
    else:
        terms = _pair(node, *_ADDS) or (None, None)
        kept, hidden = (_pair(term, *_MULTIPLICATIONS) for term in terms)
        if kept is None or hidden is None or not isinstance(hidden[0], float):
            return None
        above, mask = kept
        # As transformers' first models write it: -1e4 hides a token unless scores are in the
        # thousands.
        if _pair(hidden[1], "sub") != (1, mask) or hidden[0] > -1e4:
            return None
    scores.own_window = _window_of(mask)
    return above


def _scaled(node: Node, scores: Scores) -> Any:
    product, ratio = _pair(node, *_MULTIPLICATIONS), _pair(node, *_DIVISIONS)
    above, factor = product or ratio or (None, None)
    if not isinstance(factor, (int, float)):
        return None
    scores.scale = scores.scale * factor if product else scores.scale / factor
    return above


def _clamped(node: Node, _: Scores) -> Any:
    above, lowest = _pair(node, "max") or (None, None)
    return above if calls(lowest, "full") and _hides(lowest.args[1]) else None


_ABOVE_SOFTMAX = (_same, _added_mask, _added_bias, _filled_mask, _own_mask, _scaled, _clamped)


def find_scores(softmax: Node) -> Scores:
    """The scores that are passed to a softmax.

    Raises:
        Unreadable: they are computed in another way.
    """
    scores = Scores()
    node = _walk_up(softmax.args[0], scores, _ABOVE_SOFTMAX)
    factors = _pair(node, *_MATMULS)
    if factors is None and calls(node, "baddbmm"):
        names = ("input", "batch1", "batch2")
        given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        is_added = not calls(given["input"], "zeros")
        if not is_added or scores.bias is None:
            factors = given["batch1"], given["batch2"]
        if is_added and scores.bias is None:
            scores.bias, scores.bias_scale = given["input"], scores.scale * given.get("beta", 1.0)
        scores.scale *= given.get("alpha", 1.0)
    if factors is None:
        raise Unreadable(f"its scores come from {_name(node)!r}")
    scores.query, scores.key = _cast_from(factors[0]), _untransposed(factors[1])
    return scores


def weights_from(softmax: Node) -> list[Node]:
    """The softmax, and nodes that contain its weights in another form."""
    found = [softmax]
    for node in found:
        for user in node.users:
            is_dropout = calls(user, "dropout") and not _training(user)
            if user.args[0] is node and (is_dropout or calls(user, *_SAME)):
                found.append(user)
    return found


def find_product(softmax: Node) -> Node:
    """The matmul of the weights and the values.

    Raises:
        Unreadable: there is none, or more than one.
    """
    weights = weights_from(softmax)
    users = [(node, user) for node in weights for user in node.users]
    found = [u for node, u in users if (pair := _pair(u, *_MATMULS)) and pair[0] is node]
    if len(found) != 1:
        raise Unreadable(f"its weights are multiplied {len(found)} times")
    return found[0]


class IndexScores(NamedTuple):
    """Found in a graph of one text.

    Attributes:
        query: ``[1, T, H, D]``. weights: ``[1, T, H]``.
        mask: an input of the graph, added to the scores.
        scale: factor on the dot products. num_chosen: number of positions to select by their
            scores.
    """

    query: Node
    weights: Node
    mask: Node
    scale: float
    num_chosen: int


def find_index_scores(gm: GraphModule, keys: Node) -> IndexScores:
    """The selection that is the graph's only result: ``topk(sum_h weights * relu(scale * q k') +
    mask)``.

    Args:
        keys: ``[1, any, D]``.

    Raises:
        Unreadable: it is computed in another way.
    """
    scores = Scores()
    results: Any = gm.graph.output_node().args[0]
    if len(results) != 1:
        raise Unreadable(f"has {len(results)} results")
    picked = _walk_up(results[0], scores, [_cast])
    topk, place = _pair(picked, "getitem") or (None, None)
    if not calls(topk, "topk") or place != 1:
        raise Unreadable(f"has a result of {_name(picked)!r}")
    num_chosen = _num_chosen(topk)
    masked = topk.args[0]
    weighed = _added_mask(masked, scores)
    if scores.mask is None:
        raise Unreadable(f"has a mask from {_name(masked)!r}")
    if calls(weighed, "squeeze") and weighed.args[1:] == (-2,):
        weighed = weighed.args[0]
    row, activated = _pair(weighed, *_MATMULS) or (None, None)
    if row is None:
        raise Unreadable(f"has scores from {_name(weighed)!r}")
    if not calls(row, "unsqueeze") or row.args[1] != -2:
        raise Unreadable(f"has weights from {_name(row)!r}")
    if not calls(activated, "relu"):
        raise Unreadable(f"applies {_name(activated)!r} to queries times keys, not relu")
    dots = _walk_up(activated.args[0], scores, [_scaled])
    query, columns = _pair(dots, *_MATMULS) or (None, None)
    if query is None:
        raise Unreadable(f"multiplies queries and keys by {_name(dots)!r}, not by a matmul")
    if not _are_columns(columns, keys):
        raise Unreadable("multiplies queries with something other than its keys")
    weights = row.args[0]
    shapes = [tuple(node.meta["example_value"].shape) for node in (query, weights, keys)]
    (_, num_tokens, num_heads, dim), of_weights, (*_, key_dim) = shapes
    if of_weights != (1, num_tokens, num_heads) or dim != key_dim:
        raise Unreadable(f"has shapes {shapes}")
    return IndexScores(query, weights, scores.mask, scores.scale, num_chosen)


def _num_chosen(topk: Node) -> int:
    names = ("input", "k", "dim", "largest", "sorted")
    given: dict[str, Any] = {**dict(zip(names, topk.args, strict=False)), **topk.kwargs}
    is_last = given.get("dim", -1) == -1 and given.get("largest", True)
    if not is_last or not isinstance(given["k"], int):
        raise Unreadable(f"has a choice of {given['k']} in another form")
    return int(given["k"])


def _are_columns(node: Any, keys: Node) -> bool:
    """Whether these are the keys as ``[1, 1, D, any]``."""
    steps = []
    while node is not keys:
        if calls(node, "transpose", "unsqueeze"):
            steps.append((_name(node), *node.args[1:]))
        elif not calls(node, *_CASTS):
            return False
        node = node.args[0]
    transposed = {("transpose", -1, -2), ("transpose", -2, -1)}
    return len(steps) == 2 and ("unsqueeze", 1) in steps and bool(transposed & {*steps})


def _training(dropout: Node) -> bool:
    given = (*dropout.args[2:3], dropout.kwargs.get("training"))
    return next((bool(value) for value in given if value is not None), True)


def _name(node: Any) -> str:
    target = getattr(node, "target", node)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _is_input(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "placeholder"


def _hides(value: Any) -> bool:
    return isinstance(value, float) and value <= _LOWEST


def _cast_from(node: Any) -> Any:
    """The source of a cast from the model's dtype to float32, which kernels do themselves."""
    return node.args[0] if calls(node, "to", "float") else node


def _window_of(mask: Any) -> int:
    """The window of a causal mask that is cut from a buffer ``[1, 1, P, P]``; 0 for all."""
    buffer: Any = None
    whole, slices = _pair(mask, "getitem") or (None, None)
    if isinstance(whole, Node) and whole.op == "get_attr" and _begins_at_0(slices):
        owner: Any = whole.graph.owning_module
        buffer = owner.get_buffer(whole.target)
    if buffer is None or buffer.dim() != 4 or buffer.shape[2] != buffer.shape[3]:
        raise Unreadable("its mask is not cut from a buffer of it")
    shown = buffer[0, 0].bool()
    hides_0 = (~shown[:, 0]).nonzero()
    window = int(hides_0[0]) if len(hides_0) else 0
    at = torch.arange(len(shown), device=shown.device)
    expected = at <= at[:, None]
    if window:
        expected &= at > at[:, None] - window
    if buffer.shape[:2] != (1, 1) or not torch.equal(shown, expected):
        raise Unreadable("its own mask is neither causal nor a causal window")
    return window


def _begins_at_0(slices: Any) -> bool:
    starts = [part.start for part in slices if isinstance(part, slice)]
    values = [x.meta.get("example_value") if isinstance(x, Node) else x for x in starts]
    return len(starts) == len(slices) and all(value is None or value == 0 for value in values)


def _untransposed(node: Any) -> Any:
    num_dims = node.meta["example_value"].dim() if "example_value" in node.meta else None
    is_last_two = calls(node, "transpose") and set(node.args[1:]) in (
        {-1, -2},
        {1, 2} if num_dims == 3 else {2, 3},
    )
    if is_last_two:
        return _cast_from(node.args[0])
    with node.graph.inserting_after(node):
        return node.graph.call_method("transpose", (node, -1, -2))
