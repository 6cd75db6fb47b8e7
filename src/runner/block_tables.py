"""The host's view of the block tables on the device: which row is whose, and what is to be written.

Block tables live on the device, a row per running request; a step sends what its plan says of them.
"""

from __future__ import annotations

from ..engine.plan import Blocks, StepPlan
from ..engine.request import RequestInfo
from .pinned_ring import IntArray


class BlockTableStore:
    """Which row of the device's table store holds which running request's block table.

    Args:
        num_rows: rows of the store; at least the requests that can run at a time.
        width: blocks a row holds.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self._width = width
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_blocks = [0] * num_rows  # that each row of the store holds
        self._last_requests: tuple[RequestInfo, ...] = ()
        self.rows: list[int] = []

    def place(self, plan: StepPlan) -> None:
        """Find the store row of each of the plan's rows; ``rows`` is the list of them.

        Raises:
            RuntimeError: the plan releases a request that was not admitted since the last reset.
        """
        rows_of = self._rows
        for request_id in plan.released:
            if request_id not in rows_of:
                raise RuntimeError(f"step {plan.step} releases {request_id!r}, which has no table")
            self._free_rows.append(rows_of.pop(request_id))
        for row in plan.tables:
            rows_of[plan.requests[row].request_id] = self._free_rows.pop()
        if plan.tables or plan.requests != self._last_requests:
            self.rows = [rows_of[request.request_id] for request in plan.requests]
            self._last_requests = plan.requests

    def pending_writes(
        self, plan: StepPlan, new_blocks: IntArray | None = None
    ) -> tuple[list[int], list[int]]:
        """Flat store indices and block ids to send for the plan placed last.

        Args:
            new_blocks: of a decode-only plan, where the block a row grew by is written instead,
                ``[>= rows]``: its kernel stores it at the block of the row's position.
        """
        where: list[int] = []
        ids: list[int] = []
        num_blocks = self._num_blocks
        for row, blocks in plan.tables.items():
            num_blocks[self.rows[row]] = 0
            self._append(row, blocks, where, ids)
        for row, blocks in plan.new_blocks.items():
            if new_blocks is None:
                self._append(row, blocks, where, ids)
            else:
                (new_blocks[row],) = blocks
                num_blocks[self.rows[row]] += 1
        return where, ids

    def _append(self, row: int, blocks: Blocks, where: list[int], ids: list[int]) -> None:
        store_row = self.rows[row]
        begin = store_row * self._width + self._num_blocks[store_row]
        where += range(begin, begin + len(blocks))
        ids += blocks
        self._num_blocks[store_row] += len(blocks)
