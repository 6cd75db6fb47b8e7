"""State slots in a step trace, compared with the specification's machine."""

from __future__ import annotations

from typing import Any

from .events import shortened
from .replay_machine import ReplayMachine
from .state import Plan

Tables = dict[int, tuple[int, ...]]


def differing_states(
    event: dict[str, Any], made: Plan, numbers: dict[str, int]
) -> tuple[str, str] | None:
    """The property that the state tables of a plan violate, with details; None if none."""
    for field, expected in (
        ("state_tables", dict(made.state_tables)),
        ("new_state_slots", dict(made.added_states)),
    ):
        recorded = {numbers.get(name, -1): tuple(slots) for name, slots in event[field]}
        if recorded != expected:
            return "S51", (
                f"{field} {shortened(str(recorded), 80)}, the specification has "
                f"{shortened(str(expected), 80)}"
            )
    return None


def differing_pool(event: dict[str, Any], machine: ReplayMachine) -> str:
    """How the counts of state slots after an event differ from the machine's; "" if they do not."""
    if not machine.scope.num_states:
        return ""
    num_free, num_cached = len(machine.free_slots), len(machine.slot_lru)
    pool = [num_free, num_cached, machine.scope.num_states - num_free - num_cached]
    recorded = list(event["state_pool"])
    if recorded == pool:
        return ""
    return f"free, cached, owned state slots {recorded}, the specification has {pool}"
