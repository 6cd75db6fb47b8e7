"""Defects of draft tokens."""

from __future__ import annotations

from ..model import Machine
from ..pool import ceil_div
from ..state import Drafts, Plan, PlanRow, Request, Row, Wishes
from .registry import LONG, A, defect

_DRAFTING = A._replace(max_tokens=3)
_HISTORY = _DRAFTING._replace(needs_history=True)
_SCOPE = {
    "templates": (_DRAFTING,),
    "max_drafts": 1,
    "num_blocks": 4,
    "budget": 4,
    "pause": False,
}


@defect("every-draft-is-accepted", "S58 S6 S57", **_SCOPE | {"block_size": 1, "num_blocks": 6})
class EveryDraftIsAccepted(Machine):
    def is_accepted(self, *_: int) -> bool:
        return True


@defect("accepted-behind-a-rejected-draft", "S58", **_SCOPE | {"max_drafts": 2})
class AcceptedBehindARejectedDraft(Machine):
    """Each draft is compared only with its own sample."""

    def take_samples(self, r: int, row: Row) -> None:
        right = [d == t for d, t in zip(row.drafts, row.samples, strict=False)]
        super().take_samples(r, row)
        if right == [False, True] and not self.finish_reason(r):
            self.count_accepted(r)
            self.append_token(r, row.samples[1])


@defect("samples-taken-behind-the-stop", "S25", **_SCOPE)
class SamplesTakenBehindTheStop(Machine):
    def has_ended(self, _: int) -> bool:
        return False


@defect("accepted-draft-is-not-counted", "S58", **_SCOPE)
class AcceptedDraftIsNotCounted(Machine):
    """Its position is computed again by the next row."""

    def count_accepted(self, r: int) -> None:
        self.update(r, total=self.requests[r].total + 1)


@defect("drafts-counted-as-dispatched", "S17", **_SCOPE)
class DraftsCountedAsDispatched(Machine):
    """As if all of them would be accepted."""

    def draft(self, offer: dict[int, tuple[int, ...]]) -> None:
        super().draft(offer)
        for row in self.rows:
            dispatched = self.requests[row.request].dispatched + len(row.drafts)
            self.update(row.request, dispatched=dispatched)


@defect("rejected-drafts-are-published", "S6 S57", **_SCOPE | {"block_size": 1})
class RejectedDraftsArePublished(Machine):
    def take_samples(self, r: int, row: Row) -> None:
        super().take_samples(r, row)
        request = self.requests[r]
        self.update(r, computed=max(request.computed, row.end))


@defect(
    "drafts-take-blocks-that-are-needed",
    "S56",
    **_SCOPE | {"templates": (_DRAFTING, LONG), "block_size": 1, "num_blocks": 5},
)
class DraftsTakeBlocksThatAreWanted(Machine):
    def may_take_for_drafts(self) -> bool:
        return True


@defect("drafts-before-the-walk-ends", "S56", **_SCOPE | {"budget": 3})
class DraftsBeforeTheWalkEnds(Machine):
    """A row takes its drafts at once, before younger requests have their rows."""

    def schedule(self, budget: int = 0, offer: Drafts = (), wishes: Wishes = ()) -> Plan:
        self.offered = dict(offer)
        return super().schedule(budget, wishes=wishes)

    def add_row(self, r: int, n: int) -> None:
        super().add_row(r, n)
        rows, self.rows = self.rows[:-1], self.rows[-1:]
        self.draft(self.offered)
        self.rows = rows + self.rows


@defect("drafts-beyond-the-longest-form", "S56", **_SCOPE)
class DraftsBeyondTheLongestForm(Machine):
    def draft_room(self, row: PlanRow) -> int:
        limit = self.requests[row.request].limit
        self.update(row.request, limit=limit + 1)
        room = super().draft_room(row)
        self.update(row.request, limit=limit)
        return room


@defect("drafts-beyond-the-budget", "S18", **_SCOPE | {"budget": 2})
class DraftsBeyondTheBudget(Machine):
    def num_drafts_left(self) -> int:
        return super().num_drafts_left() + 1


_CROWD = _SCOPE | {"num_blocks": 6, "budget": 8, "max_samples": 3}


@defect("drafts-beyond-the-sample-limit", "S63", **_CROWD)
class DraftsBeyondTheSampleLimit(Machine):
    def num_drafts_left(self) -> int:
        return self.budget_left


@defect("oldest-row-takes-all-drafts", "S63", **_CROWD | {"max_samples": 4, "max_drafts": 2})
class OldestRowTakesAllDrafts(Machine):
    def shares_of_drafts(self, wanted: list[int]) -> list[int]:
        lengths, num_left = [], self.num_drafts_left()
        for most in wanted:
            lengths.append(min(most, num_left))
            num_left -= lengths[-1]
        return lengths


@defect("draft-blocks-are-not-sent", "S32", **_SCOPE | {"block_size": 1, "num_blocks": 6})
class DraftBlocksAreNotTold(Machine):
    """The plan names only the blocks that the row's own positions need."""

    def growth(self, known: dict[int, int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        own = {row.request: ceil_div(row.start + row.n, self.block_size) for row in self.rows}
        grown = super().growth(known)
        return tuple((r, blocks[: max(0, own[r] - known[r])]) for r, blocks in grown)


@defect("blocks-of-rejected-drafts-pile-up", "S10", **_SCOPE | {"block_size": 1, "num_blocks": 6})
class BlocksOfRejectedDraftsPileUp(Machine):
    """Each row takes blocks for its drafts, whatever the previous row left."""

    def draft(self, offer: dict[int, tuple[int, ...]]) -> None:
        super().draft(offer)
        for row in self.rows:
            if row.drafts and self.num_available():
                self.allocate(row.request, 1)


@defect("history-keeps-rejected-drafts", "S39", **_SCOPE | {"templates": (_HISTORY,)})
class HistoryKeepsRejectedDrafts(Machine):
    def kept_history(self, ids: tuple[int, ...], _: int) -> tuple[int, ...]:
        return ids


@defect("row-behind-drafts-in-flight", "S42 L11", **_SCOPE | {"depth": 1})
class RowBehindDraftsInFlight(Machine):
    """It starts behind the first sample, although a draft may be accepted there."""

    def has_drafts_in_flight(self, _: int) -> bool:
        return False


@defect("drafts-behind-an-unsettled-token", "S56", **_SCOPE | {"depth": 1})
class DraftsBehindAnUnsettledToken(Machine):
    def follows_settled(self, _: PlanRow) -> bool:
        return True


_LONGER = _DRAFTING._replace(max_tokens=4)


@defect("drafted-once-is-settled-only", "L6", **_SCOPE | {"depth": 1, "templates": (_LONGER,)})
class DraftedOnceIsSettledOnly(Machine):
    """A request that had drafts has no pipelined rows any more."""

    def count_accepted(self, r: int) -> None:
        super().count_accepted(r)
        self.update(r, needs_history=True)

    def has_drafts_in_flight(self, r: int) -> bool:
        return super().has_drafts_in_flight(r) or self.requests[r].needs_history


@defect("right-draft-is-wasted", "L10", **_SCOPE)
class RightDraftIsWasted(Machine):
    def is_accepted(self, *_: int) -> bool:
        return False


@defect("nothing-taken-beside-a-wrong-draft", "L10 L2", **_SCOPE)
class NothingTakenBesideAWrongDraft(Machine):
    """The first sample is treated like a draft's sample, and dropped with it."""

    def take_samples(self, r: int, row: Row) -> None:
        if row.drafts[:1] in ((), row.samples[:1]):
            super().take_samples(r, row)
        else:
            self.update(r, total=self.requests[r].total - 1)


_WISHING = _SCOPE | {"max_wanted": 1, "max_drafts": 0, "block_size": 1}


@defect("drafting-without-a-slot", "S64", **_WISHING | {"num_blocks": 5})
class DraftingWithoutASlot(Machine):
    """The number to draft does not follow the blocks that are available."""

    def num_slots_behind(self, _: PlanRow) -> int:
        return self.scope.max_wanted


@defect("drafting-behind-the-longest-form", "S64", **_WISHING)
class DraftingBehindTheLongestForm(Machine):
    def want_room(self, row: PlanRow) -> int:
        return self.scope.max_wanted if row.num_samples else 0


@defect("drafting-behind-a-chunk", "S64", **_WISHING | {"budget": 1})
class DraftingBehindAChunk(Machine):
    """A row that samples nothing has no last sample to draft from."""

    def want_room(self, row: PlanRow) -> int:
        return super().want_room(row._replace(num_samples=1))


@defect(
    "drafting-takes-blocks-that-are-needed",
    "S56",
    **_WISHING | {"templates": (_DRAFTING, LONG), "num_blocks": 5},
)
class DraftingTakesBlocksThatAreNeeded(Machine):
    def may_take_for_drafts(self) -> bool:
        return True


_STATES = _SCOPE | {"block_size": 1, "num_blocks": 6, "num_states": 3, "interval": 2}


@defect("state-kept-behind-the-drafts", "S45", **_STATES)
class StateKeptBehindTheDrafts(Machine):
    """The state at the end of the row is kept, and not that of its own part."""

    def dispatch(self, plan: Plan, tokens: tuple[int, ...]) -> None:
        self.num_drafts = {row.request: len(row.drafts) for row in plan.rows}
        super().dispatch(plan, tokens)

    def write_states(self, r: int, start: int, n: int, ids: tuple[int, ...]) -> None:
        super().write_states(r, start, n + self.num_drafts[r], ids)


@defect("accepted-drafts-have-a-state", "S58 S45", **_STATES | {"interval": 4})
class AcceptedDraftsHaveAState(Machine):
    """They count as computed, so the next row reads a state that no row wrote."""

    def count_accepted(self, r: int) -> None:
        request = self.requests[r]
        computed, dispatched = request.computed + 1, request.dispatched + 1
        self.update(r, computed=computed, dispatched=dispatched, total=request.total + 1)


@defect("state-entries-for-drafts", "S44", **_STATES)
class StateEntriesForDrafts(Machine):
    def draft(self, offer: dict[int, tuple[int, ...]]) -> None:
        super().draft(offer)
        for row in self.rows:
            self.grow_states(row.request, row.end)


@defect(
    "accepted-drafts-wait-for-a-prompt",
    "L6",
    **_STATES | {"templates": (LONG, _DRAFTING), "num_blocks": 8, "budget": 2, "pause": True},
)
class AcceptedDraftsWaitForAPrompt(Machine):
    """A decode with accepted drafts to compute again has no reserved token."""

    def computes_again(self, _: Request) -> bool:
        return False
