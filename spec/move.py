"""One action, in the form that the properties in transitions.py read."""

from __future__ import annotations

from .state import Label, Plan, Scope, State

NO_PLAN = Plan(())


class Move:
    """One action with its states before and after."""

    def __init__(
        self, before: State, label: Label, plan: Plan | None, after: State, scope: Scope
    ) -> None:
        self.before, self.after, self.scope = before, after, scope
        self.label = label
        self.plan = plan or NO_PLAN
        self.hits = dict(plan.admitted) if plan else {}
        self.forked = dict(plan.forked) if plan else {}

    def kept(self, r: int) -> tuple[int, ...]:
        """The part of r's table that was not allocated in this step."""
        return self.hits[r] if r in self.hits else self.before.requests[r].table

    def taken(self) -> list[int]:
        """Blocks allocated in this step."""
        return [
            block
            for row in self.plan.rows
            for block in self.after.requests[row.request].table[len(self.kept(row.request)) :]
        ]

    def written(self) -> list[tuple[int, int]]:
        """Every (block, slot) that a row of the plan writes."""
        size = self.scope.block_size
        return [
            (self.after.requests[row.request].table[p // size], p % size)
            for row in self.plan.rows
            for p in range(row.start, row.end)
            if p // size < len(self.after.requests[row.request].table)
        ]

    def in_flight(self) -> set[tuple[int, int]]:
        """Every (block, slot) that a step in flight writes."""
        size = self.scope.block_size
        return {
            (row.blocks[p // size], p % size)
            for step in self.before.flight
            for row in step
            for p in range(row.start, row.end)
        }
