"""The pool of KV-cache blocks and, for models with recurrent layers, the pool of state slots.

Property numbers (S1, S2 ...) are those of ``spec/README.md``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from .ledger import Ledger
from .request import Request
from .segments import content_key
from .state_slots import StateSlots


class OutOfBlocksError(RuntimeError):
    """An allocation exceeds the number of free and cached blocks; nothing was changed (S13)."""


def block_key(parent_key: bytes, tokens: bytes) -> bytes:
    """Key of a full block: xxh3-128 over its parent's key and its content. A key therefore
    identifies the whole prefix up to and including the block. ``tokens``: its token ids (4 bytes
    each), then its part of content segments (see ``segments.content_key``)."""
    return xxhash.xxh3_128_digest(parent_key + tokens)


def root_key(cache_salt: bytes) -> bytes:
    """Parent key of a request's first block. Requests with different salts share no blocks."""
    return xxhash.xxh3_128_digest(b"pagespec prefix root:" + cache_salt)


class BlockManager(Ledger):
    """Allocates, shares, caches and evicts blocks of ``block_size`` token slots.

    Args:
        num_blocks: blocks in the pool, ids ``0 .. num_blocks - 1`` (without the runner's null
            block).
        block_size: token slots per block.
        enable_prefix_caching: publish full blocks and look them up.
        num_state_slots: 0 if the model has no recurrent layers.
        state_interval: see :class:`.StateSlots`.

    Attributes:
        states: the pool of state slots; None if the model has no recurrent layers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_state_slots: int = 0,
        state_interval: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.states: StateSlots | None = None
        if num_state_slots:
            self.states = StateSlots(
                num_state_slots,
                state_interval,
                block_size,
                enable_prefix_caching=enable_prefix_caching,
            )
        super().__init__(num_blocks)

    def reset(self) -> None:
        """Free and unpublish every block and every state slot, whatever its state."""
        super().reset()
        if self.states is not None:
            self.states.reset()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold ``num_tokens`` token slots."""
        return -(-num_tokens // self.block_size)

    # Prefix look-up ---------------------------------------------------------------------------

    def match(self, request: Request) -> list[int]:
        """The longest chain of published blocks that is a prefix of ``request``. With recurrent
        layers, it must end at a checkpoint of the state. Changes nothing.

        Covers at most ``len - 1`` tokens, so that one token is always left to compute (S11). The
        caller must ``acquire`` the result before any other change of the pool (S12). Empty for a
        request that does not read the cache (S38).
        """
        if not (self.enable_prefix_caching and request.reads_cache):
            return []
        hits: list[int] = []
        index, contents = self.index, self._contents
        num_hits_max = (len(request.token_ids) - 1) // self.block_size
        self._extend_keys(request, num_hits_max)
        for key, tokens in request.block_keys[:num_hits_max]:
            block = index.get(key)
            if block is None or contents[block] != tokens:
                break
            hits.append(block)
        if self.states is not None:
            del hits[self.states.longest(request.block_keys[: len(hits)]) :]
        return hits

    def num_cached_among(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` are in the LRU queue; acquiring them would reduce the number of
        available blocks."""
        ref_counts = self.ref_counts
        return sum(1 for block in blocks if ref_counts[block] == 0)

    # Ownership --------------------------------------------------------------------------------

    def acquire(self, request: Request, hits: list[int]) -> None:
        """Start ``request``'s empty block table with ``hits``, just returned by ``match``."""
        self.share(hits)
        request.block_table = list(hits)
        request.num_slots = len(hits) * self.block_size
        request.num_published = len(hits)
        if self.states is not None:
            self.states.acquire(request, len(hits))

    def allocate(self, request: Request, num_new_blocks: int) -> tuple[int, ...]:
        """Append ``num_new_blocks`` blocks to ``request``'s table and return their ids: free
        blocks first, then the least recently used cached ones, which lose their key (S5).

        Raises:
            OutOfBlocksError: fewer are available; nothing was changed.
        """
        if num_new_blocks > self.num_available:
            raise OutOfBlocksError(f"{num_new_blocks} of {self.num_available} blocks")
        taken = self.take(num_new_blocks)
        request.block_table += taken
        request.num_slots += num_new_blocks * self.block_size
        return tuple(taken)

    def release(self, request: Request) -> None:
        """Release all of ``request``'s blocks and state slots. Safe only when no step in flight
        writes them (S28). The last block is released first: a chain is evicted from its tail, so
        that its cached blocks remain reachable from the root."""
        self.drop(reversed(request.block_table))
        request.block_table = []
        request.num_slots = 0
        request.num_published = 0
        if self.states is not None:
            self.states.release(request)

    def publish(self, request: Request) -> None:
        """Publish ``request``'s blocks that are full of settled tokens in the prefix index (S7),
        and the states at the end of settled intervals."""
        if self.enable_prefix_caching:
            self._publish_blocks(request)
        if self.states is not None:
            self.states.settle(request)

    # ------------------------------------------------------------------------------------------

    def _publish_blocks(self, request: Request) -> None:
        num_full_blocks = request.num_computed // self.block_size
        begin = request.num_published
        if begin >= num_full_blocks:
            return
        self._extend_keys(request, num_full_blocks)
        keys = request.block_keys[begin:num_full_blocks]
        self.offer(request.block_table[begin:num_full_blocks], keys)
        request.num_published = num_full_blocks

    def _extend_keys(self, request: Request, num_full_blocks: int) -> None:
        """Extend ``request.block_keys`` to its first ``num_full_blocks`` blocks."""
        keys = request.block_keys
        num_known = len(keys)
        if num_known >= num_full_blocks:
            return
        parent = keys[-1][0] if keys else root_key(request.cache_salt)
        size = self.block_size
        token_ids = request.token_ids[num_known * size : num_full_blocks * size]
        tokens = array("i", token_ids).tobytes()
        num_bytes = len(tokens) // (num_full_blocks - num_known)
        contents = request.contents
        for begin in range(0, len(tokens), num_bytes):
            chunk = tokens[begin : begin + num_bytes]
            if contents:
                first = len(keys) * size
                chunk += content_key(contents, first, first + size)
            parent = block_key(parent, chunk)
            keys.append((parent, chunk))
