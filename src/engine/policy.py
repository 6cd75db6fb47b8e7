"""Scheduling policies: each gives a request its rank at arrival, so that the order is static.

Each policy adds a bounded delay to the arrival number ``s``: ``rank = s + min(K, delay)``. A
request that arrives more than ``K`` later always ranks behind, so at most ``K`` later arrivals are
ever served before a request (L5), whatever the policy: waiting *is* ageing. And because a rank
never changes, "elder" is a total order and the liveness proof is one for all policies.
"""

from __future__ import annotations

from ..errors import InvalidInputError
from .request import Request

# Ranks are compared once a row and step: one integer is cheaper to compare than a tuple.
SENIORITY_BITS = 48

ARRIVALS_PER_PRIORITY = 16
"""A request of priority p yields to more urgent ones among the next 16 * p arrivals."""

TOKENS_PER_ARRIVAL = 64
"""Under shortest first, a request yields one later arrival for each so many tokens of its own."""

_MAX_OVERTAKES = {"fcfs": 0, "shortest_first": 256, "priority": 4096}

MAX_PRIORITY = _MAX_OVERTAKES["priority"] // ARRIVALS_PER_PRIORITY
"""The least urgent priority a caller may give: any beyond it would be served as this one is."""


class Policy:
    """Gives each arrival its rank.

    Args:
        name: "fcfs", "shortest_first" or "priority".
        max_overtakes: K, how many later arrivals may be served before a request; None takes the
            policy's own (0, 256, 4096).
        tokens_per_arrival: how much length is worth one place, under "shortest_first".
        arrivals_per_priority: how many places a level of priority is worth, under "priority"
            (0 is the most urgent; a caller gives it as ``"priority"`` of a prompt's dict).
    """

    def __init__(
        self,
        name: str = "fcfs",
        max_overtakes: int | None = None,
        *,
        tokens_per_arrival: int = TOKENS_PER_ARRIVAL,
        arrivals_per_priority: int = ARRIVALS_PER_PRIORITY,
    ) -> None:
        if not isinstance(name, str) or name not in _MAX_OVERTAKES:
            raise InvalidInputError("policy", name, f"must be one of {sorted(_MAX_OVERTAKES)}")
        self.name = name
        self.max_overtakes = _MAX_OVERTAKES[name] if max_overtakes is None else max_overtakes
        self.tokens_per_arrival = tokens_per_arrival
        self.arrivals_per_priority = arrivals_per_priority

    def rank(self, request: Request) -> int:
        """Smaller is served first. Reads ``seniority``, ``priority`` and ``max_num_tokens``."""
        delay = 0
        if self.name == "shortest_first":
            delay = request.max_num_tokens // self.tokens_per_arrival
        elif self.name == "priority":
            delay = request.priority * self.arrivals_per_priority
        place = request.seniority + min(self.max_overtakes, max(0, delay))
        return (place << SENIORITY_BITS) | request.seniority
