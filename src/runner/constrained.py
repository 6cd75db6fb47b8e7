"""The constrained rows of a runner's steps. They are sampled once their bitmasks are computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ..engine.logprobs import StepLogprobs
from ..engine.plan import StepResult
from ..structured.matchers import ConstrainedRows, Masks, Matchers


class Handle(Protocol):
    """The handle of a dispatched step.

    Attributes:
        token_ids: int64, tokens of its samples, once these are computed.
        constrained: rows that are sampled once their bitmasks are computed.
        failures, failed_samples: see :class:`.StepResult`.
    """

    token_ids: Tensor
    constrained: ConstrainedRows | None
    failures: dict[str, str]
    failed_samples: dict[str, int]


class LateMatchers(Matchers):
    """Matchers, and the newest step if its constrained rows are not yet sampled.

    A thread computes the bitmasks of these rows from the time when their last tokens are collected.
    :meth:`finish` is called at the beginning of the next ``dispatch``, while a GPU computes the
    step, or by ``collect`` of the step. An earlier call would wait.

    Attributes:
        mask_s: seconds that the host has waited for bitmasks so far.
    """

    mask_s = 0.0

    def reset(self) -> None:
        super().reset()
        self._step: Any = None

    def begin(self, step: Any, sample: Callable[[Any, Masks | None], None]) -> None:
        """Sample the rest of a step, which has a ``handle``. If bitmasks of its rows must be
        computed first, only keep the step."""
        if step.handle.constrained is None:
            sample(step, None)
        else:
            self._step = step

    def is_waiting(self, handle: object = None) -> bool:
        """Whether the newest step waits for :meth:`finish`; of ``handle``, if given."""
        return self._step is not None and handle in (None, self._step.handle)

    def finish(self, sample: Callable[[Any, Masks | None], None]) -> None:
        """Sample the rest of the waiting step."""
        step = self._step
        begin = time.perf_counter()
        masks = self.masks(step.handle.constrained)
        self.mask_s += time.perf_counter() - begin
        sample(step, masks)
        self._step = None

    def result(self, handle: Handle, logprobs: StepLogprobs | None) -> StepResult:
        """The result of a computed step. The matchers of its constrained rows continue."""
        tokens = handle.token_ids.tolist()
        failures, failed_samples = handle.failures, handle.failed_samples
        if handle.constrained is not None:
            more, more_samples = self.settle(handle.constrained, tokens)
            for request_id, failure in more.items():
                index = more_samples.get(request_id, 0)
                if request_id not in failures or index <= failed_samples.get(request_id, 0):
                    failures = failures | {request_id: failure}
                    failed_samples = failed_samples | {request_id: index}
        return StepResult(tokens, logprobs, failures, failed_samples)
