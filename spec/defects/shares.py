"""Defects of fair shares."""

from __future__ import annotations

from ..model import Machine
from ..state import Request, Template
from .registry import LONG, A, defect

_FEW = A._replace(owner=1)
_MUCH = LONG._replace(owner=2)
_SCOPE = {
    "templates": (_FEW, _MUCH),
    "policy": "fair",
    "credit": 3,
    "reply": 2,
    "num_requests": 3,
    "num_blocks": 6,
    "budget": 4,
    "pause": False,
    "abort": False,
}


@defect("youngest-of-an-owner-first", "S55", **_SCOPE)
class YoungestOfAnOwnerFirst(Machine):
    def next_of(self, owner: int) -> int | None:
        return next((r for r in reversed(self.queued) if self.requests[r].owner == owner), None)


@defect("no-turn-after-an-abort", "S53 L2", **_SCOPE | {"abort": True, "cap": 1})
class NoTurnAfterAnAbort(Machine):
    def leave(self, r: int) -> None:
        self.queued, queued = [], [q for q in self.queued if q != r]
        super().leave(r)
        self.queued = queued


@defect("turns-are-free", "S54", **_SCOPE | {"num_requests": 4, "credit": 1})
class TurnsAreFree(Machine):
    def cost(self, request: Request) -> int:
        return 0 if request.owner == 2 else super().cost(request)


@defect("idle-owners-save-up", "L5", **_SCOPE)
class IdleOwnersSaveUp(Machine):
    def earliest(self) -> int:
        return 0


@defect("turn-starts-before-the-last", "S55", **_SCOPE)
class TurnStartsBeforeTheLast(Machine):
    """More than the excess charge is refunded."""

    def settle_charge(self, r: int) -> None:
        super().settle_charge(r)
        if self.requests[r].charge:
            self.shares[self.requests[r].owner] = 0, 0


@defect(
    "place-is-taken-from-its-own-owner",
    "S21",
    **_SCOPE
    | {
        "templates": (Template((0,), 3, owner=1),),
        "cap": 1,
        "block_size": 1,
        "pause": True,
        "num_requests": 2,
    },
)
class PlaceIsTakenFromItsOwnOwner(Machine):
    def may_displace(self, *_: int) -> bool:
        return True
