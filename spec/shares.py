"""Fair shares: the order of service among owners under the policy "fair".

Each owner's requests queue first come first served. An owner's next request gets its *turn* once
none of that owner's requests waits: it gets its rank then, for ever, and joins the waiting ones.

The rank is a virtual time, in ticks. An owner's account is where its next turn starts: each turn
moves it by what the request is expected to cost, prompt and answer, and the end of the request
corrects it to what was computed. The clock is the latest start that was admitted. A turn starts no
more than ``credit`` before the clock, so that an idle owner saves up no more than that. Each turn
also moves the clock by one tick, so that no stream of new owners goes first for ever.

This is deficit round robin with a quantum of one token: per turn of the clock each owner with
requests is served its due, and what it was served beyond that is held against it.
"""

from __future__ import annotations

from .slots import StateSlots
from .state import NEVER, Request, Scope


def expected_cost(request: Request, scope: Scope) -> int:
    """Ticks that a turn is charged: the prompt, and an answer of at most ``reply`` tokens."""
    answer = min(request.limit - request.num_prompt, scope.reply)
    return scope.ticks * (request.num_prompt + answer)


class Shares(StateSlots):
    @property
    def is_fair(self) -> bool:
        return self.scope.policy == "fair"

    def enter(self, queue: list[int], r: int) -> None:
        queue.append(r)
        queue.sort(key=lambda q: self.requests[q].rank)

    # ------------------------------------------------------------------ turns
    def queue_up(self, r: int) -> None:
        """Behind those of its owner that arrived before it and had no turn yet."""
        self.queued.append(r)
        self.queued.sort()
        self.take_turns(self.requests[r].owner)

    def join_waiting(self, r: int) -> None:
        """A request that had its turn waits at its rank; another queues."""
        if self.requests[r].rank[0] == NEVER:
            self.queue_up(r)
        else:
            self.enter(self.waiting, r)

    def take_turns(self, owner: int) -> None:
        """S53: no owner that has requests goes without one that waits."""
        if self.queued and not any(self.requests[r].owner == owner for r in self.waiting):
            r = self.next_of(owner)
            if r is not None:
                self.give_turn(r)

    def next_of(self, owner: int) -> int | None:
        """S53: first come first served within an owner."""
        return next((r for r in self.queued if self.requests[r].owner == owner), None)

    def give_turn(self, r: int) -> None:
        """Siblings have the leader's turn, and ranks behind it."""
        owner = self.requests[r].owner
        group = [r, *(s for s in self.pending if self.requests[s].leader == r)]
        self.clock += 1
        account, last = self.shares.get(owner, (0, 0))
        start = max(self.earliest(), account, last)
        for member in group:
            cost = self.cost(self.requests[member])
            self.update(member, rank=(start, member), charge=cost, turn=self.clock)
            account = max(account, start) + cost
        self.shares[owner] = account, start
        self.queued.remove(r)
        self.enter(self.waiting, r)
        self.risen.append(r)

    def earliest(self) -> int:
        """Where a turn may start."""
        return self.clock - self.scope.credit

    def cost(self, request: Request) -> int:
        return expected_cost(request, self.scope)

    def note_admission(self, r: int) -> None:
        if self.is_fair:
            self.clock = max(self.clock, self.requests[r].rank[0])

    # ------------------------------------------------------------------ charges
    def settle_charge(self, r: int) -> None:
        """At its end a request has cost the tokens it has, or nothing if none was computed."""
        request = self.requests[r]
        if not self.is_fair or request.rank[0] == NEVER:
            return
        is_computed = request.computed or len(request.tokens) > request.num_prompt
        cost = self.scope.ticks * len(request.tokens) if is_computed else 0
        account, last = self.shares[request.owner]
        self.shares[request.owner] = account + cost - request.charge, last
        self.update(r, charge=cost)
