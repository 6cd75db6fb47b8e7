"""Model of a two-shot all-reduce over peer memory: checks R4 and R5 for every order of writes.

The model has one row per rank, its owner, and repeated calls. In call n a rank has these programs,
in this order: for each peer, "push" writes this rank's part of the peer's row into the peer's box,
then sets a flag there to n. "sum" waits for the flags of all peers, in order, and reads their
parts. It then writes the sum to each peer, and sets a flag there. For each peer, "finish" waits for
its flag and reads its sum. A rank starts programs in order, at most ``num_slots`` at a time, and
the next call after all programs of a call have ended. Boxes have no halves. The places of sums
change from call to call, as they do when calls have rows of other sizes.

    python -m spec.two_shot                          # states, violations
    python -m spec.two_shot --seed-bug early-call    # a broken rule and its shortest counterexample
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .flags import run, search

BUGS = ("flag-first", "early-call", "finish-before-sum")

Step = tuple[str, int]
"""An operation and its peer: "write" or "flag" of a part, "read" of a part, "send" or "answer" of a
sum, "finish"."""


class State(NamedTuple):
    """The state of N ranks.

    Attributes:
        calls: the present call of each rank, from 1.
        places: per rank, the next operation of each of its programs.
        parts, flags: by owner of the memory and sender: the call whose part is stored there, and
            the latest value of the flag of parts.
        sums: by owner of the memory and place: (call, sender) of the sum stored there.
        answers: by owner of the memory and sender: the latest value of the flag of sums.
        broken: "R4" after a rank has read the data of another call or row.
    """

    calls: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    parts: tuple[int, ...]
    flags: tuple[int, ...]
    sums: tuple[tuple[int, int], ...]
    answers: tuple[int, ...]
    broken: str = ""


def programs(rank: int, num_ranks: int, bug: str) -> list[list[Step]]:
    """The programs of a rank in one call, in order."""
    peers = [peer for peer in range(num_ranks) if peer != rank]
    write, flag = ("flag", "write") if bug == "flag-first" else ("write", "flag")
    pushes = [[(write, peer), (flag, peer)] for peer in peers]
    kinds = "read", "send", "answer"
    sums: list[list[Step]] = [[(kind, peer) for kind in kinds for peer in peers]]
    ends: list[list[Step]] = [[("finish", peer)] for peer in peers]
    return pushes + (ends + sums if bug == "finish-before-sum" else sums + ends)


def initial(num_ranks: int, bug: str = "") -> State:
    pairs = num_ranks * num_ranks
    places = tuple((0,) * len(programs(rank, num_ranks, bug)) for rank in range(num_ranks))
    zeros = (0,) * pairs
    return State((1,) * num_ranks, places, zeros, zeros, ((0, 0),) * pairs, zeros)


def actions(
    state: State, num_ranks: int, num_calls: int, num_slots: int, bug: str
) -> Iterator[tuple[str, State]]:
    """All possible next events: one operation of any running program."""
    for rank, call in enumerate(state.calls):
        if call > num_calls:
            continue
        steps = programs(rank, num_ranks, bug)
        places = state.places[rank]
        left = [number for number, place in enumerate(places) if place < len(steps[number])]
        for number in left[:num_slots]:
            kind, peer = steps[number][places[number]]
            after = _after(state, rank, kind, peer, num_ranks)
            if after is not None:
                name = f"rank {rank}, call {call}: {kind}, rank {peer}"
                yield name, _advanced(after, rank, number, steps, bug)


def _after(state: State, rank: int, kind: str, peer: int, num_ranks: int) -> State | None:
    """The state after an operation; None if it must wait."""
    call = state.calls[rank]
    here, there = rank * num_ranks + peer, peer * num_ranks + rank
    if kind == "write":
        return state._replace(parts=_with(state.parts, there, call))
    if kind == "flag":
        return state._replace(flags=_with(state.flags, there, call))
    if kind == "answer":
        return state._replace(answers=_with(state.answers, there, call))
    if kind == "send":
        at = peer * num_ranks + (rank + call) % num_ranks
        return state._replace(sums=_with(state.sums, at, (call, rank)))
    if kind == "read":
        is_right = state.parts[here] == call
        is_there = state.flags[here] >= call
    else:
        at = rank * num_ranks + (peer + call) % num_ranks
        is_right = state.sums[at] == (call, peer)
        is_there = state.answers[here] >= call
    return state._replace(broken="" if is_right else "R4") if is_there else None


def _advanced(state: State, rank: int, number: int, steps: list[list[Step]], bug: str) -> State:
    """The state after an operation of a program of ``rank``: its next one, or the next call."""
    places = _with(state.places[rank], number, state.places[rank][number] + 1)
    waited_for = [
        place == len(program)
        for place, program in zip(places, steps, strict=True)
        if bug != "early-call" or program[0][0] != "finish"
    ]
    calls = state.calls
    if all(waited_for):
        calls, places = _with(calls, rank, calls[rank] + 1), (0,) * len(places)
    return state._replace(calls=calls, places=_with(state.places, rank, places))


def _with(values: tuple, at: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:at], value, *values[at + 1 :])


def check(
    num_ranks: int, num_calls: int, num_slots: int, bug: str = ""
) -> tuple[int, str, tuple[str, ...]]:
    """The result of :func:`.flags.search`: R4, R5 or ""."""
    return search(
        initial(num_ranks, bug),
        lambda state: actions(state, num_ranks, num_calls, num_slots, bug),
        lambda state: min(state.calls) > num_calls,
    )


SCOPES = ((2, 6, 1), (2, 6, 3), (3, 3, 1), (3, 3, 2))
"""(ranks, calls, slots)."""


def main() -> int:
    return run(__doc__, BUGS, "{} ranks, {} calls, {} slots", SCOPES, check)


if __name__ == "__main__":
    raise SystemExit(main())
