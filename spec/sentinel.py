"""Model of an exchange by sentinel values, without flags: checks R4 and R5 for every write order.

The model has one row and repeated calls. In call n each rank pushes its part into the box that
every peer has for it, which must contain the sentinel. Then, for each peer in order, it waits until
its own box contains no sentinel, reads the part, and writes the sentinel back. In a two-shot call
ranks push their parts to rank 0 only, which reads all parts and then pushes the sum to each. Each
box has two halves, used alternately. No rank waits for the readers; the model checks that no rank
overwrites unread data, whichever calls are two-shot.

    python -m spec.sentinel                        # states, violations
    python -m spec.sentinel --seed-bug one-half    # a broken rule and its shortest counterexample
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .flags import run, search

BUGS = ("one-half", "no-clear", "clear-late")


class State(NamedTuple):
    """The state of N ranks.

    Attributes:
        calls: the present call of each rank, from 1.
        places: its next operation in that call.
        boxes: by owner, sender and half: the call whose part is stored there, 0 for the sentinel.
        broken: "R4" once a part was lost, or a part of another call was read.
    """

    calls: tuple[int, ...]
    places: tuple[int, ...]
    boxes: tuple[int, ...]
    broken: str = ""


def initial(num_ranks: int) -> State:
    return State((1,) * num_ranks, (0,) * num_ranks, (0,) * (2 * num_ranks * num_ranks))


def actions(
    state: State, num_ranks: int, num_calls: int, shots: str, bug: str
) -> Iterator[tuple[str, State]]:
    """All possible next events: one write, or one read, of any rank."""
    for rank in range(num_ranks):
        call, place = state.calls[rank], state.places[rank]
        if call > num_calls:
            continue
        peers = [peer for peer in range(num_ranks) if peer != rank]
        is_two_shot = shots[call % len(shots)] == "2"
        steps = _two_shot(rank, peers, call) if is_two_shot else _steps(peers, call, bug)
        kind, peer, of_call = steps[place]
        half = 0 if bug == "one-half" else of_call % 2
        owner, sender = (peer, rank) if kind == "push" else (rank, peer)
        at = 2 * (owner * num_ranks + sender) + half
        found, then, is_broken = state.boxes[at], state.boxes[at], False
        if kind == "push":
            then, is_broken = call, found != 0 and bug != "no-clear"
        elif kind == "read":
            if found == 0:
                continue
            is_broken = found != call
        else:
            then = 0
        place += 1
        if place == len(steps):
            call, place = call + 1, 0
        yield (
            f"rank {rank}, call {state.calls[rank]}: {kind}, rank {peer}",
            State(
                (*state.calls[:rank], call, *state.calls[rank + 1 :]),
                (*state.places[:rank], place, *state.places[rank + 1 :]),
                (*state.boxes[:at], then, *state.boxes[at + 1 :]),
                "R4" if is_broken else "",
            ),
        )


def _steps(peers: list[int], call: int, bug: str) -> list[tuple[str, int, int]]:
    """(operation, peer, the call whose half it uses) for all operations of a rank in a call."""
    pushes = [("push", peer, call) for peer in peers]
    reads = [("read", peer, call) for peer in peers]
    clears = [("clear", peer, call) for peer in peers]
    if bug == "no-clear":
        return pushes + reads
    if bug == "clear-late":  # in the next call, after the push that lets the peer continue
        late = [("clear", peer, call - 1) for peer in peers] if call > 1 else []
        return pushes + reads + late
    return pushes + [step for pair in zip(reads, clears, strict=True) for step in pair]


def _two_shot(rank: int, peers: list[int], call: int) -> list[tuple[str, int, int]]:
    """The same in a two-shot call, of rank 0's row."""
    if rank:
        return [("push", 0, call), ("read", 0, call), ("clear", 0, call)]
    reads = [(kind, peer, call) for peer in peers for kind in ("read", "clear")]
    return reads + [("push", peer, call) for peer in peers]


def check(
    num_ranks: int, num_calls: int, shots: str, bug: str = ""
) -> tuple[int, str, tuple[str, ...]]:
    """The result of :func:`.flags.search`: R4, R5 or ""."""
    return search(
        initial(num_ranks),
        lambda state: actions(state, num_ranks, num_calls, shots, bug),
        lambda state: min(state.calls) > num_calls,
    )


SCOPES = (
    (2, 6, "1"),
    (3, 3, "1"),
    (2, 16, "2"),
    (3, 5, "2"),
    (3, 4, "12"),
    (3, 4, "21"),
    (3, 5, "1122"),
)
"""(ranks, calls, which of them are one-shot or two-shot: a cycle)."""


def main() -> int:
    return run(__doc__, BUGS, "{} ranks, {} calls, shots {}", SCOPES, check)


if __name__ == "__main__":
    raise SystemExit(main())
