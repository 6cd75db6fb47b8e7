"""The layers of a model that are traced for all: repeating groups, and the calls and inputs of
each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...kernels.recurrent.recurrent_spec import RecurrentSpec
from ..fx.nodes import RECURRENT_KINDS
from .graph_json import Traced

_MIXERS = ("paged_attention", *RECURRENT_KINDS)
"""pagespec's operators that read the KV or the states of requests."""

Key = tuple[str, int, str | int]
"""Within a group: ``("parameter", layer, name)``, ``("cache", call, which)`` or ``("state", call,
0)``, with layer and call numbered within the group."""


class LayersDiffer(Exception):
    """The groups differ in more than their layers, or the graph has another form."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers from ``begin`` on as ``num_groups`` groups of ``period`` layers, up to the last.

    The layers before them, the first ``num_first`` groups and the last group are traced.
    """

    begin: int
    period: int
    num_groups: int
    num_first: int

    @property
    def traced(self) -> list[int]:
        """The numbers of the layers that are traced."""
        end = self.begin + self.num_groups * self.period
        return [*range(self.begin + self.num_first * self.period), *range(end - self.period, end)]

    @property
    def compared(self) -> tuple[int, int, int]:
        """The last three groups that are traced."""
        return self.num_first - 2, self.num_first - 1, self.num_groups - 1

    def place(self, layer: int) -> tuple[int, int]:
        """The group of a layer, negative before all groups, and its number within the group."""
        return divmod(layer - self.begin, self.period)

    def layer(self, group: int, number: int) -> int:
        return self.begin + group * self.period + number


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """The number of calls per group, by kind as named in sources: "cache" (attention), "state"
    (recurrences).

    Attributes:
        before: by the layers before all groups. each: by each group.
    """

    before: dict[str, int]
    each: dict[str, int]

    @classmethod
    def of(
        cls,
        groups: LayerGroups,
        attention_calls: Sequence[Sequence[int]],
        recurrent: Sequence[RecurrentSpec],
        traced: Traced,
    ) -> GroupCalls:
        """The sources of a trace of some layers. Sources of states have the call's number in the
        model, as in the trace.

        Raises:
            LayersDiffer: groups have different recurrent calls.
        """
        states = {name: s[1] for name, s in traced.sources.items() if s[0] == "state"}
        num_left_out = groups.num_groups - groups.num_first - 1
        each, rest = divmod(len(recurrent) - len(set(states.values())), num_left_out)
        before = len(recurrent) - each * groups.num_groups
        if rest or before < 0:
            raise LayersDiffer(f"{len(states)} of {len(recurrent)} recurrent calls")
        alike = [replace(spec, call=0) for spec in recurrent[before:]]
        if alike[each:] != alike[: len(alike) - each]:
            raise LayersDiffer("recurrent calls of other kinds or sizes")
        first_of_last = before + each * groups.num_first
        for name, number in states.items():
            if number >= first_of_last:
                traced.sources[name] = "state", number + each * num_left_out
        group = attention_calls[groups.begin : groups.begin + groups.period]
        return cls(
            {"cache": sum(map(len, attention_calls[: groups.begin])), "state": before},
            {"cache": sum(map(len, group)), "state": each},
        )

    def place(self, kind: str, call: int) -> tuple[int, int]:
        """The group that makes a call, -1 before all groups, and its number within the group."""
        call -= self.before[kind]
        return (-1, call) if call < 0 else divmod(call, self.each[kind])

    def call(self, kind: str, group: int, number: int) -> int:
        return self.before[kind] + group * self.each[kind] + number


def inputs_of_groups(
    nodes: Sequence[Any], prefix: str, groups: LayerGroups, calls: GroupCalls
) -> dict[int, tuple[int, Key]]:
    """For each input of the graph that belongs to a layer, by number: its group (negative before
    all), and its key within the group.

    Args:
        nodes: from :func:`.graph_json.encode`.
        prefix: the start of the names of layers' parameters, before the layer's number.

    Raises:
        LayersDiffer: the compared groups have different inputs.
    """
    found: dict[int, tuple[int, Key]] = {}
    for at, (op, _, _, source, _) in enumerate(nodes):
        kind, *where = source if op == "placeholder" else ("",)
        if kind == "constant" and where[0].startswith(prefix):
            layer, _, rest = where[0].removeprefix(prefix).partition(".")
            group, number = groups.place(int(layer))
            found[at] = group, ("parameter", number, rest)
        elif kind in ("cache", "state"):
            call, which = where if kind == "cache" else (*where, 0)
            group, number = calls.place(kind, call)
            found[at] = group, (kind, number, which)
    keys = [{key for group, key in found.values() if group == g} for g in groups.compared]
    if not keys[0] == keys[1] == keys[2] or not keys[0]:
        raise LayersDiffer("layers with other parameters")
    return found


def last_mixers(
    nodes: Sequence[Any], inputs: Mapping[int, tuple[int, Key]], groups: Sequence[int]
) -> list[int]:
    """The index in ``nodes`` of the last attention call or recurrence of each of ``groups``.

    Raises:
        LayersDiffer: a group has none, or calls are not in the order of the groups.
    """
    found: dict[int, int] = {}
    reached = -1
    for at, (op, name, target, rest, _) in enumerate(nodes):
        if op != "call_function" or target[:2] != ["op", "pagespec"] or target[2] not in _MIXERS:
            continue
        read = [part[1] for part in rest[0][1:] if isinstance(part, list) and part[0] == "node"]
        places = [inputs[node] for node in read if node in inputs]
        owners = {group for group, key in places if key[0] != "parameter"}
        if len(owners) != 1 or max(owners) < reached:
            raise LayersDiffer(f"{name} is of groups {sorted(owners)}")
        reached = max(owners)
        found[reached] = at
    if not found.keys() >= {*groups}:
        raise LayersDiffer(f"attention calls and recurrences of groups {sorted(found)}")
    return [found[group] for group in groups]
