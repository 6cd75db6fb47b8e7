"""The block pool: reference counts, chained keys, a free stack and an LRU of cached blocks.

``Pool`` is a mutable copy of one state, used for one action. Each rule is one small method, so that
a seeded defect (``defects``) overrides exactly one rule.
"""

from __future__ import annotations

from .state import EMPTY, Request, Row, Scope, Slots, State, names


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Pool:
    def __init__(self, state: State, scope: Scope) -> None:
        self.scope = scope
        self.block_size = scope.block_size
        self.requests: list[Request] = list(state.requests)
        self.waiting = list(state.waiting)
        self.running = list(state.running)
        self.paused = list(state.paused)
        self.flight: list[tuple[Row, ...]] = list(state.flight)
        self.refs = list(state.refs)
        self.keys = list(state.keys)
        self.index = dict(state.index)
        self.free = list(state.free)
        self.lru = list(state.lru)
        self.contents = list(state.contents)
        self.view = dict(state.view)
        self.left = list(state.left)
        self.histories = dict(state.histories)
        self.pending = list(state.pending)
        slots = state.slots
        self.slot_refs = list(slots.refs)
        self.slot_keys = list(slots.keys)
        self.slot_index = dict(slots.index)
        self.free_slots = list(slots.free)
        self.slot_lru = list(slots.lru)
        self.slot_contents = list(slots.contents)
        self.state_view = dict(state.state_view)
        self.queued = list(state.queued)
        self.clock = state.clock
        self.shares = dict(state.shares)
        self.new_turns: list[int] = []  # requests that got their turns in this action

    def freeze(self) -> State:
        return State(
            tuple(self.requests),
            tuple(self.waiting),
            tuple(self.running),
            tuple(self.paused),
            tuple(self.flight),
            tuple(self.refs),
            tuple(self.keys),
            tuple(sorted(self.index.items())),
            tuple(self.free),
            tuple(self.lru),
            tuple(self.contents),
            tuple(sorted(self.view.items())),
            tuple(sorted(self.left)),
            tuple(sorted(self.histories.items())),
            tuple(self.pending),
            Slots(
                tuple(self.slot_refs),
                tuple(self.slot_keys),
                tuple(sorted(self.slot_index.items())),
                tuple(self.free_slots),
                tuple(self.slot_lru),
                tuple(self.slot_contents),
            ),
            tuple(sorted(self.state_view.items())),
            tuple(self.queued),
            self.clock,
            tuple(sorted(self.shares.items())),
        )

    def update(self, r: int, **fields: object) -> None:
        self.requests[r] = self.requests[r]._replace(**fields)  # type: ignore[arg-type]

    def clear_contents(self, block: int) -> None:
        # The contents of a free block must be written before they are read. Clearing them makes a
        # violation visible, and makes free blocks equal.
        self.contents[block] = (EMPTY,) * self.block_size

    def reset_pool(self) -> None:
        """Every block free and unpublished, in the initial order."""
        count = self.scope.num_blocks
        self.refs, self.keys = [0] * count, [None] * count
        self.index, self.lru = {}, []
        self.free = list(reversed(range(count)))
        for block in range(count):
            self.clear_contents(block)

    # ------------------------------------------------------------------ taking
    def num_available(self) -> int:
        return len(self.free) + len(self.lru)

    def take_block(self) -> int:
        """S5: a free block, else the oldest cached one, whose key is removed."""
        block = self.free.pop() if self.free else self.evict()
        self.clear_contents(block)
        return block

    def evict(self) -> int:
        block = self.lru.pop(0)
        self.forget_key(block)
        return block

    def forget_key(self, block: int) -> None:
        key = self.keys[block]
        if key is not None:
            self.index.pop(key, None)
            self.keys[block] = None

    def allocate(self, r: int, count: int) -> None:
        table = list(self.requests[r].table)
        for _ in range(count):
            block = self.take_block()
            self.refs[block] += 1
            table.append(block)
        self.update(r, table=tuple(table))

    # ------------------------------------------------------------------ prefix hits
    def block_key(self, request: Request, i: int) -> int:
        """The chained key of full block i: the salt and, up to the block's end, all tokens and the
        positions of each content segment."""
        return names(request)[(i + 1) * self.block_size - 1]

    def max_hit_blocks(self, request: Request) -> int:
        """S11: one token is always left to compute."""
        return (len(request.tokens) - 1) // self.block_size

    def look_up(self, r: int) -> tuple[int, ...]:
        """The longest chain of published blocks. Changes nothing."""
        request, hits = self.requests[r], []
        if self.scope.caching and request.reads_cache:
            for i in range(self.max_hit_blocks(request)):
                block = self.index.get(self.block_key(request, i))
                if block is None:
                    break
                hits.append(block)
        return tuple(hits)

    def acquire(self, r: int, hits: tuple[int, ...]) -> None:
        for block in hits:
            if self.refs[block] == 0:
                self.lru.remove(block)
            self.refs[block] += 1
        self.update(r, table=hits)

    # ------------------------------------------------------------------ giving back
    def release(self, r: int) -> None:
        """Last block first, so that a chain loses its tail before its head."""
        for block in reversed(self.requests[r].table):
            self.drop_reference(block)
        self.update(r, table=())

    def drop_reference(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.retire(block)

    def retire(self, block: int) -> None:
        if self.keys[block] is not None:
            self.lru.append(block)
        else:
            self.free.append(block)
            self.clear_contents(block)

    # ------------------------------------------------------------------ publishing
    def publish(self, r: int) -> None:
        """Offer the full, settled blocks to the index. The first block with a key keeps it."""
        request = self.requests[r]
        full = request.computed // self.block_size
        if self.scope.caching and full > request.published:
            for i in range(request.published, full):
                self.offer(request.table[i], self.block_key(request, i))
            self.update(r, published=full)

    def offer(self, block: int, key: int) -> None:
        if key not in self.index:
            self.index[key] = block
            self.keys[block] = key
