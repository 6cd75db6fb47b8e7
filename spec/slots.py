"""State slots: the recurrent states of requests, and their checkpoints.

The positions of a request are divided into intervals. Entry i of its state table is the slot that
holds its state while positions of interval i are computed. If the next entry is another slot, the
first one keeps the state at the end of its interval: a checkpoint. If it is the same slot, the
state is updated in place.

A slot is owned (by one request, or as a checkpoint that requests have found), cached (a checkpoint
without owner), or free. Models without recurrent layers have no slots.
"""

from __future__ import annotations

from .pool import Pool, ceil_div
from .state import EMPTY, NO_SLOT, Request, contents_by_position, extend, root


class StateSlots(Pool):
    def reset_pool(self) -> None:
        super().reset_pool()
        count = self.scope.num_states
        self.slot_refs, self.slot_keys = [0] * count, [None] * count
        self.slot_index, self.slot_lru = {}, []
        self.free_slots = list(reversed(range(count)))
        self.slot_contents = [EMPTY] * count

    # ------------------------------------------------------------------ taking
    def num_available_slots(self) -> int:
        return len(self.free_slots) + len(self.slot_lru)

    def take_slot(self) -> int:
        """S52: a free slot, else the oldest checkpoint without an owner, which loses its key."""
        slot = self.free_slots.pop() if self.free_slots else self.evict_slot()
        self.slot_contents[slot] = EMPTY
        self.slot_refs[slot] += 1
        return slot

    def evict_slot(self) -> int:
        slot = self.slot_lru.pop(0)
        self.forget_slot_key(slot)
        return slot

    def forget_slot_key(self, slot: int) -> None:
        key = self.slot_keys[slot]
        if key is not None:
            self.slot_index.pop(key, None)
            self.slot_keys[slot] = None

    def grow_states(self, r: int, end: int) -> None:
        """S44: an entry for each interval that positions before ``end`` reach."""
        if self.scope.num_states:
            table = list(self.requests[r].states)
            while len(table) < ceil_div(end, self.scope.interval):
                table.append(self.next_slot(table))
            self.update(r, states=tuple(table))

    def next_slot(self, table: list[int]) -> int:
        if table and self.goes_on_in_place(table[-1]):
            return table[-1]
        return self.take_slot()

    def goes_on_in_place(self, slot: int) -> bool:
        """A checkpoint is kept if that needs no slot in use. A checkpoint that a request found is
        never written."""
        has_other = self.scope.caching and self.num_available_slots() > 0
        return self.slot_keys[slot] is None and not has_other

    # ------------------------------------------------------------------ prefix hits
    def look_up(self, r: int) -> tuple[int, ...]:
        """S49: block hits count only up to the last cached state."""
        hits = super().look_up(r)
        return self.cut(self.requests[r], hits) if self.scope.num_states else hits

    def cut(self, request: Request, hits: tuple[int, ...]) -> tuple[int, ...]:
        size = self.scope.interval // self.block_size
        count = len(hits) // size
        while count and self.checkpoint(request, count) is None:
            count -= 1
        return hits[: count * size]

    def checkpoint(self, request: Request, count: int) -> int | None:
        """The slot of the state after ``count`` intervals, if it is cached."""
        return self.slot_index.get(self.state_key(request, count))

    def state_key(self, request: Request, count: int) -> int:
        """The key of the block that ends there."""
        return self.block_key(request, count * self.scope.interval // self.block_size - 1)

    def num_hit_intervals(self, hits: tuple[int, ...]) -> int:
        return len(hits) * self.block_size // self.scope.interval

    def has_slot_beside(self, r: int, hits: tuple[int, ...]) -> bool:
        """Whether r could be admitted with these hits: it needs a slot of its own."""
        if not self.scope.num_states:
            return True
        num_left = self.num_available_slots()
        count = self.num_hit_intervals(hits)
        if count:
            num_left -= self.checkpoint(self.requests[r], count) in self.slot_lru
        return num_left >= 1

    def acquire(self, r: int, hits: tuple[int, ...]) -> None:
        super().acquire(r, hits)
        if self.scope.num_states and hits:
            count = self.num_hit_intervals(hits)
            slot = self.checkpoint(self.requests[r], count)
            if slot is not None:
                self.share_slot(slot)
                self.update(r, states=(NO_SLOT,) * (count - 1) + (slot,))

    def share_slot(self, slot: int) -> None:
        if self.slot_refs[slot] == 0:
            self.slot_lru.remove(slot)
        self.slot_refs[slot] += 1

    # ------------------------------------------------------------------ giving back
    def publish(self, r: int) -> None:
        super().publish(r)
        if self.scope.num_states:
            self.settle_states(r)

    def num_past(self, request: Request) -> int:
        """Number of entries that no step reads or writes again: settled positions are past them."""
        return max(0, request.computed - 1) // self.scope.interval

    def settle_states(self, r: int) -> None:
        """S44: release past entries. A slot that the next entry does not use is a checkpoint: it is
        published and released, unless the index has another one for the same tokens."""
        request = self.requests[r]
        table, count = request.states, self.num_past(request)
        for i in range(count):
            if table[i] not in (NO_SLOT, table[i + 1]):
                self.give_up(request, i, table[i])
        self.update(r, states=(NO_SLOT,) * count + table[count:])

    def give_up(self, request: Request, i: int, slot: int) -> None:
        if self.scope.caching and self.slot_keys[slot] is None:
            self.offer_state(slot, self.state_key(request, i + 1))
        self.drop_slot(slot)

    def offer_state(self, slot: int, key: int) -> None:
        if key not in self.slot_index:
            self.slot_index[key] = slot
            self.slot_keys[slot] = key

    def drop_slot(self, slot: int) -> None:
        self.slot_refs[slot] -= 1
        if self.slot_refs[slot] == 0:
            if self.slot_keys[slot] is not None:
                self.slot_lru.append(slot)
            else:
                self.free_slots.append(slot)
                self.slot_contents[slot] = EMPTY

    def release(self, r: int) -> None:
        super().release(r)
        for slot in self.held_slots(self.requests[r]):
            self.drop_slot(slot)
        self.update(r, states=())

    def held_slots(self, request: Request) -> list[int]:
        """Each slot of the state table once, the last first."""
        return [slot for slot in dict.fromkeys(reversed(request.states)) if slot != NO_SLOT]

    # ------------------------------------------------------------------ what a step does
    def write_states(self, r: int, start: int, n: int, ids: tuple[int, ...]) -> None:
        """Start from the state before ``start`` and update it position by position; keep it at the
        end of each interval and of the row."""
        if not self.scope.num_states:
            return
        request, interval = self.requests[r], self.scope.interval
        state = self.state_before(request, start)
        contents = contents_by_position(request.segments)
        for position in range(start, min(start + n, len(ids))):
            if state != EMPTY:
                state = extend(state, ids[position], contents.get(position))
            if (position + 1) % interval == 0 or position + 1 == start + n:
                self.write_state(request, position // interval, state)

    def state_before(self, request: Request, start: int) -> int:
        if start == 0:
            return root(request.salt)
        entry = (start - 1) // self.scope.interval
        # Only a defect has an entry outside the table; S44 or S45 detects it.
        slot = request.states[entry] if entry < len(request.states) else NO_SLOT
        return EMPTY if slot == NO_SLOT else self.slot_contents[slot]

    def write_state(self, request: Request, entry: int, state: int) -> None:
        if entry < len(request.states) and request.states[entry] != NO_SLOT:
            self.slot_contents[request.states[entry]] = state
