"""Defects in the life cycle of a request."""

from __future__ import annotations

from ..model import Machine
from ..state import STOP, Row, Template
from .registry import defect


@defect("preempted-request-forgotten", "S23", "26")
class PreemptedRequestForgotten(Machine):
    def preempt(self, victim: int) -> None:
        super().preempt(victim)
        self.waiting.remove(victim)


@defect("abort-of-the-finished", "S24 S26", "37")
class AbortOfTheFinished(Machine):
    def abort(self, r: int) -> None:
        self.update(r, reason="")
        super().abort(r)


@defect("length-before-stop", "S25")
class LengthBeforeStop(Machine):
    def finish_reason(self, r: int) -> str:
        request = self.requests[r]
        if len(request.tokens) >= request.limit:
            return "length"
        return "stop" if request.tokens[-1] == STOP else ""


@defect("paused-cannot-be-aborted", "S26")
class PausedCannotBeAborted(Machine):
    def abort(self, r: int) -> None:
        if r not in self.paused:
            super().abort(r)


@defect("paused-still-runs", "S27")
class PausedStillRuns(Machine):
    def pause(self, r: int) -> None:
        self.paused.append(r)


@defect("resumed-joins-the-tail", "S27", num_blocks=5)
class ResumedJoinsTheTail(Machine):
    def resume(self, r: int) -> None:
        super().resume(r)
        self.waiting.remove(r)
        self.waiting.append(r)


@defect("abort-frees-at-once", "S28", "29, 37")
class AbortFreesAtOnce(Machine):
    def release_if_drained(self, r: int) -> None:
        self.release(r)


@defect("result-of-the-finished-applied", "S24 S29", "29, 30, 37")
class ResultOfTheFinishedApplied(Machine):
    def drop_result(self, row: Row) -> None:
        if row.samples:
            self.append_token(row.request, row.samples[0])
        super().drop_result(row)


@defect("failed-step-stays-in-flight", "S37", fail=True)
class FailedStepStaysInFlight(Machine):
    def forget_flight(self) -> None:
        """A later settle applies it to ended requests, and to blocks of other requests."""


@defect("cache-survives-a-failure", "S37", "4", fail=True)
class CacheSurvivesAFailure(Machine):
    """Blocks are released per request, as after an abort, and published blocks stay cached."""

    def reset_pool(self) -> None:
        keys, index, contents = self.keys, self.index, self.contents[:]
        super().reset_pool()
        self.keys, self.index = keys, index
        self.lru = sorted(index.values())
        self.free = [block for block in self.free if block not in self.lru]
        for block in self.lru:
            self.contents[block] = contents[block]


@defect("door-open", "S30 L2", "10", templates=(Template((0,) * 6, 2),), num_requests=1)
class DoorOpen(Machine):
    def fits(self, _: Template) -> bool:
        return True


@defect("plan-peeks-at-the-unsettled", "S31", depth=1, pause=False)
class PlanPeeksAtTheUnsettled(Machine):
    def serve(self, r: int) -> None:
        if STOP not in self.all_tokens(r):
            super().serve(r)


@defect("reset-keeps-the-cache", "S41 S6 S16", depth=1, reset=True)
class ResetKeepsTheCache(Machine):
    """Blocks are released, but later requests find published ones, under the new weights."""

    def forget_cache(self) -> None:
        for block in range(self.scope.num_blocks):
            self.clear_contents(block)


@defect("reset-keeps-running-blocks", "S41 S6 S16", depth=1, reset=True)
class ResetKeepsRunningBlocks(Machine):
    """The cache is emptied, but running requests continue with KV that was computed before, and
    finally publish it."""

    def send_back_running(self) -> None:
        pass

    def forget_cache(self) -> None:
        for block, key in enumerate(self.keys):
            if key is not None:
                self.forget_key(block)
            if block in self.lru:
                self.lru.remove(block)
                self.free.append(block)
            self.clear_contents(block)


@defect("reset-without-settling", "S41 S28", depth=1, reset=True)
class ResetWithoutSettling(Machine):
    """Steps in flight write to blocks that belong to other requests by then."""

    def may_reset(self) -> bool:
        return True
