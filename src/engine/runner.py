"""The interfaces that the engine calls: a runner computes plans, a drafter proposes draft tokens.
Code outside the engine implements them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .plan import StepPlan, StepResult
from .request import Request

MAX_DRAFT_TOKENS = 16
"""Draft tokens per row that a runner has room for, if it computes any."""


class Runner(Protocol):
    """Computes plans in dispatch order.

    Attributes:
        pipeline_depth: how many earlier steps may still be unsettled when the next one is
            scheduled. 0 means each step is collected and settled before the next is planned.
        max_draft_tokens: draft tokens that a row of a plan may have. 0 means that each row samples
            one token at most.
    """

    pipeline_depth: int
    max_draft_tokens: int

    def dispatch(self, plan: StepPlan) -> object:
        """Start computing ``plan`` and return a handle at once. The plans, in their order, are
        the only input: block tables are derived from them."""
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for the step of ``handle`` and return its samples. Handles are collected
        in the order of their dispatch."""
        ...

    def reset(self) -> None:
        """A step failed or was interrupted, anywhere. Wait until the device writes no more. Forget
        every step that was not collected, and all block tables, which begin afresh. May itself be
        interrupted, and is then called again."""
        ...


class Drafter(Protocol):
    """Guesses the next tokens of a request. No output depends on the guesses: a draft token is
    accepted if and only if it is the token that is sampled at its place (S58).

    Attributes:
        max_draft_tokens: draft tokens that a row may carry at most.
    """

    max_draft_tokens: int

    def serves(self, request: Request) -> bool:
        """Whether it proposes for a request, which the scheduler then makes settled-only as it
        arrives. Others have draft tokens if they are settled-only anyway."""
        ...

    def propose(self, request: Request) -> Sequence[int]:
        """Token ids of the target's vocabulary that may follow ``request.token_ids``, all of which
        are settled; the first ``max_draft_tokens`` of them are used, or fewer. Called for
        settled-only requests, at most once per plan. It may not change the request."""
        ...
