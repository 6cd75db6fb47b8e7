"""The interfaces that the engine calls: a runner computes plans, a drafter proposes draft tokens.
Code outside the engine implements them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .plan import StepPlan, StepResult
from .request import Request

MAX_DRAFT_TOKENS = 16
"""Maximum number of draft tokens per row, for runners that compute any."""


class Runner(Protocol):
    """Computes plans in dispatch order.

    Attributes:
        pipeline_depth: how many earlier steps may still be unsettled when the next one is
            scheduled. 0: each step is collected and settled before the next one is planned.
        max_draft_tokens: maximum number of draft tokens in a row of a plan. 0: each row samples at
            most one token.
        max_num_samples: maximum number of samples of a step with draft tokens; None: no limit.
    """

    pipeline_depth: int
    max_draft_tokens: int
    max_num_samples: int | None

    def dispatch(self, plan: StepPlan) -> object:
        """Start computing ``plan`` and return a handle immediately. The plans, in order, are
        the only input: block tables are derived from them."""
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for the step of ``handle`` and return its samples. Handles are collected
        in the order of their dispatch."""
        ...

    def reset(self) -> None:
        """Recover from a failed or interrupted step. Wait until the device has stopped writing,
        then discard every step that was not collected, and all block tables. ``reset`` may itself
        be interrupted, and is then called again."""
        ...


class Drafter(Protocol):
    """Proposes the next tokens of a request. No output depends on the proposals: a draft token is
    accepted if and only if it equals the token that is sampled at its position (S58).

    Attributes:
        max_draft_tokens: maximum number of draft tokens per row.
    """

    max_draft_tokens: int

    def propose(self, request: Request) -> Sequence[int]:
        """Token ids of the target model's vocabulary that may follow ``request.token_ids``, all of
        which are settled. At most ``max_draft_tokens`` of them are used. Called at most once per
        request and plan. Must not change the request, except ``request.drafts``, which belongs to
        the drafter."""
        ...


class DraftObserver:
    """Base class of drafters that follow the steps: the scheduler calls these methods of an
    instance. A drafter that wraps another one forwards them.

    Attributes:
        max_wanted_drafts: maximum number of tokens that the runner drafts for it behind a row. 0:
            it needs no second model.
    """

    max_wanted_drafts: int = 0

    def wants_drafts(
        self,
        running: Sequence[Request],  # noqa: ARG002
        num_others: int,  # noqa: ARG002
    ) -> bool:
        """Whether the next step should have draft tokens. The engine then settles all steps in
        flight before it schedules. Called at most once per step, while a step is in flight. The
        answer may depend on settled tokens, and on counts of steps and draft tokens.

        Args:
            running: the running requests, oldest first.
            num_others: number of tokens of the newest step that are not sampled after, such as
                those of prompts.
        """
        return True

    def begin(self, requests: Sequence[Request], num_tokens: int, is_settled: bool) -> None:
        """The proposals for a step follow.

        Args:
            requests: those of the rows that may have draft tokens.
            num_tokens: number of tokens of the step, without draft tokens.
            is_settled: whether no step is in flight. If one is, only settled-only requests should
                have draft tokens: those of others would end the pipelining of all.
        """

    def wanted(self, request: Request) -> int:  # noqa: ARG002
        """How many tokens the runner should draft behind the row of ``request`` in this step, for
        its next row. Called after the proposals of the step, for each row that samples, if
        ``max_wanted_drafts`` is not 0. The runner may draft fewer."""
        return 0

    def offer(self, request: Request, token_ids: Sequence[int]) -> None:
        """The runner drafted these tokens behind ``request.token_ids``, all of which are
        settled."""

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A row of ``request`` with draft tokens was settled."""

    def end(self, request: Request) -> None:
        """``request`` has ended, for the reason ``request.finish_reason``."""

    def reset(self) -> None:
        """All requests have failed. A method of this object may have been interrupted."""
