"""Fair shares: the order of service among owners under the policy "fair".

Each owner's requests are queued first come, first served. An owner's next request gets its *turn*
when none of that owner's requests waits: it then gets its final rank and joins the waiting
requests.

The rank is a virtual time, in ticks. An owner's account is the start of its next turn: each turn
advances it by the expected cost of the request, prompt and answer, and the end of the request
corrects it to the actual cost. The clock is the latest admitted start. A turn starts at most
``credit`` before the clock, which limits what an idle owner saves up. Each turn also advances the
clock by one tick, so that a stream of new owners cannot go first forever.

This is deficit round robin with a quantum of one token: per turn of the clock each owner with
requests gets its share, and service beyond that share is charged to it.
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
        """Queue behind earlier arrivals of its owner that had no turn yet."""
        self.queued.append(r)
        self.queued.sort()
        self.take_turns(self.requests[r].owner)

    def join_waiting(self, r: int) -> None:
        """A request that had its turn waits at its rank; another one is queued."""
        if self.requests[r].rank[0] == NEVER:
            self.queue_up(r)
        else:
            self.enter(self.waiting, r)

    def take_turns(self, owner: int) -> None:
        """S53: every owner with requests has a waiting one."""
        if self.queued and not any(self.requests[r].owner == owner for r in self.waiting):
            r = self.next_of(owner)
            if r is not None:
                self.give_turn(r)

    def next_of(self, owner: int) -> int | None:
        """S53: first come, first served within an owner."""
        return next((r for r in self.queued if self.requests[r].owner == owner), None)

    def give_turn(self, r: int) -> None:
        """Siblings share the leader's turn, and rank behind it."""
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
        self.new_turns.append(r)

    def earliest(self) -> int:
        """The earliest start of a turn."""
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
