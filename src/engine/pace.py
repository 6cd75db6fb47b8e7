"""Token budgets of steps, which bound the time between tokens of running answers.

A step that computes a long prompt together with running answers takes as long as the prompt's
tokens do, and delays each answer. The extra time of the prompt's tokens is modelled as
``per_token * tokens + per_read * reads``, where each token reads all positions before it. Both
costs are fitted to the measured steps, with more weight on recent ones. A step with answers and a
prompt gets the number of tokens that fits in the target; any other step gets the full budget.

The budget of a step is an input of the scheduler, not part of its state: any value from the number
of running requests up to ``max_num_batched_tokens`` keeps the properties (S18, L4, L6).
"""

from __future__ import annotations

import math

from .plan import StepPlan
from .queues import Queues
from .request import Request

MIN_PROMPT_TOKENS = 16
"""Prompt tokens that a step computes even if they take longer than the target."""

_FORGETTING = 0.7  # weight of earlier measurements, per step with a prompt
_SMOOTHING = 0.2  # weight of the latest step with answers only
_GROWTH, _FIRST_TOKENS = 8, 256
_RIDGE = 1.05  # steps at one position cannot separate the costs: then per_token gets all of it


class StepPace:
    """Measures steps and chooses the budget of the next one.

    Args:
        target_s: target for the duration of a step with both answers and a prompt, in seconds.
    """

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self._largest = 0  # prompt tokens of the largest step that was measured
        self._answers_s = 0.0  # duration of a step with answers only
        # Normal equations of the weighted least squares, and their solution.
        self._squares = [0.0, 0.0]
        self._product = 0.0
        self._right = [0.0, 0.0]
        self._costs = 0.0, 0.0

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step."""
        if plan.is_decode_only:
            if not self._answers_s:
                self._answers_s = seconds
            self._answers_s += _SMOOTHING * (seconds - self._answers_s)
            return
        num_tokens = reads = 0.0
        for start, n in zip(plan.starts, plan.num_tokens, strict=True):
            if n > 1:
                num_tokens += n
                reads += n * (start + n / 2)
        if num_tokens:
            self._largest = max(self._largest, int(num_tokens))
            self._fit(num_tokens, reads, max(seconds - self._answers_s, 0.1 * seconds, 1e-6))

    def _fit(self, num_tokens: float, reads: float, seconds: float) -> None:
        """Least squares of the seconds per token, with non-negative costs. Every step has the same
        weight, whatever its length."""
        weight = 1.0 / num_tokens**2
        squares, right = self._squares, self._right
        for i, feature in enumerate((num_tokens, reads)):
            squares[i] = squares[i] * _FORGETTING + weight * feature * feature
            right[i] = right[i] * _FORGETTING + weight * feature * seconds
        self._product = self._product * _FORGETTING + weight * num_tokens * reads
        product, reads_square = self._product, _RIDGE * squares[1]
        determinant = squares[0] * reads_square - product * product
        per_token = (right[0] * reads_square - product * right[1]) / determinant
        per_read = (right[1] * squares[0] - product * right[0]) / determinant
        if per_read < 0:
            per_token, per_read = right[0] / squares[0], 0.0
        elif per_token < 0:
            per_token, per_read = 0.0, right[1] / squares[1]
        self._costs = per_token, per_read

    def budget(self, queues: Queues, max_num_tokens: int) -> int | None:
        """Token budget of the next step, at most ``max_num_tokens``; None: no limit."""
        running = queues.running
        prompt: Request | None = None
        has_answers = False
        for request in running:
            if request.num_total - request.num_dispatched <= 1:
                has_answers = True
            elif prompt is None:
                prompt = request
        if not has_answers or not (prompt or queues.waiting):
            return None
        start = prompt.num_dispatched if prompt is not None else 0
        num_tokens = self._num_prompt_tokens(start)
        return min(max_num_tokens, len(running) + num_tokens)

    def _num_prompt_tokens(self, start: int) -> int:
        """Tokens of a prompt from position ``start`` on that fit in the target, next to answers."""
        most = max(_FIRST_TOKENS, _GROWTH * self._largest)  # the model does not extrapolate further
        left_s = self.target_s - self._answers_s
        if left_s <= 0:
            return MIN_PROMPT_TOKENS
        # per_token * n + per_read * n * (start + n / 2) = left_s
        per_token, per_read = self._costs
        linear = per_token + per_read * start
        root = math.sqrt(linear * linear + 2 * per_read * left_s)
        if linear + root <= 0:
            return most
        return max(MIN_PROMPT_TOKENS, min(most, int(2 * left_s / (linear + root))))
