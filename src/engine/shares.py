"""Fair shares: the order of service among owners under the policy "fair".

Each owner's requests are queued first come, first served. An owner's next request gets its *turn*
when none of that owner's requests waits: it then gets its rank and joins the waiting requests.

The rank is a virtual time, in ticks. An owner's account is the start of its next turn. A turn
advances the account by the expected cost of the request; when the request ends, the account is
corrected to the tokens that were computed. The clock is the latest admitted start. A turn starts at
most ``credit`` before the clock, and each turn advances the clock by one tick. This is deficit
round robin among owners; ``spec/shares.py`` has the same rules, and the properties that follow (S53
to S55, L5).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from .policy import SENIORITY_BITS, UNRANKED, Policy
from .request import Request

_by_seniority = attrgetter("seniority")
_NUM_KEPT_OWNERS = 1024  # beyond this many, accounts of idle owners are dropped


class _Owner:
    """Attributes:
    account: start of its next turn, in ticks. last_start: start of its latest turn.
    queued: its requests without a turn, in the order of arrival.
    num_waiting: number of its waiting requests. num_charged: its live requests with a turn.
    """

    __slots__ = ("account", "last_start", "num_charged", "num_waiting", "queued")

    def __init__(self) -> None:
        self.account = self.last_start = self.num_waiting = self.num_charged = 0
        self.queued: list[Request] = []


class Shares:
    """The accounts of all owners. Operations take constant time, except on one owner's queue."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._clock = policy.credit
        self._owners: dict[str, _Owner] = {}
        self._num_kept = _NUM_KEPT_OWNERS

    def queued(self) -> list[Request]:
        """Requests without a turn, in the order of arrival."""
        return sorted((r for o in self._owners.values() for r in o.queued), key=_by_seniority)

    # Life cycle of a request -------------------------------------------------------------------

    def queue(self, request: Request) -> None:
        """Queue a request without a turn, behind earlier arrivals of its owner."""
        owner = self._owners.get(request.owner)
        if owner is None:
            self._drop_idle_owners()
            owner = self._owners[request.owner] = _Owner()
        insort(owner.queued, request, key=_by_seniority)

    def unqueue(self, request: Request) -> None:
        """Remove a request that had no turn."""
        queued = self._owners[request.owner].queued
        del queued[bisect_left(queued, request.seniority, key=_by_seniority)]

    def note_waiting(self, request: Request, change: int) -> None:
        """Count a request that joins (1) or leaves (-1) the waiting requests."""
        self._owners[request.owner].num_waiting += change

    def take_turn(self, name: str) -> Request | None:
        """Dequeue and return the owner's next request if none of the owner's requests waits; the
        caller then gives it its turn. Else None."""
        owner = self._owners.get(name)
        if owner is None or owner.num_waiting or not owner.queued:
            return None
        return owner.queued.pop(0)

    def give_ranks(self, group: Sequence[Request]) -> None:
        """Rank a request and its siblings: their turn."""
        policy, owner = self._policy, self._owners[group[0].owner]
        self._clock += 1
        start = max(self._clock - policy.credit, owner.account, owner.last_start)
        owner.account = owner.last_start = start
        for request in group:
            request.rank = start << SENIORITY_BITS | request.seniority
            request.charge = policy.expected_cost(request)
            owner.account += request.charge
        owner.num_charged += len(group)

    def note_admission(self, request: Request) -> None:
        self._clock = max(self._clock, request.rank >> SENIORITY_BITS)

    def settle_charge(self, request: Request) -> None:
        """Correct the charge of a request that ends to the tokens it has, or to 0 if none was
        computed."""
        if request.rank >= UNRANKED:
            return
        is_computed = request.num_computed or len(request.token_ids) > request.num_prompt_tokens
        cost = self._policy.ticks_per_token * len(request.token_ids) if is_computed else 0
        owner = self._owners[request.owner]
        owner.account += cost - request.charge
        owner.num_charged -= 1
        request.charge = cost

    def _drop_idle_owners(self) -> None:
        """Drop owners whose accounts affect no rank. The next sweep runs when the number of records
        has doubled, so that its cost is amortised over as many arrivals."""
        if len(self._owners) < self._num_kept:
            return
        earliest = self._clock + 1 - self._policy.credit
        self._owners = {
            name: owner
            for name, owner in self._owners.items()
            if owner.queued
            or owner.num_waiting
            or owner.num_charged
            or max(owner.account, owner.last_start) > earliest
        }
        self._num_kept = max(_NUM_KEPT_OWNERS, 2 * len(self._owners))

    def accounts(self) -> dict[str, tuple[int, int]]:
        """Per owner that had a turn: its account and the start of its latest turn, in ticks."""
        return {
            name: (owner.account, owner.last_start)
            for name, owner in self._owners.items()
            if owner.last_start
        }

    @property
    def clock(self) -> int:
        """Ticks."""
        return self._clock
