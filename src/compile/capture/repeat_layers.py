"""Extend the graph of a few layers of a model to the graph of all layers, by repeating its last
group.

The *segment* between two groups of layers is the graph from the last attention call (or recurrence)
of one group to that of the next: the end of one group and the start of the next. If groups are
equal, segments are, too: each node reads nodes of its own segment, of the preceding segment, a
value that all layers read, or a parameter, cache or state of its segment's two groups. The last two
segments are compared, and the last one is repeated.

Graphs are data from :func:`.graph_json.encode`, in which nodes and results are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any

from .layer_groups import GroupCalls, LayerGroups, LayersDiffer, inputs_of_groups, last_mixers


def repeat_layers(
    data: dict[str, Any], prefix: str, groups: LayerGroups, calls: GroupCalls
) -> dict[str, Any]:
    """The graph of all layers, from that of some.

    Args:
        data: a graph whose caches and states have the numbers of the model's calls.
        prefix: the start of the names of layers' parameters, before the number, for example
            "model.layers.".
        groups: the groups whose layers are in the graph. calls: the calls that they make.

    Raises:
        LayersDiffer: the segments are not equal.
    """
    repetition = _Repetition(data["nodes"], prefix, groups, calls)
    repetition.compare()
    return {**data, "nodes": repetition.repeated()}


class _Repetition:
    """The number of a segment is that of the group that it ends, in the whole graph.

    Attributes:
        segments: the nodes of the last two traced segments.
        inputs: the group and key of each placeholder that has them.
        homes: for each tensor, the node whose result it is (or is a part of), and which part.
        result: the nodes of the whole graph. tensors: for each, the tensors of its result.
        made: the number of a node in ``result``, by :meth:`_key`.
    """

    def __init__(
        self, nodes: list[Any], prefix: str, groups: LayerGroups, calls: GroupCalls
    ) -> None:
        self.nodes, self.prefix, self.groups, self.calls = nodes, prefix, groups, calls
        self.inputs = inputs_of_groups(nodes, prefix, groups, calls)
        one, two, three = last_mixers(nodes, self.inputs, groups.compared)
        self.segments = range(one + 1, two + 1), range(two + 1, three + 1)
        if any(op == "placeholder" for op, *_ in nodes[one:]):
            raise LayersDiffer("an input behind a layer")
        self.homes = [
            (number, part)
            for number, (*_, value) in enumerate(nodes)
            for part in range(sum(kind in _TENSORS for kind in _kinds(value)))
        ]
        self.result: list[Any] = []
        self.tensors: list[list[int]] = []
        self.num_tensors = 0
        self.made: dict[Hashable, int] = {}

    def compare(self) -> None:
        """Raise LayersDiffer unless the second segment equals the first, shifted by one group."""
        if len(self.segments[0]) != len(self.segments[1]):
            raise LayersDiffer("segments of other lengths")
        for one, two in zip(*self.segments, strict=True):
            (form, read), (form_2, read_2) = self._form(one), self._form(two)
            if form != form_2 or not all(map(self._are_linked, read, read_2)):
                raise LayersDiffer(f"{self.nodes[one][1:4]} and {self.nodes[two][1:4]}")
        for number in range(self.segments[1].stop, len(self.nodes)):
            for node, _ in self._form(number)[1]:
                place = self.inputs.get(node)
                is_last = place is None or place[0] == self.groups.compared[2]
                if node in self.segments[0] or not is_last:
                    raise LayersDiffer(f"{self.nodes[number][1]} reads a layer before the last")

    def _form(self, number: int) -> tuple[str, list[tuple[int, int]]]:
        """A node without its operands, and its operands: nodes, and the parts of their results that
        its own results are, or whose memory they share."""
        op, _, target, rest, value = self.nodes[number]
        read: list[tuple[int, int]] = []

        def leaf(kind: str, *parts: Any) -> Any:
            if kind not in _REFERENCES:
                return None
            read.append((parts[0], 0) if kind == "node" else self.homes[parts[0]])
            return [kind, *parts[1:]]

        # As text, because 1 and True are equal.
        return repr([op, target, *(_mapped(part, leaf) for part in (*rest, *value))]), read

    def _are_linked(self, one: tuple[int, int], two: tuple[int, int]) -> bool:
        """Whether the second segment reads ``two`` where the first reads ``one``."""
        (first, part), (second, part_2) = one, two
        if part != part_2:
            return False
        if first in self.inputs and second in self.inputs:
            (group, key), (group_2, key_2) = self.inputs[first], self.inputs[second]
            compared = self.groups.compared
            return key == key_2 and (group, group_2) in pairwise(compared)
        begin, begin_2 = (segment.start for segment in self.segments)
        if second in self.segments[1]:
            return first in self.segments[0] and first - begin == second - begin_2
        if second in self.segments[0]:  # there, the first segment has the inputs of the first layer
            is_before = not any(first in segment for segment in self.segments)
            return is_before and self.nodes[first][0] != "placeholder"
        return first == second

    def repeated(self) -> list[Any]:
        """The nodes of the whole graph."""
        _, second, last = self.groups.compared
        first = [number for number, (group, _) in self.inputs.items() if group == second]
        template = self.segments[1]
        for number in range(template.start):
            self._add(number, None)
            if number in self.inputs:
                self.made[self.inputs[number]] = self.made[number]
            if number == first[-1]:
                for group in range(second + 1, last):
                    for like in first:
                        self._add_input(like, group)
        for segment in range(second, last):
            for number in template:
                self._add(number, segment)
        for number in range(template.stop, len(self.nodes)):
            self._add(number, last - 1)
        return self.result

    def _add_input(self, number: int, group: int) -> None:
        """The placeholder of another group."""
        op, _, target, _, value = self.nodes[number]
        key = self.inputs[number][1]
        kind, place, which = key
        if kind == "parameter":
            parameter = f"{self.prefix}{self.groups.layer(group, place)}.{which}"
            rest: list[Any] = ["constant", parameter]
            value = [[*rest]]
        else:
            rest = [kind, self.calls.call(kind, group, place), *([which] * (kind == "cache"))]
        name = f"{target}_of_{group}"
        self.made[group, key] = self._append(number, [op, name, name, rest, value], None)

    def _add(self, number: int, segment: int | None) -> None:
        self.made[self._key(number, segment)] = len(self.result)
        self._append(number, self.nodes[number], segment)

    def _key(self, number: int, segment: int | None) -> Hashable:
        """The key of what ``segment`` reads where the second segment, or the code after it, reads
        the node of this number. None stands for the code before the second segment, where nodes are
        unchanged."""
        _, second, last = self.groups.compared
        before, template = self.segments
        if segment is None:
            return number
        if number in self.inputs:
            group, key = self.inputs[number]
            return segment + (group == last), key
        if number in template:
            return segment, number
        if number in before and segment > second:
            return segment - 1, number - before.start + template.start
        return number

    def _append(self, number: int, node: list[Any], segment: int | None) -> int:
        """Append a node derived from the one of this number; returns its number in the result."""
        own: list[int] = []
        self.tensors.append(own)

        def tensor(old: int) -> int:
            home, part = self.homes[old]
            found = own if home == number else self.tensors[self.made[self._key(home, segment)]]
            return found[part]

        def leaf(kind: str, *parts: Any) -> Any:
            if kind in _TENSORS:
                own.append(self.num_tensors)
                self.num_tensors += 1
            if kind not in _REFERENCES:
                return None
            read = parts[0]
            is_node = kind == "node"
            new = self.made[self._key(read, segment)] if is_node else tensor(read)
            return [kind, new, *parts[1:]]

        *head, rest, value = node
        if node[0] != "placeholder":
            rest = [_mapped(part, leaf) for part in rest]
        self.result.append([*head, rest, [_mapped(part, leaf) for part in value]])
        return len(self.result) - 1


_REFERENCES = ("node", "same", "tensor")
_TENSORS = ("tensor", "constant")


def _kinds(value: list[Any]) -> list[str]:
    """The kinds of the parts of a node's result."""
    found: list[str] = []
    for part in value:
        _mapped(part, lambda kind, *_: found.append(kind))
    return found


def _mapped(data: Any, leaf: Callable[..., Any]) -> Any:
    """The data with each kind and its parts replaced by the result of ``leaf``; None keeps them."""
    if not isinstance(data, list) or not data:
        return data
    kind, *parts = data
    found = leaf(kind, *parts)
    if found:
        return found
    if kind == "dict":
        return [kind, *([key, _mapped(part, leaf)] for key, part in parts)]
    if kind in ("tuple", "list", "slice"):
        return [kind, *(_mapped(part, leaf) for part in parts)]
    return data
