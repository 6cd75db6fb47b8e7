"""Model of the flags of an all-reduce over peer memory: checks R4 and R5 for every order of writes.

The model has one chunk and repeated calls. In call n each rank pushes its part into the box that
every peer has for it, then sets its flag there to n. Then it waits for the flag of each peer, in
order, and reads that part. Each box has two halves, used alternately. No rank waits for the
readers; the model checks that a fast rank never overwrites a part that a slow rank still reads.

    python -m spec.flags                           # states, violations
    python -m spec.flags --seed-bug equality       # a broken rule and its shortest counterexample
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

BUGS = ("equality", "one-half", "flag-first")


class State(NamedTuple):
    """The state of N ranks.

    Attributes:
        calls: the present call of each rank, from 1.
        places: its next operation in that call: writes 0 to 2 (N - 1) - 1, then the reads.
        boxes: by owner, sender and half: the call whose part is stored there, 0 for none.
        flags: by owner and sender: the latest value set.
        broken: "R4" after a rank has read the part of another call.
    """

    calls: tuple[int, ...]
    places: tuple[int, ...]
    boxes: tuple[int, ...]
    flags: tuple[int, ...]
    broken: str = ""


def initial(num_ranks: int) -> State:
    pairs = num_ranks * num_ranks
    return State((1,) * num_ranks, (0,) * num_ranks, (0,) * (2 * pairs), (0,) * pairs)


def actions(state: State, num_ranks: int, num_calls: int, bug: str) -> Iterator[tuple[str, State]]:
    """All possible next events: one write, or one read, of any rank."""
    for rank in range(num_ranks):
        call, place = state.calls[rank], state.places[rank]
        if call > num_calls:
            continue
        peers = [peer for peer in range(num_ranks) if peer != rank]
        kind, index = divmod(place, len(peers))
        peer = peers[index]
        half = 0 if bug == "one-half" else call % 2
        if kind == 2:
            seen = state.flags[rank * num_ranks + peer]
            is_there = seen == call if bug == "equality" else seen >= call
            if is_there:
                found = state.boxes[2 * (rank * num_ranks + peer) + half]
                after = _advanced(state, rank, 3 * len(peers))
                after = after._replace(broken="" if found == call else "R4")
                yield f"rank {rank} reads what rank {peer} pushed in call {call}", after
        elif (kind == 0) == (bug != "flag-first"):
            at = 2 * (peer * num_ranks + rank) + half
            boxes = (*state.boxes[:at], call, *state.boxes[at + 1 :])
            after = _advanced(state, rank, 3 * len(peers))._replace(boxes=boxes)
            yield f"rank {rank} pushes call {call} to rank {peer}", after
        else:
            at = peer * num_ranks + rank
            flags = (*state.flags[:at], call, *state.flags[at + 1 :])
            after = _advanced(state, rank, 3 * len(peers))._replace(flags=flags)
            yield f"rank {rank} sets its flag at rank {peer} to {call}", after


def _advanced(state: State, rank: int, num_places: int) -> State:
    call, place = state.calls[rank], state.places[rank] + 1
    if place == num_places:
        call, place = call + 1, 0
    return state._replace(
        calls=(*state.calls[:rank], call, *state.calls[rank + 1 :]),
        places=(*state.places[:rank], place, *state.places[rank + 1 :]),
    )


class Searched(Protocol):
    """A state of a model; its property ``broken`` names a violated property, or is empty."""

    @property
    def broken(self) -> str: ...


S = TypeVar("S", bound=Searched)


def search(
    first: S,
    actions: Callable[[S], Iterable[tuple[str, S]]],
    is_done: Callable[[S], bool],
) -> tuple[int, str, tuple[str, ...]]:
    """The number of states, and the first violation with its shortest path: a state's own, or R5 if
    nothing can happen although calls are left; "" for none."""
    come_from: dict[S, tuple[S, str] | None] = {first: None}
    todo = deque([first])
    while todo:
        state = todo.popleft()
        following = list(actions(state))
        broken = state.broken or ("" if following or is_done(state) else "R5")
        if broken:
            names = []
            while (step := come_from[state]) is not None:
                state, name = step
                names.append(name)
            return len(come_from), broken, tuple(reversed(names))
        for name, after in following:
            if after not in come_from:
                come_from[after] = state, name
                todo.append(after)
    return len(come_from), "", ()


def check(num_ranks: int, num_calls: int, bug: str = "") -> tuple[int, str, tuple[str, ...]]:
    """The result of :func:`search`: R4, R5 or ""."""
    return search(
        initial(num_ranks),
        lambda state: actions(state, num_ranks, num_calls, bug),
        lambda state: min(state.calls) > num_calls,
    )


SCOPES = ((2, 6), (3, 3))
"""(ranks, calls)."""


def run(
    doc: str,
    bugs: Sequence[str],
    label: str,
    scopes: Iterable[tuple[Any, ...]],
    check: Callable[..., tuple[int, str, tuple[str, ...]]],
) -> int:
    """A program that checks a model, or a broken rule of it, and prints what it finds.

    Args:
        label: a format for a scope. check: called with a scope, and ``bug``.

    Returns:
        The exit status: 1 after a violation.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--seed-bug", choices=bugs, default="")
    bug = parser.parse_args().seed_bug
    for scope in scopes:
        num_states, broken, path = check(*scope, bug=bug)
        found = f"{broken} violated" if broken else "no violation"
        print(f"{label.format(*scope)}: {num_states:,} states, {found}")
        if broken:
            print("\n".join(f"  {name}" for name in path))
            return 1
    return 0


def main() -> int:
    return run(__doc__, BUGS, "{} ranks, {} calls", SCOPES, check)


if __name__ == "__main__":
    raise SystemExit(main())
