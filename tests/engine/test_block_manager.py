"""Unit tests of the block pool: the effect of each operation on the queues, and invalid calls."""

from __future__ import annotations

import pytest

from pagespec import SamplingParams
from pagespec.engine import block_manager
from pagespec.engine.block_manager import BlockManager, OutOfBlocksError
from pagespec.engine.request import Request


def make_request(tokens: list[int], salt: bytes = b"") -> Request:
    return Request("r", tokens, SamplingParams(), max_num_tokens=100, cache_salt=salt)


def fill(pool: BlockManager, tokens: list[int]) -> Request:
    """A request whose every token is computed, settled and published."""
    request = make_request(tokens)
    pool.acquire(request, pool.match(request))
    pool.allocate(request, pool.num_blocks_for(len(tokens)) - len(request.block_table))
    request.num_computed = len(tokens)
    pool.publish(request)
    return request


def test_blocks_come_from_the_free_stack_then_from_the_oldest_cached() -> None:
    pool = BlockManager(4, 2)
    first = fill(pool, [1, 2, 3, 4])
    assert first.block_table == [0, 1]
    pool.release(first)
    assert list(pool.lru) == [1, 0], "the tail of a chain is the first to be evicted"
    second = make_request([9] * 6)
    assert pool.allocate(second, 3) == (2, 3, 1)
    assert pool.keys[1] is None, "S5: an evicted block loses its key in the same step"
    assert len(pool.index) == 1


def test_an_allocation_that_fails_changes_nothing() -> None:
    pool = BlockManager(3, 2)
    request = make_request([1, 2, 3])
    pool.allocate(request, 2)
    before = (list(pool.free), list(request.block_table), list(pool.ref_counts))
    with pytest.raises(OutOfBlocksError, match="2 of 1"):
        pool.allocate(request, 2)
    assert (pool.free, request.block_table, pool.ref_counts) == before


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    pool = BlockManager(8, 2)
    fill(pool, [1, 2, 3, 4])
    assert pool.match(make_request([1, 2, 3, 4])) == [0], "S11: not the whole prompt"
    assert pool.match(make_request([1, 2, 3, 4, 5])) == [0, 1]
    assert pool.match(make_request([1, 2])) == []


def test_a_hit_needs_the_whole_chain_and_the_same_salt() -> None:
    pool = BlockManager(8, 2)
    fill(pool, [1, 2, 3, 4, 5])
    assert pool.match(make_request([7, 7, 3, 4, 5])) == []
    assert pool.match(make_request([1, 2, 9, 9, 3, 4, 5])) == [0]
    assert pool.match(make_request([1, 2, 3, 4, 5], salt=b"tenant")) == []
    assert pool.match(make_request([257, 2, 3])) == [], "keys see more than a token's low byte"


def test_colliding_keys_are_told_apart_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "block_key", lambda parent, tokens: b"same")
    pool = BlockManager(8, 2)
    fill(pool, [1, 2, 3])
    assert pool.match(make_request([5, 6, 7])) == []
    assert pool.match(make_request([1, 2, 7])) == [0]


def test_equal_blocks_keep_one_index_entry() -> None:
    pool = BlockManager(8, 2)
    first, second = make_request([1, 2, 3]), make_request([1, 2, 3])
    for request in (first, second):  # both computed before either was published
        pool.allocate(request, 2)
        request.num_computed = 3
    pool.publish(first)
    pool.publish(second)
    assert pool.keys[first.block_table[0]] is not None
    assert pool.keys[second.block_table[0]] is None, "S8"
    pool.release(first)
    assert pool.match(make_request([1, 2, 3])) == [0]
    pool.release(second)
    assert pool.num_available == 8


def test_a_shared_block_is_cached_once_its_last_owner_leaves() -> None:
    pool = BlockManager(8, 2)
    first = fill(pool, [1, 2, 3])
    second = fill(pool, [1, 2, 4])
    assert pool.ref_counts[0] == 2
    pool.release(first)
    assert 0 not in pool.lru
    pool.release(second)
    assert 0 in pool.lru


def test_without_prefix_caching_nothing_is_published() -> None:
    pool = BlockManager(8, 2, enable_prefix_caching=False)
    fill(pool, [1, 2, 3])
    assert pool.index == {}
    assert pool.match(make_request([1, 2, 3])) == []
