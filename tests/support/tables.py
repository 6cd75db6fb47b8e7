"""Block tables and states rebuilt from an engine's plans alone, as an independent reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagespec.engine.plan import StepPlan


class RowSeen(NamedTuple):
    """The token ids, positions and slots of a row, and the used part of its block table."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    table: list[int]


class TablesFromPlans(dict[str, tuple[int, ...]]):
    """The block table of each running request, by its id. `take` receives every plan, in order."""

    def take(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            self.pop(request_id, None)
        for row, blocks in plan.tables.items():
            self[plan.requests[row].request_id] = tuple(blocks)
        for row, blocks in plan.new_blocks.items():
            self[plan.requests[row].request_id] += tuple(blocks)


class StateTablesFromPlans(dict[str, tuple[int, ...]]):
    """The state table of each running request, by its id; it still has slots released since."""

    def take(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            self.pop(request_id, None)
        for row, slots in plan.state_tables.items():
            self[plan.requests[row].request_id] = tuple(slots)
        for row, slots in plan.new_state_slots.items():
            self[plan.requests[row].request_id] += tuple(slots)


class HistoriesFromPlans(dict[str, tuple[int, ...]]):
    """All tokens of each running request that needs them, by its id (S39)."""

    def take(self, plan: StepPlan, token_ids: Sequence[int]) -> None:
        """Apply the next plan, whose ``token_ids`` are replaced by the ids on the device."""
        for request_id in plan.released:
            self.pop(request_id, None)
        for row, ids in plan.prefixes.items():
            self[plan.requests[row].request_id] = tuple(ids)
        begin = 0
        for request, start, num_tokens, _ in plan.rows():
            if request.request_id in self:
                ids = tuple(token_ids[begin : begin + num_tokens])
                # Rejected draft tokens lie from the row's start on.
                self[request.request_id] = self[request.request_id][:start] + ids
            begin += num_tokens
