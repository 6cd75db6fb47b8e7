"""Chooses the victims of a preemption: the fewest youngest requests whose blocks suffice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .block_manager import BlockManager
from .request import Request


def choose_victims(
    blocks: BlockManager,
    running: Sequence[Request],
    asker: Request,
    num_blocks: int,
    hits: Sequence[int] = (),
    displaced: Request | None = None,
) -> list[Request] | None:
    """The fewest youngest of ``running``, all younger than ``asker``, whose release together makes
    ``num_blocks`` more blocks available. Changes nothing.

    Args:
        running: in rank order, eldest first.
        hits: blocks the asker is about to share; they become available to nobody.
        displaced: one of ``running`` whose place the asker takes. It is the first of the victims,
            and needs give no block.

    Returns:
        The victims, youngest first, each of which gives at least one block (S21): one that shares
        all its blocks with requests that stay would lose its work for nothing. None if not even
        all the younger ones together have enough.
    """
    num_refs = {block: blocks.ref_counts[block] + 1 for block in hits}
    num_gained = 0
    victims: list[Request] = []
    younger = (v for v in reversed(running) if v is not displaced)
    for victim in younger if displaced is None else chain((displaced,), younger):
        if victim is not displaced and (victim.rank <= asker.rank or num_gained >= num_blocks):
            break
        victims.append(victim)
        for block in victim.block_table:
            num_refs[block] = num_refs.get(block, blocks.ref_counts[block]) - 1
            num_gained += num_refs[block] == 0
    if num_gained < num_blocks:
        return None
    return [
        v for v in victims if v is displaced or any(num_refs[block] == 0 for block in v.block_table)
    ]
