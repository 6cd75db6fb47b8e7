"""Log-probabilities while a request runs: rows of its steps, in the runner's own form.

A row is the log-probability of one token, its rank, and those of the likeliest tokens. A runner
returns rows of sampled tokens with ``logprobs``, and of prompt positions whose next token lies in
the prompt. Rows of sampled tokens are kept if the scheduler appends the token. Rows of the prompt
are kept once per position: a preempted request recomputes them, to the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class LogprobRows(Protocol):
    """Rows of one step; never changed once they were handed over."""

    def logprob(self, index: int) -> float: ...

    def row(self, index: int, num_top: int) -> tuple[float, int, Sequence[int], Sequence[float]]:
        """(log-probability, rank, ids of the ``num_top`` likeliest tokens, theirs)."""
        ...


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """The log-probabilities of a step.

    Attributes:
        sampled: a row for each sample of the rows whose parameters have ``logprobs``, row after
            row.
        prompt: one for each position whose next token lies in a prompt with ``prompt_logprobs``
            (``RequestInfo.num_prompt_rows``), row after row.
    """

    sampled: LogprobRows
    prompt: LogprobRows


class KeptRows:
    """Rows of several steps, in order.

    A list and an array, not a tuple for each row: Python's garbage collector would look through
    these again and again, which took longer than all else that log-probabilities cost the host.

    Attributes:
        rows, places: of each, the rows of its step and which of them it is.
    """

    __slots__ = ("places", "rows")

    def __init__(self) -> None:
        self.rows: list[LogprobRows] = []
        self.places = array("i")

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[tuple[LogprobRows, int]]:
        return zip(self.rows, self.places, strict=False)  # another thread may be adding one


class RequestLogprobs:
    """The log-probabilities of a request so far.

    Attributes:
        sampled: of each settled output.
        prompt: of the prompt tokens, from the second on.
        cumulative: the sum over ``sampled``, added up in their order.
    """

    __slots__ = ("cumulative", "prompt", "sampled")

    def __init__(self) -> None:
        self.sampled, self.prompt = KeptRows(), KeptRows()
        self.cumulative = 0.0

    def add_sampled(self, rows: LogprobRows, place: int) -> None:
        kept = self.sampled
        kept.rows.append(rows)
        kept.places.append(place)
        self.cumulative += rows.logprob(place)

    def trim_sampled(self, num_outputs: int) -> None:
        """Drop the rows behind the first ``num_outputs``. The sum is added up anew, in order, so
        that it has the bits of one that never had them."""
        kept = self.sampled
        if len(kept) <= num_outputs:
            return
        del kept.rows[num_outputs:], kept.places[num_outputs:]
        self.cumulative = 0.0
        for rows, place in kept:
            self.cumulative += rows.logprob(place)

    def add_prompt(self, rows: LogprobRows, first: int, start: int, count: int) -> None:
        """The ``count`` rows from ``first`` on are those of the positions from ``start`` on."""
        if not count:
            return
        num_known = len(self.prompt) - start  # of these; more than none after a preemption
        if num_known < 0:
            raise RuntimeError(f"positions {len(self.prompt)} to {start} were never computed")
        self.prompt.rows += [rows] * (count - num_known)
        self.prompt.places.extend(range(first + num_known, first + count))
