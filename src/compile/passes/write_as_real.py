"""Write complex numbers as pairs of real ones, where a rotary embedding is written with them.

::

    z = view_as_complex(x.reshape(.., -1, 2))   a, b = x[..., 0], x[..., 1]
    t = polar(ones, angle)                      c, s = cos(angle), sin(angle)
    z * t                                       a * c - b * s, a * s + b * c
    view_as_real(..)                            stack(.., -1)

Inductor generates no code for complex numbers, and no rule matches them. Here each multiplication
and addition is rounded separately. torch's own CPU kernel contracts them in the elements that do
not fill its vectors: for one head of 8 elements, in the last row if the number of rows is odd.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..fx.nodes import calls, dtype_of, erase_unused, shape_of, tensor_of, written_nodes
from ..fx.pass_context import PassContext
from ..fx.recorder import Recorder, recording

# These move complex numbers without changing them, with arguments that are valid for each part of
# the pairs.
_MOVES = frozenset({"unsqueeze", "squeeze", "expand", "transpose", "permute", "reshape", "getitem"})


class _Pair(NamedTuple):
    real: Node
    imag: Node


def write_as_real(gm: GraphModule, _context: PassContext) -> int:
    """Rewrite; returns the number of calls with complex results that were removed.

    Values equal those of torch up to contracted multiplications and the signs of zeros. Complex
    numbers stay if a call that is not listed above creates or reads any of them.
    """
    graph = gm.graph
    nodes = _rewritable(graph)
    if not nodes:
        return 0
    pairs: dict[Node, _Pair] = {}
    with recording(graph) as results:
        for node in nodes:
            _Writer(graph, node, results).write(pairs)
    for node in reversed(nodes):
        sources = [node, *(n for n in node.all_input_nodes if calls(n, "ones_like"))]
        erase_unused(graph, (*node.users, *sources))
    return len(nodes)


def _rewritable(graph: Graph) -> list[Node]:
    """The complex nodes, in order, that known calls create, move, multiply and read, and for which
    this also holds for all their sources and users."""
    nodes = [node for node in graph.nodes if _is_complex(node)]
    written = written_nodes(graph) if nodes else set()
    kept = {
        node
        for node in nodes
        if _is_known(node) and written.isdisjoint({node, *node.all_input_nodes})
    }
    while True:
        lost = {node for node in kept if not _is_closed(node, kept, written)}
        if not lost:
            return [node for node in nodes if node in kept]
        kept -= lost


def _is_complex(node: object) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_complex


def _is_closed(node: Node, kept: set[Node], written: set[Node]) -> bool:
    if any(_is_complex(source) and source not in kept for source in node.all_input_nodes):
        return False
    return all(
        user in kept or (_part_read(user) is not None and user not in written)
        for user in node.users
    )


def _part_read(user: Node) -> str | None:
    """The parts of its complex argument that ``user`` reads: "both" as a pair, "real" or "imag"."""
    if calls(user, "getattr"):
        return str(user.args[1]) if user.args[1] in ("real", "imag") else None
    names = {"view_as_real": "both", "real": "real", "imag": "imag"}
    is_plain = len(user.args) == 1 and not user.kwargs
    return next((part for name, part in names.items() if is_plain and calls(user, name)), None)


def _is_known(node: Node) -> bool:
    """Whether it is one of the calls that are rewritten, with supported arguments."""
    if dtype_of(node) != torch.complex64 or node.kwargs:
        return False
    if calls(node, "view_as_complex"):
        return True
    if calls(node, "polar", "complex"):
        first, second = map(shape_of, node.args)
        return first is not None and first == second and dtype_of(node.args[0]) == torch.float32
    if calls(node, "mul"):
        return len(node.args) == 2 and all(map(_is_factor, node.args))
    source: Any = node.args[0] if node.args else None
    if not _is_complex(source):
        return False
    if calls(node, "to"):
        before, after = tensor_of(source), tensor_of(node)
        return before is not None and after is not None and before.device == after.device
    if calls(node, "getitem"):
        return len(node.all_input_nodes) == 1  # not rows by index
    return calls(node, *_MOVES)


def _is_factor(value: object) -> bool:
    if isinstance(value, Node):
        return dtype_of(value) in (torch.complex64, torch.float32)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Writer:
    """Inserts real calls before one complex node, whose sources are pairs already."""

    def __init__(self, graph: Graph, node: Node, results: Recorder) -> None:
        self._graph, self._node, self._results = graph, node, results

    def write(self, pairs: dict[Node, _Pair]) -> None:
        node = self._node
        pairs[node] = self._pair(pairs)
        for user in list(node.users):
            part = _part_read(user)
            if part is None:
                continue
            if part == "both":
                with self._graph.inserting_before(user):
                    new = self._graph.call_function(torch.stack, (tuple(pairs[node]), -1))
                self._results.record(new)
            else:
                new = getattr(pairs[node], part)
            user.replace_all_uses_with(new)
            # Elementwise operations keep the strides of the complex numbers.
            self._results.update_users(new)

    def _pair(self, pairs: dict[Node, _Pair]) -> _Pair:
        node = self._node
        args: Any = node.args
        if calls(node, "complex"):
            return _Pair(*args)
        if calls(node, "view_as_complex"):
            return _Pair(*(self._call(operator.getitem, args[0], (..., i)) for i in range(2)))
        if calls(node, "polar"):
            return self._polar(*args)
        if calls(node, "mul"):
            return self._product(*(pairs.get(arg, arg) for arg in args))
        source = pairs[args[0]]
        if calls(node, "to"):
            return source
        return _Pair(*(self._call(node.target, part, *args[1:]) for part in source))

    def _polar(self, absolute: Node, angle: Node) -> _Pair:
        # On a CPU torch's cosine of a strided tensor may differ in the last bit from that of a
        # contiguous one, which polar computes.
        angle = self._call("contiguous", angle)
        pair = _Pair(self._call("cos", angle), self._call("sin", angle))
        if calls(absolute, "ones_like"):
            return pair
        return _Pair(*(self._call(operator.mul, absolute, part) for part in pair))

    def _product(self, left: Any, right: Any) -> _Pair:
        if not isinstance(left, _Pair):
            left, right = right, left
        if isinstance(right, _Pair):
            multiply = self._multiply
            real = self._call(
                operator.sub, multiply(left.real, right.real), multiply(left.imag, right.imag)
            )
            imag = self._call(
                operator.add, multiply(left.real, right.imag), multiply(left.imag, right.real)
            )
            return _Pair(real, imag)
        if right == 1:
            return left
        return _Pair(*(self._multiply(part, right) for part in left))

    def _multiply(self, left: Node, right: Any) -> Node:
        return self._call(operator.mul, left, right)

    def _call(self, target: Callable[..., Any] | str, *args: Any) -> Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        with self._graph.inserting_before(self._node):
            made = self._graph.create_node(op, target, args)
        self._results.record(made)
        return made
