"""Defects that starve a request."""

from __future__ import annotations

from ..model import Machine
from ..state import Row, Template
from .registry import LONG, A, defect


@defect(
    "victim-becomes-the-oldest",
    "L1 L4",
    "27, 32",
    templates=(Template((0,), 5), LONG),
    budget=2,
    overtaking=1,
    block_size=1,
    num_blocks=5,
    caching=False,
    pause=False,
    abort=False,
)
class VictimBecomesTheOldest(Machine):
    def make_room(
        self, preemptor: int, shortage: int, hits: tuple[int, ...], displaced: int | None = None
    ) -> bool:
        made = super().make_room(preemptor, shortage, hits, displaced)
        if made:
            mine, other = self.requests[preemptor].rank, self.requests[self.preempted[-1]].rank
            self.update(preemptor, rank=other)
            self.update(self.preempted[-1], rank=mine)
            for queue in (self.waiting, self.running):
                queue.sort(key=lambda q: self.requests[q].rank)
        return made


@defect("admission-closes-for-good", "L2", "33", pause=False, num_blocks=4, block_size=1, budget=4)
class AdmissionClosesForGood(Machine):
    def may_admit(self, r: int) -> bool:
        return super().may_admit(r) and not self.requests[r].tokens[self.requests[r].num_prompt :]


@defect("youngest-first", "L3 L5", "27")
class YoungestFirst(Machine):
    def is_older(self, a: int, b: int) -> bool:
        return self.requests[a].rank > self.requests[b].rank

    def walk_order(self, queue: list[int]) -> list[int]:
        return queue[::-1]

    def victim_order(self, preemptor: int) -> list[int]:
        return [v for v in self.running if self.is_older(preemptor, v)]


@defect(
    "smaller-request-slips-past",
    "L5",
    "27",
    num_requests=3,
    templates=(LONG, A),
    pause=False,
    block_size=1,
    num_blocks=5,
    cap=3,
)
class SmallerRequestSlipsPast(Machine):
    def may_admit(self, r: int) -> bool:
        self.admission_open, self.closed_by = True, None
        return super().may_admit(r)


@defect(
    "priority-without-bound",
    "L5",
    policy="priority",
    overtaking=1,
    templates=(A, A._replace(priority=3)),
    num_requests=3,
)
class PriorityWithoutBound(Machine):
    def rank(self, number: int, template: Template) -> tuple[int, int]:
        return number + template.priority * self.scope.ageing, number


@defect("prefill-eats-the-decodes-budget", "L6", templates=(LONG, A), budget=2, num_blocks=5)
class PrefillEatsTheDecodesBudget(Machine):
    def num_reserved(self) -> int:
        return 0


@defect(
    "settled-only-waits-for-all",
    "L9",
    depth=1,
    templates=(A._replace(max_tokens=3, settled_only=True), A),
    num_blocks=5,
)
class SettledOnlyWaitsForAll(Machine):
    """Until no step is in flight, which never happens next to other requests."""

    def must_settle(self, r: int) -> bool:
        return self.requests[r].settled_only and bool(self.flight)


@defect("aborted-blocks-never-freed", "L7", "37")
class AbortedBlocksNeverFreed(Machine):
    def drop_result(self, row: Row) -> None:
        pass


@defect("resumed-before-drained", "L8", "39")
class ResumedBeforeDrained(Machine):
    def take_back_if_drained(self, r: int) -> None:
        if r in self.paused:
            super().take_back_if_drained(r)

    def may_admit(self, r: int) -> bool:
        return super().may_admit(r) and not self.requests[r].table
