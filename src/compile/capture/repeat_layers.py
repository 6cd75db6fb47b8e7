"""Extends the graph of a few layers of a model to that of all, by repeating its last layer.

Between one attention call and the next lies a *segment* of the graph: the end of one layer and the
beginning of the next. If layers are alike, so are the segments: each node reads nodes of its own
segment, of the segment before, what all layers read, or a parameter or cache of its segment's two
layers. The last two segments are compared, and the last is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from ..fx.nodes import calls_op, example
from .dynamo import Traced

Key = tuple[str, int]
"""A parameter within its layer, by name and 0, or ``("", 0)`` and ``("", 1)`` for its caches."""


class LayersDiffer(Exception):
    """The segments differ in more than their layers, or the graph has another form."""


def repeat_layers(
    traced: Traced, tensors: dict[str, Tensor], prefix: str, layers: Sequence[int]
) -> None:
    """Make the graph of some layers one of all, in place.

    Args:
        traced: the graph; each layer has one attention call, of the layer's number.
        tensors: the parameters and buffers of the whole model by name.
        prefix: what layers' parameters' names begin with before the number, "model.layers." say.
        layers: those in the graph: two or more from 0 on, and the last of the model.

    Raises:
        LayersDiffer: see there. The graph may have been changed then.
    """
    # What Dynamo records are normal tensors even when it traces in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        repetition = _Repetition(traced, tensors, prefix, layers)
        repetition.compare()
        repetition.repeat()
    traced.gm.graph.lint()


class _Repetition:
    """Segments have the number of the layer that they end, in the whole graph.

    Attributes:
        segments: the nodes of the last two segments that were traced. rest: what follows.
        inputs: the layer and key of each placeholder that has them.
        homes: by the id of a fake tensor, the node it was recorded for first, and as which part.
        memories: by memory, the fake tensor that was recorded first.
        made: the nodes of segments of the whole graph.
    """

    def __init__(
        self, traced: Traced, tensors: dict[str, Tensor], prefix: str, layers: Sequence[int]
    ) -> None:
        self.traced, self.tensors, self.prefix = traced, tensors, prefix
        self.graph, self.layers = traced.gm.graph, tuple(layers[-3:])
        nodes = list(self.graph.nodes)
        cuts = [i for i, node in enumerate(nodes) if _is_attention(node)]
        if len(cuts) != len(layers):
            raise LayersDiffer(f"{len(cuts)} attention calls")
        *_, one, two, three = cuts
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
        self.inputs = self._inputs(nodes)
        self.homes: dict[int, tuple[Node, int]] = {}
        self.memories: dict[int, FakeTensor] = {}
        for node in nodes:
            for part, fake in enumerate(_leaves(node)):
                if isinstance(fake, FakeTensor):
                    self.homes.setdefault(id(fake), (node, part))
                    self.memories.setdefault(memory_of(fake), fake)
        self.layouts: dict[int, Layout] = {}
        self.made: dict[int, list[Node]] = {self.layers[0]: self.segments[0]}
        self.inputs_of = {place: node for node, place in self.inputs.items()}

    def _inputs(self, nodes: list[Node]) -> dict[Node, tuple[int, Key]]:
        names: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            names.setdefault(id(tensor), name)
        found: dict[Node, tuple[int, Key]] = {}
        for node in nodes:
            if node.name in self.traced.constants:
                name = names[id(self.traced.constants[node.name])]
                if name.startswith(self.prefix):
                    number, _, rest = name.removeprefix(self.prefix).partition(".")
                    found[node] = int(number), (rest, 0)
            elif self.traced.sources.get(node.name, ("",))[0] == "cache":
                _, call, which = self.traced.sources[node.name]
                found[node] = call, ("", which)
        keys = [{key for number, key in found.values() if number == i} for i in self.layers]
        if not keys[0] == keys[1] == keys[2] or not keys[0]:
            raise LayersDiffer("layers with other parameters")
        return found

    # Comparison -------------------------------------------------------------------------------

    def compare(self) -> None:
        """Raises LayersDiffer unless the second segment is as the first, a layer further."""
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
                segment, layer = self.places.get(read, (1,))[0], self.inputs.get(read)
                if segment == 0 or (layer is not None and layer[0] != self.layers[2]):
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
            (layer, key), (layer_2, key_2) = self.inputs[one], self.inputs[two]
            steps = zip(self.layers[:-1], self.layers[1:], strict=True)
            return key == key_2 and (layer, layer_2) in steps
        segment, at = self.places.get(two, (-1, 0))
        if segment == 1:
            return self.places.get(one) == (0, at)
        if segment == 0:  # there, the first segment has what the layers start with
            return one not in self.places and one.op != "placeholder"
        return one is two

    # Repetition -------------------------------------------------------------------------------

    def repeat(self) -> None:
        _, second, last = self.layers
        first = [node for node, (layer, _) in self.inputs.items() if layer == second]
        with self.graph.inserting_after(first[-1]):
            # Each goes directly behind the one mentioned, so they are made backwards.
            for layer in reversed(range(second + 1, last)):
                for node in reversed(first):
                    self._add_input(node, layer)
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

    def _add_input(self, like: Node, layer: int) -> None:
        """A placeholder for another layer."""
        key = self.inputs[like][1]
        node = self.graph.placeholder(f"{like.target}_of_{layer}")
        self.inputs_of[layer, key] = node
        fake = example(like)
        assert isinstance(fake, FakeTensor)  # it stands for a tensor
        if key[0]:
            tensor = self.traced.constants[node.name] = self.tensors[
                f"{self.prefix}{layer}.{key[0]}"
            ]
            node.meta["example_value"] = fake.fake_mode.from_tensor(tensor, static_shapes=True)
        else:
            self.traced.sources[node.name] = ("cache", layer, key[1])
            node.meta["example_value"] = self._layout(fake).new()

    def _node(self, node: Node, segment: int) -> Node:
        """What ``segment`` reads where the second segment, or what follows, reads ``node``."""
        if node in self.inputs:
            layer, key = self.inputs[node]
            return self.inputs_of[segment + (layer == self.layers[2]), key]
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


def _is_attention(node: Node) -> bool:
    return calls_op(node, "paged_attention")


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
