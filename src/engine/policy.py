"""The order in which requests are served: a rank fixed at arrival, so that the order is static.

Each policy adds a bounded delay to the arrival number ``s``: ``rank = s + min(K, delay)``. A
request that arrives more than ``K`` later always ranks behind, so at most ``K`` later arrivals are
ever served before a request (L5), whatever the policy: waiting *is* ageing. And because a rank
never changes, "elder" is a total order and the liveness proof is one for all policies.
"""

from __future__ import annotations

from collections.abc import Callable

from pagespec.engine.request import Request
from pagespec.errors import InvalidInputError

# Ranks are compared once a row and step: one integer is cheaper to compare than a tuple.
_SENIORITY_BITS = 48

AGEING_ARRIVALS_PER_PRIORITY = 16
"""A request of priority p yields to requests of priority 0 among the next 16 * p arrivals."""

TOKENS_PER_ARRIVAL = 64
"""Under shortest first, a request yields one later arrival for each so many tokens of its own."""


def _no_delay(_request: Request) -> int:
    return 0


def _delay_by_length(request: Request) -> int:
    return request.max_num_tokens // TOKENS_PER_ARRIVAL


def _delay_by_priority(request: Request) -> int:
    return request.priority * AGEING_ARRIVALS_PER_PRIORITY


_POLICIES: dict[str, tuple[Callable[[Request], int], int]] = {
    "fcfs": (_no_delay, 0),
    "shortest_first": (_delay_by_length, 256),
    "priority": (_delay_by_priority, 4096),
}


class Policy:
    """Gives each arrival its rank.

    Args:
        name: "fcfs", "shortest_first" or "priority".
        max_overtakes: K, how many later arrivals may be served before a request; None takes the
            policy's own (0, 256, 4096).
    """

    def __init__(self, name: str = "fcfs", max_overtakes: int | None = None) -> None:
        if name not in _POLICIES:
            raise InvalidInputError("policy", name, f"must be one of {sorted(_POLICIES)}")
        self.name = name
        self._delay, default = _POLICIES[name]
        self.max_overtakes = default if max_overtakes is None else max_overtakes

    def rank(self, request: Request) -> int:
        """Smaller is served first. Reads ``seniority``, ``priority`` and ``max_num_tokens``."""
        delay = min(self.max_overtakes, max(0, self._delay(request)))
        return ((request.seniority + delay) << _SENIORITY_BITS) | request.seniority
