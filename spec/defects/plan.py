"""Defects in the parts of a plan for the runner, and in per-request settings."""

from __future__ import annotations

from ..model import Machine
from ..state import Template
from .registry import LONG, A, defect

Tables = tuple[tuple[int, tuple[int, ...]], ...]


@defect("hits-lost-when-the-row-grows-by-a-block", "S32", block_size=1)
class HitsLostWhenTheRowGrowsByABlock(Machine):
    def whole_tables(self) -> Tables:
        hits = dict(self.admitted)
        return tuple(
            (r, table[-1:] if len(table) == len(hits[r]) + 1 else table)
            for r, table in super().whole_tables()
        )


@defect("resumed-row-is-sent-its-growth-only", "S32", block_size=1)
class ResumedRowIsToldItsGrowthOnly(Machine):
    def whole_tables(self) -> Tables:
        return tuple(
            (r, table[len(self.view[r]) :] if r in self.view else table)
            for r, table in super().whole_tables()
        )


@defect(
    "last-block-of-a-chunk-is-sent", "S32", block_size=1, templates=(LONG,), budget=2, num_blocks=5
)
class LastBlockOfAChunkIsTold(Machine):
    def growth(self, known: dict[int, int]) -> Tables:
        return tuple((r, blocks[-1:]) for r, blocks in super().growth(known))


@defect("paused-is-not-released", "S32")
class PausedIsNotReleased(Machine):
    def pause(self, r: int) -> None:
        before = list(self.left)
        super().pause(r)
        self.left = before


_TELLS = Template((0, 0), 3, needs_history=True)
_COMPUTES_ALL = A._replace(reads_cache=False)


@defect("cached-tokens-are-not-sent", "S39", block_size=1, num_blocks=4, templates=(_TELLS,))
class CachedTokensAreNotTold(Machine):
    def history_before(self) -> Tables:
        return tuple((r, ()) for r, _ in super().history_before())


@defect("history-ends-with-the-prompt", "S39", block_size=1, num_blocks=4, templates=(_TELLS,))
class HistoryEndsWithThePrompt(Machine):
    def history_before(self) -> Tables:
        return tuple((r, ids[: self.requests[r].num_prompt]) for r, ids in super().history_before())


@defect("history-is-sent-once", "S39", block_size=1, num_blocks=4, templates=(_TELLS,))
class HistoryIsToldOnce(Machine):
    """A readmitted row is treated as known, although the runner discarded it when it left."""

    def history_before(self) -> Tables:
        return tuple((r, ids) for r, ids in super().history_before() if r not in self.histories)


_SETTLED_ONLY = A._replace(max_tokens=3, settled_only=True)


@defect("unsettled-token-is-computed", "S42", depth=1, templates=(_SETTLED_ONLY,))
class UnsettledTokenIsComputed(Machine):
    """Its mask would be needed before the previous token is known."""

    def must_settle(self, _: int) -> bool:
        return False


@defect("every-request-reads-the-cache", "S38", templates=(LONG, LONG._replace(reads_cache=False)))
class EveryRequestReadsTheCache(Machine):
    def look_up(self, r: int) -> tuple[int, ...]:
        self.update(r, reads_cache=True)
        return super().look_up(r)


@defect("readmitted-request-reads-the-cache", "S38", block_size=1, templates=(_COMPUTES_ALL,))
class ReadmittedRequestReadsTheCache(Machine):
    def look_up(self, r: int) -> tuple[int, ...]:
        request = self.requests[r]
        self.update(r, reads_cache=request.reads_cache or len(request.tokens) > request.num_prompt)
        return super().look_up(r)


@defect("private-request-publishes-nothing", "S38", templates=(_COMPUTES_ALL,))
class PrivateRequestPublishesNothing(Machine):
    def publish(self, r: int) -> None:
        if self.requests[r].reads_cache:
            super().publish(r)
