"""The durations of steps, and the number of draft tokens per row that follows from them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

_LEAST_GAIN = 1.02  # host time of drafting


class StepCosts:
    """The duration of a step by its number of tokens.

    Args:
        measured: at least one pair (number of tokens, seconds), ascending. Between pairs the cost
            is interpolated. Above the last it grows like its last part, or in proportion if that
            is more.
        exposed_s: seconds that a step with draft tokens takes longer than one of as many tokens
            without: host time that no step in flight overlaps, and other kernels.
        drafting: pairs (number of rows, seconds) of one pass of a second model, which drafts one
            token per row; empty for a drafter without a model.
        computes_again: whether accepted draft tokens are computed twice, as in a model with
            recurrent layers.
    """

    def __init__(
        self,
        measured: Sequence[tuple[int, float]],
        *,
        exposed_s: float = 0.0,
        drafting: Sequence[tuple[int, float]] = (),
        computes_again: bool = False,
    ) -> None:
        self.measured, self.exposed_s = tuple(measured), exposed_s
        self._drafting = StepCosts(drafting) if drafting else None
        self.computes_again = computes_again
        self._tokens = [num_tokens for num_tokens, _ in measured]
        self._seconds: list[float] = []
        for _, seconds in measured:  # a longer step is never cheaper: such a measurement is noise
            self._seconds.append(max([seconds, *self._seconds[-1:]]))

    def draft_s(self, num_rows: int) -> float:
        """The cost of one draft token per row."""
        return 0.0 if self._drafting is None else self._drafting.of(num_rows)

    def of(self, num_tokens: float) -> float:
        """The cost of a step. ``num_tokens`` may be an expected number."""
        tokens, seconds = self._tokens, self._seconds
        if num_tokens <= tokens[0]:
            return seconds[0]
        if len(tokens) == 1:
            return seconds[0] * num_tokens / tokens[0]
        at = min(bisect_left(tokens, num_tokens), len(tokens) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (tokens[at] - tokens[at - 1])
        if num_tokens > tokens[-1]:
            slope = max(slope, seconds[-1] / tokens[-1])
            return seconds[-1] + slope * (num_tokens - tokens[-1])
        return seconds[at - 1] + slope * (num_tokens - tokens[at - 1])


NUM_RATES = 32
"""Rates of acceptance are rounded down to multiples of 1 / NUM_RATES: levels 0 to NUM_RATES."""
_RATES = [min((level + 0.5) / NUM_RATES, 1.0) for level in range(NUM_RATES + 1)]
# A draft token is worth computing if its chance of acceptance is at least a threshold.
_NUM_THRESHOLDS, _MAX_THRESHOLD, _MIN_THRESHOLD = 24, 0.97, 0.02


@cache
def _gains(most: int) -> list[list[float]]:
    """By level and number of draft tokens: how many of them are accepted on average."""
    return [list(accumulate((rate**k for k in range(1, most + 1)), initial=0.0)) for rate in _RATES]


@cache
def _candidates(most: int) -> list[tuple[int, ...]]:
    """Numbers of draft tokens by level, one entry per threshold."""
    found: dict[tuple[int, ...], None] = {}
    for i in range(_NUM_THRESHOLDS):
        ratio = (_MIN_THRESHOLD / _MAX_THRESHOLD) ** (i / (_NUM_THRESHOLDS - 1))
        least = _MAX_THRESHOLD * ratio
        for longest in range(1, most + 1) if i == _NUM_THRESHOLDS - 1 else (most,):
            numbers = tuple(sum(rate**k >= least for k in range(1, longest + 1)) for rate in _RATES)
            found[numbers] = None
    return list(found)


def choose_numbers(
    costs: StepCosts,
    shares: Sequence[float],
    num_rows: int,
    num_others: int,
    most: int,
    exposed_s: float = 0.0,
) -> tuple[int, ...]:
    """The number of draft tokens of a row by its level of rate, for the most tokens per second.
    Zeros if no numbers are faster than a step without draft tokens by 2%.

    Args:
        shares: by level, the sum over rows of the chance that the row has a proposal.
        num_others: other tokens of the step, such as those of prompts.
        most: the largest number.
        exposed_s: seconds that a step takes longer because it follows settled tokens.
    """
    present = [(level, share) for level, share in enumerate(shares) if share]
    draft_s = costs.draft_s(num_rows)
    num_tokens = num_rows + num_others
    best, best_speed = (0,) * (NUM_RATES + 1), _LEAST_GAIN * num_rows / costs.of(num_tokens)
    gains = _gains(most)
    previous = -1.0
    for numbers in _candidates(most):
        num_drafts = gain = 0.0
        longest = 0
        for level, share in present:
            number = numbers[level]
            if number:
                num_drafts += share * number
                gain += share * gains[level][number]
                if number > longest:
                    longest = number
        if num_drafts == previous or not longest:
            continue
        previous = num_drafts
        num_again = gain if costs.computes_again else 0
        step_s = costs.of(num_tokens + num_drafts + num_again)
        speed = (num_rows + gain) / (step_s + exposed_s + longest * draft_s)
        if speed > best_speed:
            best, best_speed = numbers, speed
    return best


DEFAULT_COSTS = StepCosts([(1, 1.0), (8, 1.0), (16, 1.4), (144, 7.8)])
"""Costs where none are measured: those of a small model on one CPU core."""
