"""Extends the graph of a few layers of a model to that of all, by repeating its last group of them.

Between the last attention call, or recurrence, of one group of layers and that of the next lies a
*segment* of the graph: the end of one group and the beginning of the next. If groups are alike, so
are the segments: each node reads nodes of its own segment, of the segment before, what all layers
read, or a parameter, cache or state of its segment's two groups. The last two segments are
compared, and the last is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from ..fx.fake_tensors import Layout, layout_key, memory_of
from ..fx.nodes import example
from .dynamo import Traced
from .layer_groups import GroupCalls, LayerGroups, LayersDiffer, inputs_of_groups, last_mixers


def repeat_layers(
    traced: Traced,
    tensors: dict[str, Tensor],
    prefix: str,
    groups: LayerGroups,
    calls: GroupCalls,
) -> None:
    """Make the graph of some layers one of all, in place.

    Args:
        traced: the graph; its caches and states have the numbers of the model's calls.
        tensors: the parameters and buffers of the whole model by name.
        prefix: what layers' parameters' names begin with before the number, "model.layers." say.
        groups: whose layers are in the graph. calls: that they make.

    Raises:
        LayersDiffer: see there. The graph may have been changed then.
    """
    # What Dynamo records are normal tensors even when it traces in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        repetition = _Repetition(traced, tensors, prefix, groups, calls)
        repetition.compare()
        repetition.repeat()
    traced.gm.graph.lint()


class _Repetition:
    """Segments have the number of the group that they end, in the whole graph.

    Attributes:
        segments: the nodes of the last two segments that were traced. rest: what follows.
        inputs: the group and key of each placeholder that has them.
        homes: by the id of a fake tensor, the node it was recorded for first, and as which part.
        memories: by memory, the fake tensor that was recorded first.
        made: the nodes of segments of the whole graph.
    """

    def __init__(
        self,
        traced: Traced,
        tensors: dict[str, Tensor],
        prefix: str,
        groups: LayerGroups,
        calls: GroupCalls,
    ) -> None:
        self.traced, self.tensors, self.prefix = traced, tensors, prefix
        self.groups, self.calls, self.compared = groups, calls, groups.compared
        self.graph = traced.gm.graph
        nodes = list(self.graph.nodes)
        self.inputs = inputs_of_groups(traced, tensors, prefix, groups, calls)
        one, two, three = cuts = last_mixers(nodes, self.inputs, self.compared)
        self.segments = nodes[one + 1 : two + 1], nodes[two + 1 : three + 1]
        self.rest = nodes[three + 1 :]
        if any(node.op == "placeholder" for node in nodes[cuts[0] :]):
            raise LayersDiffer("an input behind a layer")
        # For each node of a segment: which segment, and its place there.
        self.places = {
            node: (number, at)
            for number, segment in enumerate(self.segments)
            for at, node in enumerate(segment)
        }
        self.homes: dict[int, tuple[Node, int]] = {}
        self.memories: dict[int, FakeTensor] = {}
        for node in nodes:
            for part, fake in enumerate(_leaves(node)):
                if isinstance(fake, FakeTensor):
                    self.homes.setdefault(id(fake), (node, part))
                    self.memories.setdefault(memory_of(fake), fake)
        self.layouts: dict[int, Layout] = {}
        self.made: dict[int, list[Node]] = {self.compared[0]: self.segments[0]}
        self.inputs_of = {place: node for node, place in self.inputs.items()}

    # Comparison -------------------------------------------------------------------------------

    def compare(self) -> None:
        """Raises LayersDiffer unless the second segment is as the first, a group further."""
        if len(self.segments[0]) != len(self.segments[1]):
            raise LayersDiffer("segments of other lengths")
        for one, two in zip(*self.segments, strict=True):
            if (one.op, one.target) != (two.op, two.target):
                raise LayersDiffer(f"{one.format_node()} and {two.format_node()}")
            parts = [_parts((n.args, n.kwargs, n.meta.get("example_value"))) for n in (one, two)]
            if not all(self._are_alike(*pair) for pair in zip_longest(*parts)):
                raise LayersDiffer(f"{one.format_node()} and {two.format_node()}")
        for node in self.rest:
            fakes = [fake for fake in _leaves(node) if isinstance(fake, FakeTensor)]
            for read in (*node.all_input_nodes, *(self._owner(fake)[0] for fake in fakes)):
                segment, place = self.places.get(read, (1,))[0], self.inputs.get(read)
                if segment == 0 or (place is not None and place[0] != self.compared[2]):
                    raise LayersDiffer(f"{node.format_node()} reads a layer before the last")

    def _are_alike(self, one: Any, two: Any) -> bool:
        if isinstance(one, Node) and isinstance(two, Node):
            return self._are_linked(one, two)
        if isinstance(one, FakeTensor) and isinstance(two, FakeTensor):
            homes = [(self.homes[id(fake)], self._owner(fake)) for fake in (one, two)]
            return _same_layout(one, two) and all(
                place[0][1] == place[1][1] and self._are_linked(place[0][0], place[1][0])
                for place in zip(*homes, strict=True)
            )
        if isinstance(one, torch.SymInt) and isinstance(two, torch.SymInt):
            return bool(one.node.expr == two.node.expr)
        return type(one) is type(two) and bool(one == two)

    def _owner(self, fake: FakeTensor) -> tuple[Node, int]:
        """The node whose result's memory it lies in, and as which part."""
        return self.homes[id(self.memories[memory_of(fake)])]

    def _are_linked(self, one: Node, two: Node) -> bool:
        """Whether the second segment reads ``two`` where the first reads ``one``."""
        if one in self.inputs and two in self.inputs:
            (group, key), (group_2, key_2) = self.inputs[one], self.inputs[two]
            steps = zip(self.compared[:-1], self.compared[1:], strict=True)
            return key == key_2 and (group, group_2) in steps
        segment, at = self.places.get(two, (-1, 0))
        if segment == 1:
            return self.places.get(one) == (0, at)
        if segment == 0:  # there, the first segment has what the layers start with
            return one not in self.places and one.op != "placeholder"
        return one is two

    # Repetition -------------------------------------------------------------------------------

    def repeat(self) -> None:
        _, second, last = self.compared
        first = [node for node, (group, _) in self.inputs.items() if group == second]
        with self.graph.inserting_after(first[-1]):
            # Each goes directly behind the one mentioned, so they are made backwards.
            for group in reversed(range(second + 1, last)):
                for node in reversed(first):
                    self._add_input(node, group)
        template = self.segments[1]
        with self.graph.inserting_before(template[0]):
            for segment in range(second, last - 1):
                self.made[segment] = []
                for node in template:
                    copy = self.graph.node_copy(node, partial(self._node, segment=segment))
                    copy.meta = {}
                    self._describe(copy, node, segment)
                    self.made[segment].append(copy)
        # What was traced is the last of them.
        self.made[last - 1] = template
        for node in template:
            node.args = map_arg(node.args, partial(self._node, segment=last - 1))
            node.kwargs = map_arg(node.kwargs, partial(self._node, segment=last - 1))
        for node in (*template, *self.rest):
            self._describe(node, node, last - 1)

    def _add_input(self, like: Node, group: int) -> None:
        """A placeholder for another group."""
        key = self.inputs[like][1]
        node = self.graph.placeholder(f"{like.target}_of_{group}")
        self.inputs_of[group, key] = node
        fake = example(like)
        assert isinstance(fake, FakeTensor)  # it stands for a tensor
        kind, number, which = key
        if kind == "parameter":
            name = f"{self.prefix}{self.groups.layer(group, number)}.{which}"
            tensor = self.traced.constants[node.name] = self.tensors[name]
            node.meta["example_value"] = fake.fake_mode.from_tensor(tensor, static_shapes=True)
            return
        call = self.calls.call(kind, group, number)
        self.traced.sources[node.name] = (kind, call, which) if kind == "cache" else (kind, call)
        node.meta["example_value"] = self._layout(fake).new()

    def _node(self, node: Node, segment: int) -> Node:
        """What ``segment`` reads where the second segment, or what follows, reads ``node``."""
        if node in self.inputs:
            group, key = self.inputs[node]
            return self.inputs_of[segment + (group == self.compared[2]), key]
        if node not in self.places:
            return node
        number, at = self.places[node]
        return self.made[segment - 1 + number][at]

    def _describe(self, node: Node, like: Node, segment: int) -> None:
        """Record for ``node`` of ``segment`` what was recorded for ``like``, of the second segment
        or behind it, which may be the same node."""
        if "example_value" not in like.meta:
            return
        own: dict[int, Tensor] = {}

        def of(fake: Any) -> Any:
            if not isinstance(fake, FakeTensor):
                return fake
            if id(fake) not in own:
                own[id(fake)] = self._fake(fake, node, like, segment, own)
            return own[id(fake)]

        node.meta["example_value"] = tree_map(of, like.meta["example_value"], is_leaf=_is_shape)

    def _fake(
        self, fake: FakeTensor, node: Node, like: Node, segment: int, own: dict[int, Tensor]
    ) -> Tensor:
        home, part = self.homes[id(fake)]
        if home is not like:
            found: Tensor = _leaves(self._node(home, segment))[part]
            return found
        first = self.memories[memory_of(fake)]
        if first is fake:
            return fake if node is like else self._layout(fake).new()
        home, part = self.homes[id(first)]
        whole = own[id(first)] if home is like else _leaves(self._node(home, segment))[part]
        is_kept = node is like and whole is first
        return fake if is_kept else self._layout(fake).within(whole)

    def _layout(self, fake: FakeTensor) -> Layout:
        if id(fake) not in self.layouts:
            self.layouts[id(fake)] = Layout.of(fake)
        return self.layouts[id(fake)]


def _leaves(node: Node) -> list[Any]:
    return tree_leaves(node.meta.get("example_value"), is_leaf=_is_shape)


def _is_shape(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _same_layout(one: FakeTensor, two: FakeTensor) -> bool:
    return type(one) is type(two) and layout_key(one) == layout_key(two)


def _parts(value: Any) -> Iterator[Any]:
    """What is in nested arguments and results, with the form of what holds it."""
    if isinstance(value, (tuple, list)):
        yield "tuple" if isinstance(value, tuple) else "list"
        yield len(value)
        for part in value:
            yield from _parts(part)
    elif isinstance(value, dict):
        yield list(value)
        for part in value.values():
            yield from _parts(part)
    elif isinstance(value, slice):
        yield from _parts((value.start, value.stop, value.step))
    else:
        yield value
