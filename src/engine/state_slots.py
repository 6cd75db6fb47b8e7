"""The pool of state slots: recurrent states of requests, and their checkpoints.

The positions of a request are divided into intervals. Entry i of a request's *state table* is the
slot that holds its state while positions of interval i are computed. If the next entry is another
slot, the first one keeps the state at the end of its interval: a *checkpoint*, which is published
once it is settled. If it is the same slot, the state is updated in place. Like a block, every slot
is in exactly one of three places (S43), see ``ledger``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidInputError
from .ledger import BlockKey, Ledger
from .request import Request

NO_SLOT = -1  # an entry whose slot was released


class StateSlots(Ledger):
    """Allocates, shares, caches and evicts state slots.

    Args:
        num_slots: slots in the pool, ids ``0 .. num_slots - 1`` (without the runner's null slot).
        interval: tokens per entry of a state table, a multiple of block_size.
        enable_prefix_caching: keep checkpoints, and look them up.
    """

    def __init__(
        self, num_slots: int, interval: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        if interval < 1 or interval % block_size:
            limit = f"must be a multiple of block_size = {block_size}"
            raise InvalidInputError("state_interval", interval, limit)
        self.num_slots = num_slots
        self.interval = interval
        self.blocks_per_interval = interval // block_size
        self.enable_prefix_caching = enable_prefix_caching
        super().__init__(num_slots)

    # Prefix look-up ---------------------------------------------------------------------------

    def longest(self, block_keys: Sequence[BlockKey]) -> int:
        """Number of leading blocks up to the last cached checkpoint (S49)."""
        size = self.blocks_per_interval
        for num_blocks in range(len(block_keys) // size * size, 0, -size):
            if self.find(block_keys[num_blocks - 1]) is not None:
                return num_blocks
        return 0

    def has_one_beside(self, request: Request, num_hits: int) -> bool:
        """Whether a slot is available for ``request`` alone, in addition to the checkpoint after
        its first ``num_hits`` blocks, as found by ``longest``."""
        num_left = self.num_available
        if num_hits:
            num_left -= self.ref_counts[self.index[request.block_keys[num_hits - 1][0]]] == 0
        return num_left >= 1

    def acquire(self, request: Request, num_hits: int) -> None:
        """Start ``request``'s empty state table with the checkpoint after its first ``num_hits``
        blocks, as found by ``longest``. The checkpoint is shared and read-only."""
        if num_hits:
            slot = self.index[request.block_keys[num_hits - 1][0]]
            self.share([slot])
            request.num_past_states = num_hits // self.blocks_per_interval - 1
            request.state_table = [NO_SLOT] * request.num_past_states + [slot]

    # Ownership --------------------------------------------------------------------------------

    def extend(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """Extend ``request``'s state table to its first ``num_tokens`` tokens (S44); returns the
        entries appended. The state at the end of an interval is kept as a checkpoint if another
        slot is available: a free one, else the least recently used checkpoint, which loses its key
        (S52).
        """
        table = request.state_table
        num_new = -(-num_tokens // self.interval) - len(table)
        if num_new <= 0:
            return ()
        for _ in range(num_new):
            has_own = bool(table) and self.keys[table[-1]] is None
            if has_own and not (self.enable_prefix_caching and self.num_available):
                table.append(table[-1])
            else:
                table += self.take(1)
        return tuple(table[-num_new:])

    def settle(self, request: Request) -> None:
        """Release the entries of ``request`` whose intervals precede its settled positions: no step
        reads or writes them again. Publish the checkpoints among them (S46)."""
        table, begin = request.state_table, request.num_past_states
        end = (request.num_computed - 1) // self.interval
        for i in range(begin, end):
            slot = table[i]
            table[i] = NO_SLOT
            if slot != table[i + 1]:
                if self.enable_prefix_caching and self.keys[slot] is None:
                    last_block = (i + 1) * self.blocks_per_interval - 1
                    self.offer([slot], [request.block_keys[last_block]])
                self.drop([slot])
        request.num_past_states = max(begin, end)

    def release(self, request: Request) -> None:
        """Release all of ``request``'s slots, the last first. Safe only when no step in flight
        reads or writes them (S47)."""
        slots = dict.fromkeys(reversed(request.state_table))
        self.drop(slot for slot in slots if slot != NO_SLOT)
        request.state_table = []
        request.num_past_states = 0
