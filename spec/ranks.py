"""Model of the ranks of a tensor-parallel group: checks R1 to R3 for every order of events.

The scheduler is not modelled: a step is a number. Rank 0's main thread writes a step into a slot
and puts its number in a queue. Rank 0's launch thread sends the number to each worker through a
pipe and computes its own part. All ranks finish a step together, because each step contains many
collectives. The main thread settles a step once all ranks have finished it. At any moment a rank
may die, and the main thread may be interrupted, which is followed by a reset.

    python -m spec.ranks                           # all configurations: states, violations
    python -m spec.ranks --seed-bug one-slot       # a broken rule and its shortest counterexample
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

BUGS = ("one-slot", "settle-on-rank-0", "launch-in-main", "no-watch")


class GroupConfig(NamedTuple):
    """Parameters of a group.

    Attributes:
        num_ranks, num_slots: of the group. depth: number of unsettled steps allowed when the next
            one is written.
        num_steps: steps to compute. may_die, may_interrupt: whether that may happen, once.
    """

    num_ranks: int
    num_slots: int
    depth: int
    num_steps: int
    may_die: bool = True
    may_interrupt: bool = True


class State(NamedTuple):
    """The state of a group, in numbers of steps.

    Attributes:
        num_written: steps that got a number. num_settled: settled steps, in the order of ``put``.
        slots: the step in each slot, -1 for none.
        put: the steps put, in order. sent: how many of them the launch thread has sent.
        started, finished: how many of them each rank has started and finished, in order.
        dead: the rank that died, or -1. interrupts: number of interrupts.
        is_resetting: after an interrupt. is_failed: every request has ended with an error.
        left: number of steps before the one that rank 0 left between two collectives, or -1;
            only if the main thread launches.
        broken: the violated property, or "".
    """

    num_written: int
    num_settled: int
    slots: tuple[int, ...]
    put: tuple[int, ...]
    sent: int
    started: tuple[int, ...]
    finished: tuple[int, ...]
    dead: int = -1
    interrupts: int = 0
    is_resetting: bool = False
    is_failed: bool = False
    left: int = -1
    broken: str = ""


def initial(config: GroupConfig) -> State:
    """No step was written."""
    nothing = (0,) * config.num_ranks
    return State(0, 0, (-1,) * config.num_slots, (), 0, nothing, nothing)


def actions(config: GroupConfig, state: State, bug: str = "") -> Iterator[tuple[str, State]]:
    """All possible next events, by name."""
    if state.is_failed:
        return
    yield from _main(config, state, bug)
    yield from _ranks(config, state)
    if config.may_die and state.dead < 0:
        for rank in range(1, config.num_ranks):
            yield f"rank {rank} dies", state._replace(dead=rank)


def _main(config: GroupConfig, state: State, bug: str) -> Iterator[tuple[str, State]]:
    """Rank 0's main thread."""
    if state.dead >= 0 and bug != "no-watch":
        yield "the loss is noticed", state._replace(is_failed=True)
    launched = state.started[0] == len(state.put)
    if state.is_resetting:
        if launched:  # the launch thread has passed the mark
            settled = len(state.put)
            yield "reset", state._replace(is_resetting=False, num_settled=settled)
        return
    unsettled = len(state.put) - state.num_settled
    if launched and unsettled <= config.depth and len(state.put) < config.num_steps:
        step = state.num_written
        place = step % config.num_slots
        slots = (*state.slots[:place], step, *state.slots[place + 1 :])
        after = state._replace(num_written=step + 1, slots=slots, put=(*state.put, step))
        if bug == "launch-in-main":  # this thread puts and launches in one operation
            started = (state.started[0] + 1, *state.started[1:])
            after = after._replace(sent=state.sent + 1, started=started)
        yield f"step {step} is put", after
        if config.may_interrupt and not state.interrupts:
            written = state._replace(num_written=step + 1, slots=slots, interrupts=1)
            yield f"interrupt before step {step} is put", written._replace(is_resetting=True)
            late = after._replace(interrupts=1, is_resetting=True)
            if bug == "launch-in-main":
                late = late._replace(left=len(state.put))
            yield f"interrupt after step {step} is put", late
    finished = state.finished[:1] if bug == "settle-on-rank-0" else state.finished
    if unsettled and min(finished) > state.num_settled:
        broken = "" if min(state.finished) > state.num_settled else "R2"
        after = state._replace(num_settled=state.num_settled + 1, broken=broken)
        yield f"step {state.put[state.num_settled]} settles", after


def _ranks(config: GroupConfig, state: State) -> Iterator[tuple[str, State]]:
    """Rank 0's launch thread, and the workers."""
    if state.sent < len(state.put) and state.sent == state.started[0]:
        yield f"step {state.put[state.sent]} is sent", state._replace(sent=state.sent + 1)
    for rank in range(config.num_ranks):
        if rank == state.dead:
            continue
        number = state.started[rank]
        is_free = state.finished[rank] == number or (rank == 0 and state.left >= 0)
        if number < state.sent and is_free:
            step = state.put[number]
            found = state.slots[step % config.num_slots]
            yield (
                f"rank {rank} starts step {step}",
                state._replace(
                    started=_with(state.started, rank, number + 1),
                    broken="" if found == step else "R1",
                ),
            )
        # The last collective of a step needs every rank's part.
        own = state.finished[rank]
        if own < number and min(state.started) > own and own != state.left:
            after = _with(state.finished, rank, own + 1)
            yield f"rank {rank} finishes step {state.put[own]}", state._replace(finished=after)


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


class Violation(NamedTuple):
    """A property, and the shortest path to its violation."""

    property_id: str
    path: tuple[str, ...]


def check(config: GroupConfig, bug: str = "") -> tuple[int, Violation | None]:
    """The number of states, and the first violation: R1, R2, or R3 if nothing can happen although
    steps are left and no error was raised."""
    first = initial(config)
    come_from: dict[State, tuple[State, str] | None] = {first: None}
    todo = deque([first])
    while todo:
        state = todo.popleft()
        following = list(actions(config, state, bug))
        is_done = state.num_settled == config.num_steps or state.is_failed
        broken = state.broken or ("R3" if not is_done and not _moves(following) else "")
        if broken:
            return len(come_from), Violation(broken, _path(come_from, state))
        for name, after in following:
            if after not in come_from:
                come_from[after] = state, name
                todo.append(after)
    return len(come_from), None


def _moves(following: list[tuple[str, State]]) -> bool:
    """Whether any event other than a death or an interrupt is possible."""
    return any(not name.endswith("dies") for name, _ in following)


def _path(come_from: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    names = []
    while (step := come_from[state]) is not None:
        state, name = step
        names.append(name)
    return tuple(reversed(names))


CONFIGS = tuple(
    GroupConfig(num_ranks, num_slots=4, depth=depth, num_steps=num_steps)
    for num_ranks, depth, num_steps in ((2, 0, 5), (2, 1, 6), (3, 1, 5), (4, 1, 3))
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed-bug", choices=BUGS, default="")
    bug = parser.parse_args().seed_bug
    for config in CONFIGS:
        chosen = config._replace(num_slots=1) if bug == "one-slot" else config
        num_states, violation = check(chosen, bug)
        found = "no violation" if violation is None else f"{violation.property_id} violated"
        print(f"{chosen}: {num_states:,} states, {found}")
        if violation is not None:
            print("\n".join(f"  {name}" for name in violation.path))
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
