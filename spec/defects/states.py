"""Defects of state slots."""

from __future__ import annotations

from ..model import Machine
from ..pool import Pool
from ..scopes import SEEDED_STATES
from ..state import Request, Template
from .registry import A, defect

Tables = tuple[tuple[int, tuple[int, ...]], ...]

_BASE = SEEDED_STATES._asdict()
_SCOPE = {name: _BASE[name] for name in ("num_blocks", "block_size", "num_states", "interval")}
_PROMPT = Template((0, 1, 0), 2)
_EVERY_TOKEN = {**_SCOPE, "interval": 1, "templates": (_PROMPT,)}


@defect("found-checkpoint-stays-in-lru", "S43", **_SCOPE)
class FoundCheckpointStaysInLru(Machine):
    def share_slot(self, slot: int) -> None:
        self.slot_refs[slot] += 1


@defect("past-states-are-kept", "S44", **_SCOPE)
class PastStatesAreKept(Machine):
    def num_past(self, _: Request) -> int:
        return 0


@defect("hits-beyond-the-checkpoint", "S45 S49", **_SCOPE)
class HitsBeyondTheCheckpoint(Machine):
    def cut(self, _: Request, hits: tuple[int, ...]) -> tuple[int, ...]:
        return hits


@defect("state-read-from-the-interval-begun", "S45", **_SCOPE, templates=(_PROMPT,), budget=2)
class StateReadFromTheIntervalBegun(Machine):
    """At the beginning of an interval the state is in the slot of the previous one."""

    def state_before(self, request: Request, start: int) -> int:
        return (
            super().state_before(request, start + 1) if start else super().state_before(request, 0)
        )


@defect("sibling-forked-without-its-state", "S45 S49", **_SCOPE, templates=(A._replace(n=2),))
class SiblingForkedWithoutItsState(Machine):
    def find_source(self, r: int, length: int) -> int | None:
        scope, self.scope = self.scope, self.scope._replace(num_states=0)
        source = super().find_source(r, length)
        self.scope = scope
        return source


@defect(
    "checkpoint-published-while-it-is-written",
    "S46",
    **_SCOPE,
    depth=2,
    budget=1,
    cap=1,
    templates=(_PROMPT,),
)
class CheckpointPublishedWhileItIsWritten(Machine):
    def num_past(self, request: Request) -> int:
        done = min(request.dispatched, len(request.tokens))
        return max(0, done - 1) // self.scope.interval


@defect("state-key-without-salt", "S46", **_SCOPE, templates=(_PROMPT._replace(salt=1),))
class StateKeyWithoutSalt(Machine):
    def state_key(self, request: Request, count: int) -> int:
        return super().state_key(request._replace(salt=0), count)


@defect("checkpoint-moves-on-in-place", "S46 S48", **_SCOPE, templates=(_PROMPT,))
class CheckpointMovesOnInPlace(Machine):
    """A checkpoint that was found, and that others may find, is written."""

    def goes_on_in_place(self, slot: int) -> bool:
        return self.slot_keys[slot] is not None or super().goes_on_in_place(slot)


@defect("state-given-up-while-it-is-read", "S47", **_SCOPE, depth=1, budget=2, templates=(_PROMPT,))
class StateGivenUpWhileItIsRead(CheckpointPublishedWhileItIsWritten):
    """As soon as a step that goes beyond is dispatched."""


@defect("abort-frees-the-state-at-once", "S47", **_SCOPE, depth=1)
class AbortFreesTheStateAtOnce(Machine):
    def abort(self, r: int) -> None:
        super().abort(r)
        for slot in self.held_slots(self.requests[r]):
            self.drop_slot(slot)
        self.update(r, states=())


@defect("state-slot-given-twice", "S48", **_SCOPE)
class StateSlotGivenTwice(Machine):
    def take_slot(self) -> int:
        slot = super().take_slot()
        self.free_slots.insert(0, slot)
        return slot


@defect("admission-without-a-state-slot", "S48", **{**_EVERY_TOKEN, "budget": 6})
class AdmissionWithoutAStateSlot(Machine):
    def has_slot_beside(self, *_: object) -> bool:
        return True

    def take_slot(self) -> int:
        if self.num_available_slots():
            return super().take_slot()
        self.slot_refs[0] += 1
        return 0


@defect("first-checkpoint-for-the-longest", "S49", **{**_EVERY_TOKEN, "num_states": 5})
class FirstCheckpointForTheLongest(Machine):
    def cut(self, request: Request, hits: tuple[int, ...]) -> tuple[int, ...]:
        return super().cut(request, hits[:1])


@defect("finished-keeps-its-state", "S50 L2", **_SCOPE, num_requests=4, templates=(A,), pause=False)
class FinishedKeepsItsState(Machine):
    def release(self, r: int) -> None:
        if self.requests[r].reason:
            Pool.release(self, r)
        else:
            super().release(r)


@defect("growth-of-states-is-not-sent", "S51", **_SCOPE)
class GrowthOfStatesIsNotTold(Machine):
    def growth_of_states(self, _: dict[int, int]) -> Tables:
        return ()


@defect("found-checkpoint-is-not-sent", "S51", **_SCOPE)
class FoundCheckpointIsNotTold(Machine):
    def whole_state_tables(self) -> Tables:
        return tuple((r, states[-1:]) for r, states in super().whole_state_tables())


@defect("evicted-checkpoint-keeps-key", "S46 S52", **_SCOPE)
class EvictedCheckpointKeepsKey(Machine):
    def forget_slot_key(self, slot: int) -> None:
        pass


@defect("newest-checkpoint-evicted-first", "S52", **{**_EVERY_TOKEN, "num_blocks": 8})
class NewestCheckpointEvictedFirst(Machine):
    def evict_slot(self) -> int:
        self.slot_lru.insert(0, self.slot_lru.pop())
        return super().evict_slot()


@defect("reset-keeps-the-checkpoints", "S41", **_SCOPE, reset=True)
class ResetKeepsTheCheckpoints(Machine):
    def forget_cache(self) -> None:
        Pool.reset_pool(self)
