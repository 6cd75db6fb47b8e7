"""Defects of plans and of the positions that a step writes."""

from __future__ import annotations

from ..model import Machine
from ..state import PlanRow
from .registry import LONG, defect


@defect("block-given-twice", "S15", "28", num_blocks=3, block_size=1)
class BlockGivenTwice(Machine):
    def take_block(self) -> int:
        block = super().take_block()
        self.free.append(block)
        return block


@defect("range-starts-at-settled-count", "S17", "5, 9", depth=1)
class RangeStartsAtSettledCount(Machine):
    def add_row(self, r: int, n: int) -> None:
        super().add_row(r, n)
        self.rows[-1] = self.rows[-1]._replace(start=self.requests[r].computed)


@defect("budget-not-accumulated", "S18", "19")
class BudgetNotAccumulated(Machine):
    def add_row(self, r: int, n: int) -> None:
        super().add_row(r, n)
        self.budget_left += n


@defect("cap-limits-the-step-only", "S18", "40", cap=1, num_blocks=5)
class CapLimitsTheStepOnly(Machine):
    def may_admit(self, r: int) -> bool:
        running, self.running = self.running, [row.request for row in self.rows]
        allowed = super().may_admit(r)
        self.running = running
        return allowed


@defect("sampled-at-a-chunk-boundary", "S19", "7", templates=(LONG,))
class SampledAtAChunkBoundary(Machine):
    def is_sampled(self, *_: object) -> bool:
        return True


@defect("victim-stays-in-the-plan", "S20", "25")
class VictimStaysInThePlan(Machine):
    def preempt(self, victim: int) -> None:
        request = self.requests[victim]
        super().preempt(victim)
        self.rows.append(PlanRow(victim, request.dispatched, 1, True))


@defect("victims-that-free-nothing", "S21", "31", num_requests=3, cap=3, num_blocks=4, block_size=1)
class VictimsThatFreeNothing(Machine):
    def useful(self, chosen: list[int], _: set[int]) -> list[int]:
        return chosen


@defect("padding-writes-the-pool", "S22", templates=(LONG,), budget=3)
class PaddingWritesThePool(Machine):
    def write_padding(self, num_tokens: int) -> None:
        if num_tokens & (num_tokens - 1):
            self.write_slot(self.scope.num_blocks - 1, 0, 7)
