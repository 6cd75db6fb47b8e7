"""Defects of the block pool."""

from __future__ import annotations

from ..model import Machine
from ..state import Plan, Request, Template
from .registry import LONG, A, defect


@defect("hit-not-counted", "S1", "17, 36")
class HitNotCounted(Machine):
    def acquire(self, r: int, hits: tuple[int, ...]) -> None:
        refs = list(self.refs)
        super().acquire(r, hits)
        for block in hits:
            self.refs[block] = max(1, refs[block])


@defect("hit-stays-in-lru", "S2", "14, 23")
class HitStaysInLru(Machine):
    def acquire(self, r: int, hits: tuple[int, ...]) -> None:
        lru = list(self.lru)
        super().acquire(r, hits)
        self.lru = lru


@defect("full-last-block-freed-twice", "S3", "12, 28", abort=False)
class FullLastBlockFreedTwice(Machine):
    def release(self, r: int) -> None:
        table = self.requests[r].table
        super().release(r)
        if table and self.requests[r].computed == len(table) * self.block_size:
            self.drop_reference(table[-1])


@defect("published-block-on-free-stack", "S4", "14, 22")
class PublishedBlockOnFreeStack(Machine):
    def retire(self, block: int) -> None:
        self.free.append(block)


@defect("evicted-block-keeps-key", "S5", "1")
class EvictedBlockKeepsKey(Machine):
    def forget_key(self, block: int) -> None:
        pass


@defect("newest-evicted-first", "S5")
class NewestEvictedFirst(Machine):
    def evict(self) -> int:
        self.lru.insert(0, self.lru.pop())
        return super().evict()


@defect("key-without-salt", "S6 S16", "34", templates=(A, A._replace(salt=1)))
class KeyWithoutSalt(Machine):
    def block_key(self, request: Request, i: int) -> int:
        return super().block_key(request._replace(salt=0), i)


@defect("key-without-parent", "S6 S16", "13, 34", templates=(LONG, Template((1, 0, 0), 2)))
class KeyWithoutParent(Machine):
    def block_key(self, request: Request, i: int) -> int:
        own = request.tokens[i * self.block_size : (i + 1) * self.block_size]
        return super().block_key(request._replace(tokens=own), 0)


@defect("publish-before-settle", "S7", "4", depth=1)
class PublishBeforeSettle(Machine):
    def dispatch(self, plan: Plan, tokens: tuple[int, ...]) -> None:
        super().dispatch(plan, tokens)
        for row in plan.rows:
            request = self.requests[row.request]
            full = min(request.dispatched, len(request.tokens))
            self.update(row.request, computed=full)
            self.publish(row.request)
            self.update(row.request, computed=request.computed)


@defect("second-block-takes-the-key", "S8", "11", templates=(A,))
class SecondBlockTakesTheKey(Machine):
    def offer(self, block: int, key: int) -> None:
        self.index[key] = block
        self.keys[block] = key


@defect("last-token-recomputed-in-shared-block", "S9 S11", "2, 24", templates=(A,))
class LastTokenRecomputedInSharedBlock(Machine):
    def max_hit_blocks(self, request: Request) -> int:
        return len(request.tokens) // self.block_size

    def admit(self, r: int) -> bool:
        admitted = super().admit(r)
        done = min(self.requests[r].computed, len(self.requests[r].tokens) - 1)
        self.update(r, computed=done, dispatched=done)
        return admitted


@defect("whole-prompt-allocated-at-admission", "S10", "39", templates=(LONG,), budget=2)
class WholePromptAllocatedAtAdmission(Machine):
    def acquire(self, r: int, hits: tuple[int, ...]) -> None:
        super().acquire(r, hits)
        self.allocate(r, -(-len(self.requests[r].tokens) // self.block_size) - len(hits))


@defect("hit-covers-the-whole-prompt", "S11", "2, 24", templates=(A,))
class HitCoversTheWholePrompt(Machine):
    def max_hit_blocks(self, request: Request) -> int:
        return len(request.tokens) // self.block_size


@defect("eviction-between-look-up-and-acquisition", "S12", "21", num_blocks=4, block_size=1)
class EvictionBetweenLookUpAndAcquisition(Machine):
    def acquire(self, r: int, hits: tuple[int, ...]) -> None:
        if not self.free and self.lru:
            self.free.append(self.evict())
        self.lru += [block for block in hits if self.refs[block] == 0 and block not in self.lru]
        super().acquire(r, hits)


@defect(
    "failed-admission-keeps-its-hits",
    "S13",
    "20",
    templates=(A, Template((0, 0, 1, 1, 1), 2)),
    num_blocks=4,
    num_requests=3,
)
class FailedAdmissionKeepsItsHits(Machine):
    def make_room(
        self, preemptor: int, shortage: int, hits: tuple[int, ...], displaced: int | None = None
    ) -> bool:
        made = super().make_room(preemptor, shortage, hits, displaced)
        if not made:
            self.lru = [block for block in self.lru if block not in hits]
        return made


@defect("half-full-block-leaks", "S14", "38")
class HalfFullBlockLeaks(Machine):
    def release(self, r: int) -> None:
        request = self.requests[r]
        for block in reversed(request.table[: request.computed // self.block_size]):
            self.drop_reference(block)
        self.update(r, table=())
