"""The runner's interface: what the engine calls. Model runners and the tests' fake implement it."""

from __future__ import annotations

from typing import Protocol

from .plan import StepPlan, StepResult


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
        all it knows: block tables are what they add up to."""
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for the step of ``handle`` and return its samples. Handles are collected
        in the order of their dispatch."""
        ...

    def reset(self) -> None:
        """A step failed or was interrupted, anywhere. Wait until the device writes no more, and
        forget every step that was not collected and all that is known of block tables, which begin
        afresh. May itself be interrupted, and is then called again."""
        ...
