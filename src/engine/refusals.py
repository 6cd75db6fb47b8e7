"""The planner of a traced run: it also keeps the account of each plan, of what was evicted, for
whom requests were preempted, and why a request has no row. Other runs pay nothing for it.

The reasons are those of ``spec/state.py`` (``REFUSALS``), where each is explained. Of the waiting
requests only the eldest refused is named: those behind it wait because it does.
"""

from __future__ import annotations

from typing import Any

from .plan import InFlightStep
from .planner import Planner
from .request import Request


class PlanAccount:
    """Why the latest plan is what it is; each plan overwrites it.

    Attributes:
        askers: for whom each of the plan's ``preempted`` gave its blocks.
        refused: (id, reason) of requests without a row, in rank order.
        num_evicted: cached blocks that were taken for this step.
    """

    __slots__ = ("askers", "num_evicted", "refused")

    def __init__(self) -> None:
        self.askers: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.num_evicted = 0


class ExplainingPlanner(Planner):
    """Plans as a Planner does, and writes the account of it. The arguments after ``account`` are
    those of a Planner."""

    __slots__ = ("_account", "_askers", "_closer", "_reasons", "_wants_blocks")

    def __init__(self, account: PlanAccount, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._account = account
        self._askers: list[Request] = []
        self._closer: Request | None = None
        self._reasons: dict[Request, str] = {}
        self._wants_blocks = False

    def plan(self) -> InFlightStep:
        # An eviction removes a key, and nothing is published while a step is planned.
        num_keys = len(self._blocks.index)
        step = super().plan()
        self._account.num_evicted = num_keys - len(self._blocks.index)
        self._account.askers = [asker.request_id for asker in self._askers]
        if len(self._requests) < len(self._running):
            for request in self._held:
                self._reasons[request] = "held"
        self._explain_waiting()
        refused = sorted(self._reasons, key=lambda request: request.rank)
        self._account.refused = [(r.request_id, self._reasons[r]) for r in refused]
        return step

    def _explain_waiting(self) -> None:
        """The eldest waiting request, unless ``_admit`` has refused it: it never got that far."""
        waiting = self._queues.waiting
        preempted = set(self._preempted)
        head = next((request for request in waiting if request not in preempted), None)
        if head is None or head in self._reasons:
            return
        if self._closer is not None and self._closer.rank < head.rank:
            self._reasons[head] = "closed"
        elif self._askers and self._askers[0].rank < head.rank:
            self._reasons[head] = "preempting"
        else:
            self._reasons[head] = "full"

    def _serve_slowly(self, request: Request) -> None:
        num_rows, was_closed = len(self._requests), self._is_closed
        super()._serve_slowly(request)
        if len(self._requests) == num_rows:
            num_wanted = request.num_total - request.num_dispatched
            if num_wanted == 0 or request.num_total == request.max_num_tokens:
                reason = "ending"
            elif request.must_settle:
                reason = "unsettled"
            elif num_wanted > 1 and self._budget_behind(request) <= 0:
                reason = "budget"
            else:
                reason = "closed" if was_closed else "blocks"
            self._reasons[request] = reason
        if self._is_closed and not was_closed:
            self._closer = request

    def _admit(self, request: Request, position: int) -> bool:
        if super()._admit(request, position):
            return True
        if request.num_in_flight:
            reason = "draining"
        else:
            # Blocks that it wanted and did not get would have closed the step.
            shortage = ("blocks" if self._wants_blocks else "full") if self._is_closed else ""
            reason = shortage or "state slots"
            if self._budget_behind(request) < 1:
                reason = "budget"
        self._reasons[request] = reason
        if self._is_closed:
            self._closer = request
        return False

    def _make_room(self, request: Request, num_blocks: int, *arguments: Any) -> bool:
        num_preempted = len(self._preempted)
        self._wants_blocks = num_blocks > 0
        is_done = super()._make_room(request, num_blocks, *arguments)
        self._askers += [request] * (len(self._preempted) - num_preempted)
        return is_done
