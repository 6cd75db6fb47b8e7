"""Log-probabilities while a request runs: rows of its steps, in the runner's own form.

A row is the log-probability of one token, its rank, and those of the likeliest tokens. A runner
gives rows of the sampled tokens that were asked for, and of the prompt positions whose next token
lies in the prompt. Of the first, those are kept whose token the scheduler appends; of the second,
each position once: a request that was preempted computes them again, to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class LogprobRows(Protocol):
    """Rows of one step; never changed once they were handed over."""

    def row(self, index: int, num_top: int) -> tuple[float, int, Sequence[int], Sequence[float]]:
        """(log-probability, rank, ids of the ``num_top`` likeliest tokens, theirs)."""
        ...


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """The log-probabilities of a step.

    Attributes:
        sampled: a row for each sampled row whose parameters have ``logprobs``, in row order.
        prompt: one for each position whose next token lies in a prompt that asks
            (``RequestInfo.num_prompt_rows``), row after row.
    """

    sampled: LogprobRows
    prompt: LogprobRows


class RequestLogprobs:
    """What a request has so far.

    Attributes:
        sampled: of each settled output, (rows of its step, which of them).
        prompt: the same of the prompt tokens, from the second on.
    """

    __slots__ = ("prompt", "sampled")

    def __init__(self) -> None:
        self.sampled: list[tuple[LogprobRows, int]] = []
        self.prompt: list[tuple[LogprobRows, int]] = []

    def add_prompt(self, rows: LogprobRows, first: int, start: int, count: int) -> None:
        """The ``count`` rows from ``first`` on are those of the positions from ``start`` on."""
        if not count:
            return
        num_known = len(self.prompt) - start  # of these; more than none after a preemption
        if num_known < 0:
            raise RuntimeError(f"positions {len(self.prompt)} to {start} were never computed")
        self.prompt += [(rows, first + place) for place in range(num_known, count)]
