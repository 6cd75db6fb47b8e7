"""Defects of what a plan tells the runner."""

from __future__ import annotations

from ..model import Machine
from .registry import LONG, defect

Tables = tuple[tuple[int, tuple[int, ...]], ...]


@defect("hits-lost-when-the-row-grows-by-a-block", "S32", block_size=1)
class HitsLostWhenTheRowGrowsByABlock(Machine):
    def whole_tables(self) -> Tables:
        hits = dict(self.admitted)
        return tuple(
            (r, table[-1:] if len(table) == len(hits[r]) + 1 else table)
            for r, table in super().whole_tables()
        )


@defect("resumed-row-is-told-its-growth-only", "S32", block_size=1)
class ResumedRowIsToldItsGrowthOnly(Machine):
    def whole_tables(self) -> Tables:
        return tuple(
            (r, table[len(self.view[r]) :] if r in self.view else table)
            for r, table in super().whole_tables()
        )


@defect(
    "last-block-of-a-chunk-is-told", "S32", block_size=1, templates=(LONG,), budget=2, num_blocks=5
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
