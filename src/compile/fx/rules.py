"""Graph rules: a pattern of nodes, guards and a replacement.

A :class:`Rule` is a pass. Each node of the graph, in order, is tried as the root of the pattern:
the node whose value the replacement computes. Patterns descend from a call to its arguments and
bind names; alternatives are tried in order until all guards hold. A match is rewritten at once.

What every rule gets from here: no node of a match below its root, and no source, may be written in
place; the record of the replaced value is carried; dead nodes of the match are erased.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from .nodes import CASTS, calls, cast_source, dtype_of, example, shape_of, written_nodes
from .pass_context import PassContext


class _Bound(NamedTuple):
    """What a partial match has bound: values by name, and the nodes of calls, users first."""

    named: dict[str, Any]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """A root, what the names of the pattern are bound to, and the nodes that the pattern covers."""

    graph: Graph
    context: PassContext
    root: Node
    named: Mapping[str, Any]
    nodes: tuple[Node, ...]

    def __getitem__(self, name: str) -> Any:
        return self.root if name == "root" else self.named[name]

    def get(self, name: str) -> Any:
        """What ``name`` is bound to, or None if its alternative was not taken."""
        return self.named.get(name)

    def call(self, function: Callable[..., Any], *args: Any) -> Node:
        """A new call at the place of the replacement."""
        return self.graph.call_function(function, args)

    def results(self, call: Node, *replaced: Node) -> dict[Node, Node]:
        """The parts of a call that returns several values, each in place of a node."""
        parts = (self.call(operator.getitem, call, place) for place in range(len(replaced)))
        return dict(zip(replaced, parts, strict=True))


class Pattern:
    """A pattern of one value: a node or another argument of a call."""

    __slots__ = ()

    def heads(self) -> set[Any]:
        """Targets, or their names, of the calls that may match: all others are passed over."""
        raise TypeError(f"a {type(self).__name__} cannot be the root of a rule")

    def match(self, value: Any, bound: _Bound) -> Iterator[_Bound]:
        raise NotImplementedError


def _bind(name: str, value: Any, bound: _Bound) -> _Bound | None:
    """``bound`` and one name more; None if that is bound to another value."""
    if not name:
        return bound
    if name in bound.named:
        return bound if bound.named[name] is value else None
    return bound._replace(named={**bound.named, name: value})


@dataclass(frozen=True, slots=True)
class Value(Pattern):
    """Any value: a source of the pattern, or an argument that is no node."""

    name: str

    def match(self, value: Any, bound: _Bound) -> Iterator[_Bound]:
        found = _bind(self.name, value, bound)
        if found is not None:
            yield found


@dataclass(frozen=True, slots=True)
class Rest(Pattern):
    """All further arguments, as a tuple; the last of a call's patterns."""

    name: str = ""

    def match(self, value: Any, bound: _Bound) -> Iterator[_Bound]:
        return Value(self.name).match(value, bound)


@dataclass(frozen=True, slots=True)
class Call(Pattern):
    """A call with exactly these arguments; constants among them must be equal.

    Attributes:
        targets: names of functions or methods, or functions themselves.
        commutes: both arguments in either order.
        is_shared: whether others may read the result. The root may always be read by others.
    """

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    name: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    commutes: bool = False
    is_shared: bool = False

    def heads(self) -> set[Any]:
        return set(self.targets)

    def match(self, value: Any, bound: _Bound) -> Iterator[_Bound]:
        if not isinstance(value, Node) or not self._calls(value):
            return
        if value.kwargs != self.kwargs:
            return
        if bound.nodes and not self.is_shared and len(value.users) != 1:
            return
        named = _bind(self.name, value, bound)
        if named is None:
            return
        named = named._replace(nodes=(*named.nodes, value))
        yield from _match_all(self.args, value.args, named)
        if self.commutes:
            yield from _match_all(self.args, value.args[::-1], named)

    def _calls(self, node: Node) -> bool:
        if node.op == "call_function" and node.target in self.targets:
            return True
        return calls(node, *self.targets)


@dataclass(frozen=True, slots=True)
class Cast(Pattern):
    """A conversion to another dtype on the same device, however it is spelled."""

    source: Pattern
    name: str = ""
    is_shared: bool = False

    def heads(self) -> set[Any]:
        return set(CASTS)

    def match(self, value: Any, bound: _Bound) -> Iterator[_Bound]:
        source = cast_source(value)
        if source is None or (bound.nodes and not self.is_shared and len(value.users) != 1):
            return
        named = _bind(self.name, value, bound)
        if named is not None:
            yield from self.source.match(source, named._replace(nodes=(*named.nodes, value)))


@dataclass(frozen=True, slots=True)
class OneOf(Pattern):
    """The first of several spellings with which the whole match and its guards hold."""

    patterns: tuple[Pattern, ...]

    def heads(self) -> set[Any]:
        return set().union(*(pattern.heads() for pattern in self.patterns))

    def match(self, value: Any, bound: _Bound) -> Iterator[_Bound]:
        for pattern in self.patterns:
            yield from pattern.match(value, bound)


def call(
    *targets: Any, args: Iterable[Any], name: str = "", kwargs: Mapping[str, Any] | None = None,
    is_shared: bool = False,
) -> Call:  # fmt: skip
    """A call of one of ``targets`` with these arguments."""
    return Call(targets, tuple(args), name, kwargs or {}, is_shared=is_shared)


def product(left: Pattern, right: Pattern, name: str = "") -> Call:
    """The product of two values in either order."""
    return Call(("mul",), (left, right), name, commutes=True)


def one_of(*patterns: Pattern) -> OneOf:
    """One of several spellings, tried in order."""
    return OneOf(patterns)


def values(*names: str) -> tuple[Value, ...]:
    """Arguments that are bound and not looked into."""
    return tuple(map(Value, names))


def _match_all(patterns: tuple[Any, ...], found: Any, bound: _Bound) -> Iterator[_Bound]:
    if not patterns or not found:
        if not found and not patterns:
            yield bound
        return
    head, value = patterns[0], found[0]
    if isinstance(head, Rest):
        yield from head.match(found, bound)
    elif isinstance(head, Pattern):
        for each in head.match(value, bound):
            yield from _match_all(patterns[1:], found[1:], each)
    elif type(head) is type(value) and head == value:
        yield from _match_all(patterns[1:], found[1:], bound)


Guard = Callable[[Match], bool]


def same_shape(first: str, second: str) -> Guard:
    """Both are tensors of one shape, so that nothing is broadcast."""
    return lambda m: shape_of(m[first]) is not None and shape_of(m[first]) == shape_of(m[second])


def same_dtype(first: str, second: str) -> Guard:
    """Both are recorded with one dtype."""
    return lambda m: dtype_of(m[first]) == dtype_of(m[second])


def has_dtype(dtype: torch.dtype, *names: str) -> Guard:
    """All are recorded with this dtype."""
    return lambda m: all(dtype_of(m[name]) == dtype for name in names)


def is_constant(name: str) -> Guard:
    """It is a parameter or buffer, so that no operation of a step computes it."""
    return lambda m: m.context.constant(m[name]) is not None


Replacement = Callable[[Match], Node | Mapping[Node, Node]]
"""Returns the node in place of the root, or a node for each replaced one."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A pass that rewrites every match of a pattern.

    Attributes:
        at: the bound node before which the replacement stands; its sources must precede that.
    """

    pattern: Pattern
    replace: Replacement
    guards: tuple[Guard, ...] = ()
    at: str = "root"

    def __call__(self, gm: GraphModule, context: PassContext) -> int:
        """Rewrite every match; returns how many."""
        graph, count = gm.graph, 0
        written: set[Node] | None = None
        erased: set[Node] = set()
        heads = self.pattern.heads()
        for node in list(graph.nodes):
            target = node.target
            if target not in heads and getattr(target, "__name__", None) not in heads:
                continue
            if node in erased:
                continue
            for bound in self.pattern.match(node, _Bound({}, ())):
                if written is None:
                    written = written_nodes(graph)
                match = Match(graph, context, node, *bound)
                if self._holds(match, written):
                    erased |= self._rewrite(match)
                    count += 1
                    break
        return count

    def _holds(self, match: Match, written: set[Node]) -> bool:
        read = {value for value in match.named.values() if isinstance(value, Node)}
        read |= set(match.nodes)
        return written.isdisjoint(read - {match.root}) and all(g(match) for g in self.guards)

    def _rewrite(self, match: Match) -> set[Node]:
        with match.graph.inserting_before(match[self.at]):
            made = self.replace(match)
        for old, new in ({match.root: made} if isinstance(made, Node) else made).items():
            new.meta.setdefault("example_value", example(old))
            old.replace_all_uses_with(new)
        erased: set[Node] = set()
        while dead := {node for node in {*match.nodes} - erased if not node.users}:
            for node in dead:
                match.graph.erase_node(node)
            erased |= dead
        return erased
