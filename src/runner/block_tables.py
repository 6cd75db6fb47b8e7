"""The host's view of the tables on the device: the row of each request, and pending writes.

Block tables are on the device, with one row per running request. If the model has recurrent layers,
state tables follow them. A step sends the changes that its plan contains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..engine.plan import StepPlan
from ..engine.request import RequestInfo
from .pinned import IntArray


class _Filled:
    """The number of entries in each row of one kind of table.

    Args:
        num_rows: rows of the store. width: entries per row. first: flat index of the first entry.
    """

    def __init__(self, num_rows: int, width: int, first: int) -> None:
        self._width, self._first = width, first
        self.num_entries = [0] * num_rows

    def append(self, row: int, new: Sequence[int], where: list[int], ids: list[int]) -> None:
        begin = self._first + row * self._width + self.num_entries[row]
        where += range(begin, begin + len(new))
        ids += new
        self.num_entries[row] += len(new)


class BlockTableStore:
    """The row of the device's table store that contains each running request's block table.

    Args:
        num_rows: rows of the store; at least the number of requests that can run at a time.
        width: the most blocks that a row holds.
        state_width: entries per row of a state table, which is stored after all block tables. With
            0 there are none, and state tables of plans are ignored.
        null_state_slot: replaces a slot that a request does not have.
    """

    def __init__(
        self, num_rows: int, width: int, state_width: int = 0, null_state_slot: int = 0
    ) -> None:
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._blocks = _Filled(num_rows, width, 0)
        self._states = _Filled(num_rows, state_width, num_rows * width)
        self._has_states, self._null_state_slot = state_width > 0, null_state_slot
        self._last_requests: tuple[RequestInfo, ...] = ()
        self.rows: list[int] = []
        self.row_array: IntArray = np.empty(0, np.int32)

    def place(self, plan: StepPlan) -> None:
        """Find the store row for each of the plan's rows: ``rows``, and ``row_array`` as int32.

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
            self.row_array = np.array(self.rows, np.int32)
            self._last_requests = plan.requests

    def pending_writes(
        self, plan: StepPlan, new_blocks: IntArray | None = None
    ) -> tuple[list[int], list[int]]:
        """Flat indices into the tables on the device, and ids, to send for the plan placed last.

        Args:
            new_blocks: ``[>= rows]``. For a decode-only plan, the block by which each row grew is
                written here instead. The kernel of the step stores it at the block of the row's
                position.
        """
        where: list[int] = []
        ids: list[int] = []
        rows, filled = self.rows, self._blocks
        for row, blocks in plan.tables.items():
            filled.num_entries[rows[row]] = 0
            filled.append(rows[row], blocks, where, ids)
        for row, blocks in plan.new_blocks.items():
            if new_blocks is None:
                filled.append(rows[row], blocks, where, ids)
            else:
                (new_blocks[row],) = blocks
                filled.num_entries[rows[row]] += 1
        if not self._has_states:
            return where, ids
        for row, slots in plan.state_tables.items():
            self._states.num_entries[rows[row]] = 0
            held = [self._null_state_slot if slot < 0 else slot for slot in slots]
            self._states.append(rows[row], held, where, ids)
        for row, slots in plan.new_state_slots.items():
            self._states.append(rows[row], slots, where, ids)
        return where, ids
