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


class PlanDraft:
    """A plan while the scheduler writes it.

    Rows of one sampled token are the rule, so only the exceptions are written down a row at a
    time; ``freeze`` fills in the rest.
    """

    __slots__ = (
        "held",
        "is_admission_over",
        "is_closed",
        "max_num_tokens",
        "new_blocks",
        "num_extra_tokens",
        "preempted",
        "requests",
        "starts",
        "unusual_rows",
    )

    def __init__(self, max_num_tokens: int) -> None:
        self.max_num_tokens = max_num_tokens
        self.requests: list[Request] = []
        self.starts: list[int] = []
        self.unusual_rows: dict[int, tuple[int, bool]] = {}
        self.num_extra_tokens = 0
        self.new_blocks: dict[Request, tuple[int, ...]] = {}
        self.preempted: list[Request] = []
        # Victims with tokens in flight: kept out of the plan until they have drained.
        self.held: set[Request] = set()
        # An elder went without blocks it wanted: nobody younger takes any in this step.
        self.is_closed = False
        self.is_admission_over = False

    @property
    def num_tokens_left(self) -> int:
        return self.max_num_tokens - len(self.requests) - self.num_extra_tokens

    def add_row(self, request: Request, num_tokens: int, is_sampled: bool) -> None:
        """Append a row that starts at ``request.num_dispatched``."""
        if num_tokens != 1 or not is_sampled:
            self.unusual_rows[len(self.requests)] = (num_tokens, is_sampled)
            self.num_extra_tokens += num_tokens - 1
        self.requests.append(request)
        self.starts.append(request.num_dispatched)

    def add_blocks(self, request: Request, block_ids: tuple[int, ...]) -> None:
        if block_ids:
            self.new_blocks[request] = self.new_blocks.get(request, ()) + block_ids

    def freeze(self, step: int) -> StepPlan:
        num_tokens = [1] * len(self.requests)
        sampled = [True] * len(self.requests)
        for row, (num_row_tokens, is_sampled) in self.unusual_rows.items():
            num_tokens[row], sampled[row] = num_row_tokens, is_sampled
        new_blocks = {}
        if self.new_blocks:
            new_blocks = {
                row: self.new_blocks[request]
                for row, request in enumerate(self.requests)
                if request in self.new_blocks
            }
        return StepPlan(
            step=step,
            requests=tuple(self.requests),
            starts=tuple(self.starts),
            num_tokens=tuple(num_tokens),
            sampled=tuple(sampled),
            preempted=tuple(self.preempted),
            new_blocks=new_blocks,
            is_decode_only=bool(self.requests) and not self.unusual_rows,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a runner returns for a plan: one token id for each sampled row, in row order."""

    token_ids: Sequence[int]
