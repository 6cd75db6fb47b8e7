"""The amount of cases in a run of the gate, and the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .stepped_engine import Answer, Case, CaseRequest

CUT_PROMPT = 64
"""Tokens of the prompt that is split, found in the cache and recomputed."""


@dataclass(frozen=True, kw_only=True)
class GateSize:
    """The amount of cases.

    Attributes:
        max_batch: batches have 1 to this many requests; one batch has one more.
        batch_step: increment between batch sizes.
        neighbour_lengths: prompt lengths of a neighbour, in tokens.
        cuts: positions at which a prompt of 64 tokens is split in two.
        budgets: sizes of the chunks that it is split into.
        num_tokens: length of each answer, in tokens.
        both_overlaps: run the cases with and without overlapping steps, not only with them.
    """

    max_batch: int = 64
    batch_step: int = 1
    neighbour_lengths: tuple[int, ...] = tuple(range(1, 301))
    cuts: tuple[int, ...] = tuple(range(1, CUT_PROMPT))
    budgets: tuple[int, ...] = tuple(range(1, CUT_PROMPT + 1))
    num_tokens: int = 8
    both_overlaps: bool = True

    @classmethod
    def quick(cls) -> GateSize:
        """Takes two minutes for a model with 135M parameters on one core."""
        return cls(
            max_batch=8,
            neighbour_lengths=(1, 2, 3, 16, 17, 64, 65, 300),
            cuts=(1, 3, 16, 17, 31, 48, 62, 63),
            budgets=(1, 7, 16, 33),
            num_tokens=4,
            both_overlaps=False,
        )

    @property
    def batch_sizes(self) -> list[int]:
        sizes = set(range(1, self.max_batch + 1, self.batch_step))
        return sorted(sizes | {self.max_batch, self.max_batch + 1})


@dataclass
class CaseGroup:
    """A group of cases. A case is one answer compared with its reference."""

    name: str
    num_equal: int = 0
    num_different: int = 0
    first_difference: str = ""

    @property
    def num_cases(self) -> int:
        return self.num_equal + self.num_different

    def compare(self, cases: Iterable[Case], references: Mapping[CaseRequest, Answer]) -> None:
        """Compare each answer with its subject's reference, and count the cases."""
        for case, subject, answer in cases:
            found = references[subject].first_difference(answer)
            self.num_equal += not found
            self.num_different += bool(found)
            if found and not self.first_difference:
                self.first_difference = f"{case}, {subject.name}: {found}"


@dataclass
class GateReport:
    """The results of the gate.

    Attributes:
        groups: the groups that must show no difference.
        controls: some of the cases without transparency. The last control is the first one that
            found a difference, if any did.
        num_preemptions: number of times that a request was preempted for its blocks.
        num_hit_blocks: number of blocks found in the prefix cache.
        num_accepted_drafts, num_rejected_drafts: numbers of draft tokens.
        idle: groups about cache hits, preemptions or draft tokens in which none occurred, so that
            their equal answers prove nothing.
    """

    groups: list[CaseGroup] = field(default_factory=list)
    controls: list[CaseGroup] = field(default_factory=list)
    num_preemptions: int = 0
    num_hit_blocks: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    idle: list[str] = field(default_factory=list)

    @property
    def is_transparent(self) -> bool:
        """Whether every answer was equal and no group was idle."""
        return self.num_different == 0 and not self.idle

    @property
    def num_cases(self) -> int:
        return sum(group.num_cases for group in self.groups)

    @property
    def num_different(self) -> int:
        return sum(group.num_different for group in self.groups)

    @property
    def has_power(self) -> bool:
        """Whether a control found a difference."""
        return any(control.num_different for control in self.controls)
