"""Whose blocks are taken: the choice of victims by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pagespec.engine.preemption import choose_victims


def request(rank: int, *block_table: int) -> Any:
    return SimpleNamespace(rank=rank, block_table=list(block_table))


def victims(running: list[Any], asker: Any, num_blocks: int) -> list[Any] | None:
    tables = [block for each in running for block in each.block_table]
    counts = [tables.count(block) for block in range(max(tables) + 1)]
    blocks: Any = SimpleNamespace(ref_counts=counts)
    return choose_victims(blocks, running, asker, num_blocks)


def test_a_victim_whose_blocks_all_stay_in_use_is_not_preempted() -> None:
    """The youngest shares its blocks with the oldest, which stays."""
    oldest, asker, owner, sharer = (
        request(0, 0, 1),
        request(1, 2),
        request(2, 3),
        request(3, 0, 1),
    )
    running = [oldest, asker, owner, sharer]
    assert victims(running, asker, 1) == [owner]
    assert victims(running, asker, 2) is None


def test_victims_that_share_with_each_other_free_their_blocks_together() -> None:
    oldest, one, other = request(0, 0), request(1, 1, 2), request(2, 1, 2)
    assert victims([oldest, one, other], oldest, 1) == [other, one]


def test_as_few_of_the_youngest_as_are_enough() -> None:
    oldest, *younger = (request(rank, rank) for rank in range(4))
    assert victims([oldest, *younger], oldest, 2) == younger[:0:-1]
    assert victims([oldest, *younger], younger[-1], 1) is None
