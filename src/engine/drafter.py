"""The drafter's interface: what the planner calls for draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .request import Request


class Drafter(Protocol):
    """Guesses the next tokens of a request. No output depends on the guesses: a draft token is
    accepted if and only if it is the token that is sampled at its place (S58).

    Attributes:
        max_draft_tokens: draft tokens that a row may carry at most.
    """

    max_draft_tokens: int

    def propose(self, request: Request) -> Sequence[int]:
        """Token ids of the target's vocabulary that may follow ``request.token_ids``, all of which
        are settled; the first ``max_draft_tokens`` of them are used, or fewer. Called for
        settled-only requests, at most once per plan. It may not change the request."""
        ...
