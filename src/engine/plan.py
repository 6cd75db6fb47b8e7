"""The frozen plan of one step: what the scheduler decided, and all the runner needs to know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pagespec.engine.request import Request


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as parallel arrays, a row for each request in it, in rank order.

    Row ``i`` computes positions ``[starts[i], starts[i] + num_tokens[i])`` of ``requests[i]``,
    and one token is sampled from its last position if and only if ``sampled[i]``.

    The token ids at those positions are ``requests[i].token_ids[start : start + n]``. When steps
    overlap, the last position may be a token that an earlier step in flight is still sampling:
    then ``start >= len(token_ids)``, ``n == 1``, and the runner feeds its own device copy.
    ``requests[i].block_table`` already covers every position. A runner reads requests during
    ``dispatch`` only and never writes to them.

    Attributes:
        step: 0, 1, 2 ... in dispatch order.
        preempted: requests whose blocks were taken back for this step; none of them is a row.
        new_blocks: for each row that got blocks, the ids appended to its block table (the hits of
            a new admission included).
        is_decode_only: every row computes one position and samples from it.
    """

    step: int
    requests: tuple[Request, ...]
    starts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    sampled: tuple[bool, ...]
    preempted: tuple[Request, ...] = ()
    new_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    is_decode_only: bool = False

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def total_num_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)

    def rows(self) -> Iterator[tuple[Request, int, int, bool]]:
        """(request, start, num_tokens, sampled) a row; for tests, traces and simple runners."""
        return zip(self.requests, self.starts, self.num_tokens, self.sampled, strict=True)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a runner returns for a plan: one token id for each sampled row, in row order."""

    token_ids: Sequence[int]
