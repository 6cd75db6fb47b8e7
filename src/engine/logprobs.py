"""Log-probabilities of running requests: rows of their steps, in the runner's own form.

A row is the log-probability of one token, its rank, and those of the most likely tokens. A runner
returns rows for sampled tokens with ``logprobs``, each followed by a row for each of the request's
``logprob_token_ids``, and rows for prompt positions whose next token is in the prompt. A row of a
sampled token is kept if the scheduler appends the token. Rows of the prompt are kept
once per position: a preempted request recomputes them with the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class LogprobRows(Protocol):
    """Rows of one step; immutable once returned."""

    def logprob(self, index: int) -> float: ...

    def row(self, index: int, num_top: int) -> tuple[float, int, Sequence[int], Sequence[float]]:
        """(log-probability, rank, ids of the ``num_top`` most likely tokens, their values)."""
        ...


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """The log-probabilities of a step.

    Attributes:
        sampled: for each sample of the plan's rows with ``logprobs``, in row order, its row, then
            those of the ``logprob_token_ids``.
        prompt: a row for each position whose next token is in a prompt with ``prompt_logprobs``
            (``RequestInfo.num_prompt_rows``), in row order.
    """

    sampled: LogprobRows
    prompt: LogprobRows


class KeptRows:
    """Rows of several steps, in order.

    Stored as a list and an array, not as a tuple per row: Python's garbage collector would scan
    such tuples repeatedly, at more than the total host cost of all other work on log-probabilities.

    Attributes:
        rows, places: for each row, the rows of its step, and its index among them.
    """

    __slots__ = ("places", "rows")

    def __init__(self) -> None:
        self.rows: list[LogprobRows] = []
        self.places = array("i")

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[tuple[LogprobRows, int]]:
        return zip(self.rows, self.places, strict=False)  # another thread may be appending


class RequestLogprobs:
    """The settled log-probabilities of a request.

    Attributes:
        sampled: one row per settled output; those of ``logprob_token_ids`` are behind it, among the
            rows of its step.
        prompt: one row per prompt token, from the second on.
        cumulative: the sum over ``sampled``, added in order.
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
        """Drop the rows after the first ``num_outputs``. The sum is computed again in order, so
        that it has the bits of a sum that never contained them."""
        kept = self.sampled
        if len(kept) <= num_outputs:
            return
        del kept.rows[num_outputs:], kept.places[num_outputs:]
        self.cumulative = 0.0
        for rows, place in kept:
            self.cumulative += rows.logprob(place)

    def add_prompt(self, rows: LogprobRows, first: int, start: int, count: int) -> None:
        """Append ``count`` rows, from ``first`` on; they belong to positions from ``start`` on."""
        if not count:
            return
        num_known = len(self.prompt) - start  # rows known already; above 0 after a preemption
        if num_known < 0:
            raise RuntimeError(f"positions {len(self.prompt)} to {start} were never computed")
        self.prompt.rows += [rows] * (count - num_known)
        self.prompt.places.extend(range(first + num_known, first + count))
