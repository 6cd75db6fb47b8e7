"""Graph rules: a pattern of nodes, guards and a replacement.

A :class:`Rule` is a pass. Each node of the graph, from the last one on, is tried as the root of the
pattern: the node whose value the replacement computes. Patterns descend from a call to its
arguments and bind names. Alternatives are tried in order until all guards hold. A match is
rewritten at once.

Every rule has two conditions. No node of a match below its root may be written in place, and
neither may a source that is read elsewhere than at the replacement. The new value gets the record
of the replaced value. Dead nodes of the match are erased, and nodes that only they read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ...kernels import ops as _ops  # noqa: F401 - op() names them
from .nodes import (
    CASTS,
    calls,
    cast_source,
    dtype_of,
    example,
    is_in_place,
    is_ours,
    last_dim_slice,
    shape_of,
    written_nodes,
)
from .pass_context import PassContext


class Bound(NamedTuple):
    """The bindings of a partial match: values by name, and the nodes of calls, users first."""

    named: dict[str, Any]
    nodes: tuple[Node, ...]

    def bind(self, name: str, value: Any) -> Bound | None:
        """The bindings with one more name, unless it is empty; None if it is bound to another
        value."""
        if not name:
            return self
        if name in self.named:
            known = self.named[name]
            is_same = known is value or (not isinstance(value, Node) and known == value)
            return self if is_same else None
        return Bound({**self.named, name: value}, self.nodes)

    def with_nodes(self, *nodes: Node) -> Bound:
        return Bound(self.named, (*self.nodes, *nodes))


NOTHING = Bound({}, ())


@dataclass(frozen=True, slots=True)
class Match:
    """A root, the values of the pattern's names, and the nodes that the pattern covers.

    Attributes:
        written: nodes of the graph that may be written in place.
    """

    graph: Graph
    context: PassContext
    written: set[Node]
    root: Node
    named: Mapping[str, Any]
    nodes: tuple[Node, ...]

    def __getitem__(self, name: str) -> Any:
        return self.root if name == "root" else self.named[name]

    def get(self, name: str) -> Any:
        """The value of ``name``, or None if its alternative was not taken."""
        return self.named.get(name)

    def call(self, function: Callable[..., Any], *args: Any) -> Node:
        """A new call at the place of the replacement."""
        return self.graph.call_function(function, args)

    def results(self, call: Node, *replaced: Node) -> dict[Node, Node]:
        """The parts of a call that returns several values, each of which replaces a node."""
        parts = [self.call(operator.getitem, call, place) for place in range(len(replaced))]
        return dict(zip(replaced, parts, strict=True))


class Pattern:
    """A pattern of one value: a node or another argument of a call."""

    __slots__ = ()

    def heads(self) -> set[Any]:
        """Targets, or their names, of the calls that may match; all others are skipped."""
        raise TypeError(f"a {type(self).__name__} cannot be the root of a rule")

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Value(Pattern):
    """Any value: a source of the pattern, or an argument that is not a node."""

    name: str

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        found = bound.bind(self.name, value)
        if found is not None:
            yield found


@dataclass(frozen=True, slots=True)
class Named(Pattern):
    """A value of a pattern, under its own name."""

    name: str
    pattern: Pattern

    def heads(self) -> set[Any]:
        return self.pattern.heads()

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        found = bound.bind(self.name, value)
        if found is not None:
            yield from self.pattern.match(value, found)


@dataclass(frozen=True, slots=True)
class Where(Pattern):
    """A pattern and a condition on the names bound so far."""

    pattern: Pattern
    holds: Callable[[Any], bool]

    def heads(self) -> set[Any]:
        return self.pattern.heads()

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        return (found for found in self.pattern.match(value, bound) if self.holds(found.named))


@dataclass(frozen=True, slots=True)
class Rest(Pattern):
    """All further arguments, as a tuple; the last of a call's patterns."""

    name: str = ""

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        return Value(self.name).match(value, bound)


@dataclass(frozen=True, slots=True)
class Call(Pattern):
    """A call with exactly these arguments; constants among them must be equal.

    Attributes:
        targets: names of functions or methods, or functions themselves.
        options: further arguments, positional in this order or by name, each with its allowed
            values; :data:`MISSING` among them if it may be omitted.
        commutes: whether both arguments may be in either order.
        is_shared: whether nodes outside the match may read the result. They may always read the
            root.
    """

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    name: str = ""
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    commutes: bool = False
    is_shared: bool = False

    def heads(self) -> set[Any]:
        return set(self.targets)

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        if not isinstance(value, Node) or not self._calls(value):
            return
        if bound.nodes and not self.is_shared and len(value.users) != 1:
            return
        if not self._options_hold(value):
            return
        named = bound.bind(self.name, value)
        if named is None:
            return
        named = named.with_nodes(value)
        args = value.args[: len(self.args)] if self.options else value.args
        yield from _match_all(self.args, args, named)
        if self.commutes:
            yield from _match_all(self.args, args[::-1], named)

    def _options_hold(self, node: Node) -> bool:
        if not self.options:
            return not node.kwargs
        more = node.args[len(self.args) :]
        given = dict(zip(self.options, more, strict=False)) | node.kwargs
        is_known = len(more) <= len(self.options) and given.keys() <= self.options.keys()
        return is_known and all(
            given.get(name, MISSING) in allowed for name, allowed in self.options.items()
        )

    def _calls(self, node: Node) -> bool:
        if node.op == "call_function" and node.target in self.targets:
            return True
        return calls(node, *self.targets)


@dataclass(frozen=True, slots=True)
class Cast(Pattern):
    """A conversion to another dtype on the same device, in any spelling."""

    source: Pattern
    name: str = ""
    is_shared: bool = False

    def heads(self) -> set[Any]:
        return set(CASTS)

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        source = cast_source(value)
        if source is None or (bound.nodes and not self.is_shared and len(value.users) != 1):
            return
        named = bound.bind(self.name, value)
        if named is not None:
            yield from self.source.match(source, named.with_nodes(value))


@dataclass(frozen=True, slots=True)
class Slice(Pattern):
    """A contiguous part of the last dimension, see :func:`.nodes.last_dim_slice`.

    Also binds (begin, end), under the name followed by ``_range``.
    """

    source: Pattern
    name: str

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        part, found = last_dim_slice(value), bound.bind(self.name, value)
        if part is not None and found is not None:
            whole, chunks = part[0], value.args[0]
            nodes = (value,) if chunks is whole else (value, chunks)
            ranged = found.bind(f"{self.name}_range", part[1:])
            if ranged is not None:
                yield from self.source.match(whole, ranged.with_nodes(*nodes))


@dataclass(frozen=True, slots=True)
class ReadBy(Pattern):
    """A value, and one of the calls that read it."""

    pattern: Pattern
    reader: Pattern

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        for found in self.pattern.match(value, bound):
            for user in value.users:
                yield from self.reader.match(user, found)


@dataclass(frozen=True, slots=True)
class Chain(Pattern):
    """A value after any number of these calls, each of which is read once."""

    source: Pattern
    targets: tuple[str, ...]

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        while True:
            yield from self.source.match(value, bound)
            if not calls(value, *self.targets) or len(value.users) != 1:
                return
            bound = bound.with_nodes(value)
            value = value.args[0]


@dataclass(frozen=True, slots=True)
class OneOf(Pattern):
    """The first of several spellings with which the whole match and its guards hold."""

    patterns: tuple[Any, ...]

    def heads(self) -> set[Any]:
        return set().union(*(pattern.heads() for pattern in self.patterns))

    def match(self, value: Any, bound: Bound) -> Iterator[Bound]:
        for pattern in self.patterns:
            yield from _match_one(pattern, value, bound)


def call(
    *targets: Any, args: Iterable[Any], name: str = "", is_shared: bool = False,
    **options: tuple[Any, ...],
) -> Call:  # fmt: skip
    """A call of one of ``targets`` with these arguments and options."""
    return Call(targets, tuple(args), name, options, is_shared=is_shared)


shared = partial(call, is_shared=True)
"""A call whose result nodes outside the match may read."""


def product(left: Pattern, right: Pattern, name: str = "", is_shared: bool = False) -> Call:
    """The multiplication of two values in either order."""
    return Call(("mul",), (left, right), name, commutes=True, is_shared=is_shared)


def one_of(*patterns: Any) -> OneOf:
    """One of several spellings, tried in order."""
    return OneOf(patterns)


def op(name: str) -> tuple[Any, Any]:
    """The targets of pagespec's operator of this name."""
    packet = getattr(torch.ops.pagespec, name)
    return packet, packet.default


def values(*names: str) -> tuple[Value, ...]:
    """Arguments that are bound and not inspected."""
    return tuple(map(Value, names))


def _match_all(patterns: Sequence[Any], found: Any, bound: Bound) -> Iterator[Bound]:
    if patterns and isinstance(patterns[0], Rest):
        yield from patterns[0].match(found, bound)
    elif not patterns or not found:
        if not found and not patterns:
            yield bound
    else:
        for each in _match_one(patterns[0], found[0], bound):
            yield from _match_all(patterns[1:], found[1:], each)


def _match_one(pattern: Any, value: Any, bound: Bound) -> Iterator[Bound]:
    """Match a pattern, a list of patterns or a constant."""
    if isinstance(pattern, Pattern):
        yield from pattern.match(value, bound)
    elif isinstance(pattern, list):
        if isinstance(value, (list, tuple)):
            yield from _match_all(pattern, value, bound)
    elif type(pattern) is type(value) and pattern == value:
        yield bound


def _is_pure(node: Node) -> bool:
    """Whether ``node`` is a call without side effects."""
    return node.op != "placeholder" and not (is_in_place(node) or is_ours(node))


MISSING = object()
"""The value of an option that a call omits."""

Guard = Callable[[Any], bool]
"""Takes a :class:`Match`, or within :class:`Where` the names bound so far."""


def same_shape(first: str, second: str) -> Guard:
    """Both are tensors of one shape, so nothing is broadcast."""
    return lambda m: shape_of(m[first]) is not None and shape_of(m[first]) == shape_of(m[second])


def same_dtype(first: str, second: str) -> Guard:
    """Both are recorded with one dtype."""
    return lambda m: dtype_of(m[first]) == dtype_of(m[second])


def has_dtype(dtype: torch.dtype, *names: str) -> Guard:
    """All are recorded with this dtype."""
    return lambda m: all(dtype_of(m[name]) == dtype for name in names)


def is_constant(name: str) -> Guard:
    """It is a parameter or buffer: no operation of a step computes it."""
    return lambda m: m.context.constant(m[name]) is not None


Replacement = Callable[[Match], Node | Mapping[Node, Node]]
"""Returns the node that replaces the root, or one node for each replaced node."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A pass that rewrites every match of a pattern.

    Attributes:
        at: the bound node before which the replacement is inserted; its sources must come before
            that.
    """

    pattern: Pattern
    replace: Replacement
    guards: tuple[Guard, ...] = ()
    at: str = "root"

    def __call__(self, gm: GraphModule, context: PassContext) -> int:
        """Rewrite every match; returns the number of rewrites."""
        graph, count = gm.graph, 0
        written: set[Node] | None = None
        erased: set[Node] = set()
        heads, nodes = self.pattern.heads(), list(graph.nodes)
        targets = {node.target for node in nodes}
        roots = {t for t in targets if t in heads or getattr(t, "__name__", None) in heads}
        for node in reversed(nodes) if roots else ():
            if node.target not in roots or node in erased:
                continue
            for bound in self.pattern.match(node, NOTHING):
                if written is None:
                    written = written_nodes(graph)
                match = Match(graph, context, written, node, *bound)
                if self._holds(match):
                    erased |= self._rewrite(match)
                    count += 1
                    break
        return count

    def _holds(self, match: Match) -> bool:
        # Values that are read at the place of the replacement are the same there.
        others = (node for node in match.nodes if node is not match[self.at])
        read = {source for node in others for source in node.all_input_nodes} | {*match.nodes}
        is_safe = match.written.isdisjoint(read - {match.root})
        return is_safe and all(guard(match) for guard in self.guards)

    def _rewrite(self, match: Match) -> set[Node]:
        with match.graph.inserting_before(match[self.at]):
            made = self.replace(match)
        replaced = {match.root: made} if isinstance(made, Node) else made
        for old, new in replaced.items():
            if "example_value" in old.meta:
                new.meta.setdefault("example_value", example(old))
            old.replace_all_uses_with(new)
        erased: set[Node] = set()
        # Of several results, those that only dead nodes read are removed as well.
        mine = {*match.nodes, *replaced}
        mine |= {new for new in replaced.values() if new.target is operator.getitem}
        while dead := {node for node in mine - erased if not node.users}:
            for node in dead:
                mine |= {*filter(_is_pure, node.all_input_nodes)}
                match.graph.erase_node(node)
            erased |= dead
        return erased
