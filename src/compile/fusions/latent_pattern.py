"""Recognises the keys and values of multi-head latent attention (DeepSeek-V2, 2024) in a graph.

With H heads, a latent of R elements and a rotated key of P, which heads share::

    latent [1, 1, T, R] ─ linear(W) ─ view [1, T, H, N + V] ─ transpose ─ split ─► k' [1, H, T, N]
                                                                             └───► v [1, H, T, V]
    rope [1, 1, T, P] ─ expand ─► [1, H, T, P];   key = [k', expanded rope], value = v

The key is a ``cat``, or a ``new_empty`` with two slices that are copied into. Every step is
checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..fx.nodes import (
    calls,
    is_linear,
    last_dim_slice,
    last_size,
    linear_operands,
    only_user,
    positions,
    shape_of,
)
from ..fx.pass_context import PassContext
from ..fx.stand_in import is_stand_in


@dataclass(frozen=True, slots=True)
class Latents:
    """The keys and values of one call.

    Attributes:
        latent: ``[1, 1, T, R]`` or ``[1, T, R]``. rope: ``[1, 1, T, P]``.
        weight: the placeholder of W, ``[H * (N + V), R]``.
        num_heads, nope_dim, v_dim: H, N, V.
        nodes: what lies between those and the store.
    """

    latent: Node
    rope: Node
    weight: Node
    num_heads: int
    nope_dim: int
    v_dim: int
    nodes: tuple[Node, ...]


def find_latents(key: Any, value: Any, context: PassContext) -> Latents | None:
    """Follow ``key`` and ``value [T, H, D]`` back to what they are made of."""
    nodes: list[Node] = []
    heads = [head_major(node, nodes) for node in (key, value)]
    if heads[0] is None or heads[1] is None:
        return None
    parts = _joined(heads[0], nodes)
    value_part = part_of(heads[1], nodes)
    if parts is None or value_part is None:
        return None
    nope_part = part_of(parts[0], nodes)
    if nope_part is None or nope_part[0] is not value_part[0]:
        return None
    made, begin, nope_dim = nope_part
    width = last_size(made)
    if begin != 0 or value_part[1:] != (nope_dim, width) or width is None:
        return None
    rope = _expanded(parts[1], nodes)
    found = _projected(made, nodes, context)
    if rope is None or found is None:
        return None
    latent, weight, num_heads = found
    num_tokens = str(_shape(latent)[-2])
    if _shape(rope)[2] != num_tokens or _shape(parts[1])[1] != str(num_heads):
        return None
    nodes += [heads[0], heads[1], key, value]
    return Latents(latent, rope, weight, num_heads, nope_dim, width - nope_dim, tuple(nodes))


def head_major(node: object, nodes: list[Node]) -> Node | None:
    """``[1, H, T, D]`` of ``[T, H, D]``."""
    if not calls(node, "transpose") or node.args[1:] != (0, 1):
        return None
    squeezed = node.args[0]
    if not calls(squeezed, "squeeze") or squeezed.args[1:] != (0,):
        return None
    nodes += [node, squeezed]
    source: Node = squeezed.args[0]
    return source if len(_shape(source)) == 4 and _shape(source)[0] == "1" else None


def _joined(key: Node, nodes: list[Node]) -> tuple[Node, Node] | None:
    """The two tensors that lie side by side in the last dimension of ``key``."""
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
            # Only one reader, which comes behind all copies.
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
    order = positions(key.graph)
    if any(order[node] > order[last] for node in nodes if calls(node, "copy_")):
        return None
    (first, (middle, left)), (second, (end, right)) = sorted(
        slices.items(), key=lambda item: item[0]
    )
    is_whole = first == 0 and middle == second and end == last_size(key)
    return (left, right) if is_whole else None


def part_of(node: Node, nodes: list[Node]) -> tuple[Node, int, int] | None:
    """(source, begin, end) of a part of ``source`` in its last dimension."""
    nodes.append(node)
    if calls(node, "getitem") and calls(node.args[0], "split"):
        nodes.append(node.args[0])
    return last_dim_slice(node)


def _expanded(node: Node, nodes: list[Node]) -> Node | None:
    """What ``node [1, H, T, P]`` repeats for each head: ``[1, 1, T, P]``."""
    if not calls(node, "expand"):
        return None
    source = node.args[0]
    after, before = _shape(node), _shape(source)
    if len(after) != 4 or before != (after[0], "1", *after[2:]) or after[0] != "1":
        return None
    nodes.append(node)
    return source if last_size(source) is not None else None


def _projected(
    made: Node, nodes: list[Node], context: PassContext
) -> tuple[Node, Node, int] | None:
    """(latent, weight, H) of ``made [1, H, T, N + V]``, if a linear layer makes it."""
    if not calls(made, "transpose") or made.args[1:] not in ((1, 2), (2, 1)):
        return None
    view = made.args[0]
    if not calls(view, "view", "reshape") or not is_linear(view.args[0]):
        return None
    linear: Node = view.args[0]
    latent, weight, bias = linear_operands(linear)
    tensor = context.constant(weight)
    if bias is not None or tensor is None or tensor.dim() != 2 or not tensor.is_contiguous():
        return None
    # A weight in another format has no rows to multiply queries with.
    if is_stand_in(tensor) or context.weight_format(tensor) is not None:
        return None
    one, num_heads, num_tokens, width = _shape(made)
    shape = _shape(latent)
    if shape[-2:] != (num_tokens, str(tensor.shape[1])) or set(shape[:-2]) != {"1"} or one != "1":
        return None
    if not (num_heads.isdigit() and width.isdigit()):
        return None
    if int(num_heads) * int(width) != tensor.shape[0] or _shape(view)[1:3] != (
        num_tokens,
        num_heads,
    ):
        return None
    nodes += [made, view, linear]
    return latent, weight, int(num_heads)


def _shape(node: object) -> tuple[str, ...]:
    return shape_of(node) or ()
