"""Defects of requests that continue the same prompt."""

from __future__ import annotations

from ..model import Machine
from ..state import Request, Template
from .registry import A, defect

_PAIR = Template((0, 0), 3, n=2)
_LONG = Template((0, 0, 0, 0), 2, n=2)


@defect("partly-filled-block-is-shared", "S33 S9", templates=(_PAIR,))
class PartlyFilledBlockIsShared(Machine):
    def fork(self, r: int, source: int, partly_filled: tuple[int, ...]) -> None:
        self.forked.append((r, source))
        for block in partly_filled:
            self.refs[block] += 1
        self.update(r, table=self.requests[r].table + partly_filled)


@defect("copy-of-the-block-before", "S33 S16", templates=(_LONG,), num_blocks=5)
class CopyOfTheBlockBefore(Machine):
    def fork(self, r: int, source: int, partly_filled: tuple[int, ...]) -> None:
        super().fork(r, source, partly_filled)
        self.copies[-1] = (self.requests[source].table[0], self.copies[-1][1])


@defect("copy-left-out-of-the-plan", "S33 S16", templates=(_PAIR,))
class CopyLeftOutOfThePlan(Machine):
    def fork(self, r: int, source: int, partly_filled: tuple[int, ...]) -> None:
        super().fork(r, source, partly_filled)
        self.copies.clear()


@defect("fork-of-what-is-in-flight", "S33", templates=(_PAIR,), depth=1, num_blocks=5)
class ForkOfWhatIsInFlight(Machine):
    """A sibling that is resumed before the prompt is computed treats it as computed."""

    def has_shared(self, request: Request) -> bool:
        return request.dispatched >= self.num_shared(request)


@defect("fork-from-a-victim", "S33", templates=(_LONG._replace(max_tokens=3),), abort=False)
class ForkFromAVictim(Machine):
    """The leader returns, and its admission preempts the sibling whose blocks it is to share."""

    def may_give(self, *_: int) -> bool:
        return True


@defect("siblings-wait-for-a-leader-that-left", "S40 L2", templates=(_PAIR,), pause=False)
class SiblingsWaitForALeaderThatLeft(Machine):
    def leave(self, r: int) -> None:
        pending = [s for s in self.pending if s != r]
        super().leave(r)
        for s in pending:
            if s not in self.pending:
                self.waiting.remove(s)
        self.pending = pending


@defect("siblings-join-the-tail", "S27", templates=(_PAIR, A), num_requests=3, pause=False)
class SiblingsJoinTheTail(Machine):
    def release_siblings(self, leader: int) -> None:
        before = list(self.waiting)
        super().release_siblings(leader)
        self.waiting = before + [r for r in self.waiting if r not in before]


@defect("abort-ends-the-siblings", "S26", templates=(_PAIR,))
class AbortEndsTheSiblings(Machine):
    def abort(self, r: int) -> None:
        for s in list(self.pending):
            super().abort(s)
        super().abort(r)


@defect("pending-sibling-survives-a-failure", "S23", templates=(_PAIR,), fail=True)
class PendingSiblingSurvivesAFailure(Machine):
    def fail(self) -> None:
        pending = self.pending
        super().fail()
        self.pending = pending


@defect("fork-counts-its-copy-as-published", "S38", templates=(_PAIR,), num_blocks=4)
class ForkCountsItsCopyAsPublished(Machine):
    def admit(self, r: int) -> bool:
        admitted = super().admit(r)
        if admitted and self.copies and self.forked[-1][0] == r:
            self.update(r, published=len(self.requests[r].table))
        return admitted
