"""Scheduling policies: each assigns a request's rank once, so that the order is static.

The policy "fair" ranks requests by their owner (see ``shares``). Every other policy ranks them at
arrival: it adds a bounded delay to the arrival number ``s``: ``rank = s + min(K, delay)``.
A request that arrives more than ``K`` later always ranks behind. So at most ``K`` later arrivals
are ever served before a request (L5), under any policy; no separate ageing is needed. Because a
rank never changes, "older" is a total order, and one liveness proof covers all policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidInputError

if TYPE_CHECKING:
    from .request import Request

# Ranks are compared per row and step: comparing one integer is cheaper than comparing a tuple.
SENIORITY_BITS = 48

ARRIVALS_PER_PRIORITY = 16
"""A request of priority p yields to more urgent ones among the next 16 * p arrivals."""

TOKENS_PER_ARRIVAL = 64
"""Under shortest first, a request yields to one later arrival per this many tokens of its own."""

UNRANKED = 1 << 62 << SENIORITY_BITS
"""Smallest rank of requests that had no turn yet, under the policy "fair"."""

TICKS_PER_TOKEN = 64
CREDIT_TOKENS = 2048
"""Under fair, an owner that was idle may be served this many tokens ahead of the others."""

REPLY_TOKENS = 256
"""Under fair, the assumed maximum length of an answer, in tokens, until it has ended."""

MAX_OVERTAKES = {"fcfs": 0, "fair": 0, "shortest_first": 256, "priority": 4096}
"""By policy name: how many later arrivals may be served before a request."""

MAX_PRIORITY = MAX_OVERTAKES["priority"] // ARRIVALS_PER_PRIORITY
"""The least urgent priority that a caller may give; larger values would be served like it."""


@dataclass(eq=False)
class Policy:
    """Assigns each arrival its rank.

    Args:
        name: "fcfs", "fair", "shortest_first" or "priority".
        max_overtakes: K, how many later arrivals may be served before a request; -1: the policy's
            default (0, 256, 4096). "fair" has a different bound: see ``shares``.
        tokens_per_arrival: length in tokens that delays a request by one place, under
            "shortest_first".
        arrivals_per_priority: places per priority level, under "priority" (0 is the most urgent;
            a caller gives it as ``"priority"`` of a prompt's dict).
        credit: how many ticks before the clock a turn may start, under "fair".
        ticks_per_token, reply_tokens: determine the charge of a turn, under "fair".
    """

    name: str = "fcfs"
    max_overtakes: int = -1
    tokens_per_arrival: int = TOKENS_PER_ARRIVAL
    arrivals_per_priority: int = ARRIVALS_PER_PRIORITY
    credit: int = CREDIT_TOKENS * TICKS_PER_TOKEN
    ticks_per_token: int = TICKS_PER_TOKEN
    reply_tokens: int = REPLY_TOKENS

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in MAX_OVERTAKES:
            limit = f"must be one of {sorted(MAX_OVERTAKES)}"
            raise InvalidInputError("policy", self.name, limit)
        if self.max_overtakes < 0:
            self.max_overtakes = MAX_OVERTAKES[self.name]

    @property
    def is_fair(self) -> bool:
        return self.name == "fair"

    def expected_cost(self, request: Request) -> int:
        """Ticks charged for a turn until the request has ended: the prompt, and an answer of at
        most ``reply_tokens``."""
        num_answer_tokens = request.max_num_tokens - request.num_prompt_tokens
        num_tokens = request.num_prompt_tokens + min(num_answer_tokens, self.reply_tokens)
        return self.ticks_per_token * num_tokens

    def rank(self, request: Request) -> int:
        """The rank, from ``seniority``, ``priority`` and ``max_num_tokens``; smaller goes first."""
        if self.is_fair:
            return UNRANKED | request.seniority
        delay = 0
        if self.name == "shortest_first":
            delay = request.max_num_tokens // self.tokens_per_arrival
        elif self.name == "priority":
            delay = request.priority * self.arrivals_per_priority
        place = request.seniority + min(self.max_overtakes, max(0, delay))
        return (place << SENIORITY_BITS) | request.seniority
