"""The engine argument ``speculative_config``, refusals of what draft tokens do not support yet, and
the costs of steps, from which the number of draft tokens per row follows."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

from ..errors import InvalidInputError, nearest
from ..params.checks import count
from .runner import MAX_DRAFT_TOKENS

METHODS = ("ngram", "suffix", "prediction")
MODEL_METHODS = ("draft_model", "mtp", "eagle3")
"""Methods whose drafter is a model."""
_NUM_TOKENS = 8
_NUM_TOKENS_OF = {"draft_model": 5, "mtp": 3, "eagle3": 5}
_LOOKUP_MAX, _LOOKUP_MIN = 4, 2
_MAX_LOOKUP = 64
# Other methods of vLLM.
_OTHERS = ("eagle", "medusa", "mlp_speculator", "ngram_gpu")
_NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_KEYS = ("method", *_NUMBERS, "model", "draft_tensor_parallel_size")
_LEAST_GAIN = 1.02  # host time of drafting


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The checked argument.

    Attributes:
        method: one of :data:`METHODS` or :data:`MODEL_METHODS`.
        num_speculative_tokens: maximum number of draft tokens per row.
        prompt_lookup_max, prompt_lookup_min: lengths of the n-grams that "ngram" looks up.
        model: folder or hub id of the drafter of "draft_model" and "eagle3".
    """

    method: str
    num_speculative_tokens: int = _NUM_TOKENS
    prompt_lookup_max: int = _LOOKUP_MAX
    prompt_lookup_min: int = _LOOKUP_MIN
    model: str | None = None

    @property
    def has_model(self) -> bool:
        """Whether the drafter is a model."""
        return self.method in MODEL_METHODS

    @property
    def reads_target(self) -> bool:
        """Whether the drafter reads hidden states of the target, and uses parts of its module."""
        return self.method in ("mtp", "eagle3")

    def serves(self, prediction: Sequence[int]) -> bool:
        """Whether a request with this prediction may have draft tokens."""
        return self.method != "prediction" or len(prediction) > 0


def speculative(name: str, value: Any) -> SpeculativeConfig | None:
    """Check the argument: a dict with vLLM's names, or its JSON text. An empty dict is None.

    Raises:
        InvalidInputError: names the key, the value and the limit.
    """
    if isinstance(value, SpeculativeConfig):
        return value
    given = value
    if isinstance(value, str):
        try:
            given = json.loads(value)
        except ValueError as error:
            raise InvalidInputError(name, value, f"is not JSON: {error}") from None
    if not isinstance(given, Mapping):
        limit = 'must be a dict or JSON text, such as {"method": "ngram"}'
        raise InvalidInputError(name, value, limit)
    if not given:
        return None
    for key in given:
        if key not in _KEYS:
            near = nearest(str(key), _KEYS) or f": its keys are {', '.join(_KEYS)}"
            raise InvalidInputError(f"{name}.{key}", given[key], f"there is no such key{near}")
    method = given.get("method")
    methods = (*METHODS, *MODEL_METHODS)
    if method not in methods:
        limit = f"must be one of {', '.join(methods)}"
        if method in _OTHERS:
            limit += f"; {method} is not supported yet"
        raise InvalidInputError(f"{name}.method", method, limit)
    model = _drafter_model(name, method, given)
    if method != "ngram":
        for key in ("prompt_lookup_max", "prompt_lookup_min"):
            if given.get(key) is not None:
                limit = f"must be absent: method {method} has no such limit"
                raise InvalidInputError(f"{name}.{key}", given[key], limit)
    high = {"num_speculative_tokens": MAX_DRAFT_TOKENS}
    numbers = {
        key: count(1, high.get(key, _MAX_LOOKUP))(f"{name}.{key}", given[key])
        for key in _NUMBERS
        if given.get(key) is not None
    }
    least, most = numbers.get("prompt_lookup_min"), numbers.get("prompt_lookup_max")
    if least is not None and most is not None and most < least:
        limit = f"must be at least prompt_lookup_min = {least}"
        raise InvalidInputError(f"{name}.prompt_lookup_max", most, limit)
    numbers.setdefault("num_speculative_tokens", _NUM_TOKENS_OF.get(method, _NUM_TOKENS))
    numbers["prompt_lookup_max"] = most or max(_LOOKUP_MAX, least or 0)
    numbers["prompt_lookup_min"] = least or min(_LOOKUP_MIN, most or _LOOKUP_MIN)
    return SpeculativeConfig(method=method, model=model, **numbers)


def _drafter_model(name: str, method: str, given: Mapping[str, Any]) -> str | None:
    """The drafter's folder or hub id, which "draft_model" and "eagle3" need and other methods do
    not take."""
    model, num_ranks = given.get("model"), given.get("draft_tensor_parallel_size")
    if method in ("draft_model", "eagle3"):
        if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
            limit = f"must be the folder or hub id of the drafter: method {method} needs one"
            raise InvalidInputError(f"{name}.model", model, limit)
        model = os.fspath(model)
    elif model is not None:
        where = "the target model has the drafter" if method == "mtp" else "no model drafts"
        limit = f"must be absent: with method {method}, {where}"
        raise InvalidInputError(f"{name}.model", model, limit)
    if num_ranks is not None and (method not in MODEL_METHODS or num_ranks != 1):
        limit = "must be 1 or absent: a drafter runs on one rank"
        raise InvalidInputError(f"{name}.draft_tensor_parallel_size", num_ranks, limit)
    return model


# What draft tokens do not support yet -------------------------------------------------------------


def refuse_ranks(config: SpeculativeConfig | None, num_ranks: int) -> None:
    """Raises InvalidInputError if a model should draft for a target over several ranks."""
    if config is not None and config.has_model and num_ranks > 1:
        limit = f"must be 1 with method {config.method}: a model drafts on one rank only"
        raise InvalidInputError("tensor_parallel_size", num_ranks, limit)


# Costs of steps -----------------------------------------------------------------------------------


class StepCosts:
    """The duration of a step by its number of tokens.

    Args:
        measured: at least two pairs (number of tokens, seconds), ascending. Between them the cost
            is interpolated. Above the last it grows like its last part, or in proportion if that
            is more.
        exposed_s: seconds that a step with draft tokens takes longer than one of as many tokens
            without: host time that no step in flight overlaps, and other kernels.
        drafting: pairs (number of rows, seconds) of one pass of a second model, which drafts one
            token per row; at least two, or empty for a drafter without a model.
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
        at = min(max(1, bisect_left(tokens, num_tokens)), len(tokens) - 1)
        if num_tokens <= tokens[0]:
            return seconds[0]
        slope = (seconds[at] - seconds[at - 1]) / (tokens[at] - tokens[at - 1])
        if num_tokens > tokens[-1]:
            slope = max(slope, seconds[-1] / tokens[-1])
            return seconds[-1] + slope * (num_tokens - tokens[-1])
        return seconds[at - 1] + slope * (num_tokens - tokens[at - 1])

    def best(self, num_rows: int, num_others: int, rate: float, most: int) -> int:
        """The number of draft tokens per row with the most tokens per second.

        It assumes that each of ``num_rows`` rows has that many, and that a draft token is right
        with probability ``rate`` if those before it are.

        Args:
            num_others: other tokens of the step, such as those of prompts.
            most: the largest number.
        """
        best, best_speed = 0, _LEAST_GAIN * num_rows / self.of(num_rows + num_others)
        draft_s = self.draft_s(num_rows)
        num_expected = chance = 1.0
        for k in range(1, most + 1):
            chance *= rate
            num_expected += chance
            num_own = num_expected if self.computes_again else 1
            num_tokens = num_rows * (num_own + k) + num_others
            cost = self.of(num_tokens) + k * draft_s
            speed = num_rows * num_expected / cost
            if speed > best_speed:
                best, best_speed = k, speed
        return best


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
