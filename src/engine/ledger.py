"""Bookkeeping for the item ids of a pool: reference counts, an index by key, LRU eviction.

Every item is in exactly one of three places (S2, S43), decided by its count and its key (S4)::

    ref_count > 0                  owned: in that many tables
    ref_count == 0, key present    cached: in the LRU queue, still in the index
    ref_count == 0, key absent     free: on the free stack
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

BlockKey = tuple[bytes, bytes]
"""(chained prefix key, content of the block as bytes)."""


class Ledger:
    """Items ``0 .. num_items - 1``.

    Attributes:
        ref_counts, keys: per item. index: the item of each key.
        free: a stack of free items. lru: cached items, the least recently used first.
    """

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self.reset()

    def reset(self) -> None:
        """Free and unpublish every item, whatever its state."""
        num_items = self._num_items
        self.ref_counts = [0] * num_items
        # A stack: the most recently freed block is the likeliest to be in the CPU's caches.
        self.free = list(range(num_items - 1, -1, -1))
        # OrderedDict, not dict: popping the first item of a dict scans its deleted entries.
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.keys: list[bytes | None] = [None] * num_items
        self.index: dict[bytes, int] = {}
        # Content of each published item. A look-up compares it, so a key collision never matches
        # different content.
        self._contents: list[bytes | None] = [None] * num_items

    @property
    def num_available(self) -> int:
        """Items that could be taken now: free ones, then cached ones."""
        return len(self.free) + len(self.lru)

    def find(self, block_key: BlockKey) -> int | None:
        """The published item with this key and content, or None."""
        key, content = block_key
        item = self.index.get(key)
        return None if item is None or self._contents[item] != content else item

    def take(self, num_items: int) -> list[int]:
        """Take ``num_items`` items for one owner: free ones first, then the least recently used
        cached ones, which lose their key (S5). The caller has checked ``num_available``."""
        free, ref_counts = self.free, self.ref_counts
        taken: list[int] = []
        for _ in range(num_items):
            item = free.pop() if free else self._evict()
            ref_counts[item] = 1
            taken.append(item)
        return taken

    def share(self, items: Iterable[int]) -> None:
        """Add one reference to each of these published items."""
        ref_counts, lru = self.ref_counts, self.lru
        for item in items:
            if ref_counts[item] == 0:
                del lru[item]
            ref_counts[item] += 1

    def drop(self, items: Iterable[int]) -> None:
        """Remove one reference from each item, in this order."""
        ref_counts, keys = self.ref_counts, self.keys
        for item in items:
            ref_counts[item] -= 1
            if ref_counts[item] == 0:
                if keys[item] is None:
                    self.free.append(item)
                else:
                    self.lru[item] = None

    def offer(self, items: Iterable[int], block_keys: Iterable[BlockKey]) -> None:
        """Publish items under their keys. An item whose key is already published stays private:
        the index keeps one item per key (S8)."""
        for item, (key, content) in zip(items, block_keys, strict=True):
            if key not in self.index:
                self.index[key] = item
                self.keys[item] = key
                self._contents[item] = content

    def _evict(self) -> int:
        item, _ = self.lru.popitem(last=False)
        key = self.keys[item]
        assert key is not None, "an item in the LRU queue has a key (S4)"
        del self.index[key]
        self.keys[item] = None
        self._contents[item] = None
        return item
