"""How far the constrained requests of a runner have come, and the masks of their next tokens.

Everything is learned from plans and results. A matcher takes in the output tokens that an admission
brings (after a preemption), then each token as it is collected; none is ever taken back, as a mask
is only asked for when every token before it is known.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.plan import StepPlan
from ..engine.request import RequestInfo
from ..errors import shortened
from .grammars import Grammars

IntArray = NDArray[np.int32]
_MAX_REASON = 300
# A mask takes some 30 us. To wake a thread for each of many cores took longer than all of 64.
_MAX_THREADS = 4


@dataclass(slots=True, eq=False)
class _Text:
    """A running request's text, as far as it is known.

    Attributes:
        num_known: its tokens that are known, from the first of the prompt.
        failure: why no mask can be made any more.
    """

    matcher: Any
    num_known: int = 0
    failure: str = ""

    def push(self, request: RequestInfo, start: int, token_ids: Sequence[int]) -> None:
        """Take in what is known at positions ``start ..``; ids below 0 are not."""
        for position, token_id in enumerate(token_ids, start):
            if position != self.num_known or token_id < 0:
                continue
            self.num_known += 1
            if position < request.num_prompt_tokens or self.failure:
                continue
            if not self.matcher.consume_token(token_id):
                self.failure = _failure(self.matcher, f"token {token_id} is not allowed")


@dataclass(slots=True)
class ConstrainedRows:
    """The sampled rows of a step whose tokens are constrained.

    Attributes:
        rows: of the plan. places: theirs among the sampled rows.
    """

    plan: StepPlan
    rows: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    texts: list[_Text] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)


class Matchers:
    """The matchers of the running requests of one runner.

    Plans and results go in as they come: :meth:`take` at each dispatch, :meth:`masks` when all
    steps before that one were settled, :meth:`settle` with the tokens.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._executor: Any = None
        self._bits = np.empty((0, 0), np.int32)
        self._requests: tuple[RequestInfo, ...] = ()
        self._any_constrained = False
        self.reset()

    def reset(self) -> None:
        """A step failed: no request is known any more."""
        self._texts: dict[str, _Text] = {}
        self._last: ConstrainedRows | None = None

    def take(self, plan: StepPlan) -> ConstrainedRows | None:
        """Take in a plan that is dispatched; its constrained rows that sample, or None.

        Raises:
            InvalidInputError: a constraint that the door let in does not compile; that is a bug.
        """
        if plan.requests is not self._requests:
            self._requests = plan.requests
            self._any_constrained = any(
                request.sampling_params.structured_outputs is not None for request in plan.requests
            )
        for request_id in plan.released if self._texts else ():
            self._texts.pop(request_id, None)
        if not self._any_constrained:
            return None
        last = self._last
        if last is not None and _is_repeated(last.plan, plan):
            self._last = ConstrainedRows(plan, last.rows, last.places, last.texts)
            return self._last
        found = ConstrainedRows(plan)
        begin = place = 0
        for row, (request, start, num_tokens, is_sampled) in enumerate(plan.rows()):
            outputs = request.sampling_params.structured_outputs
            if outputs is not None:
                if row in plan.tables:
                    text = _Text(self._grammars.matcher(outputs))
                    self._texts[request.request_id] = text
                    text.push(request, 0, plan.prefixes[row])
                text = self._texts[request.request_id]
                if start + num_tokens > text.num_known:
                    text.push(request, start, plan.token_ids[begin : begin + num_tokens])
                if is_sampled:
                    found.rows.append(row)
                    found.places.append(place)
                    found.texts.append(text)
            begin += num_tokens
            place += is_sampled
        self._last = found if found.rows else None
        return self._last

    def masks(self, constrained: ConstrainedRows) -> dict[int, IntArray]:
        """The bits of the ids that may be sampled, int32 ``[ceil(V / 32)]``, by row of the plan.
        A row whose matcher has failed has none: what it samples is for nobody. The next call
        writes over them."""
        live = [
            (row, text)
            for row, text in zip(constrained.rows, constrained.texts, strict=True)
            if not text.failure
        ]
        bits = self._space(len(live))
        self._fill([(text.matcher, i) for i, (_, text) in enumerate(live)], bits)
        masks = {}
        for (row, text), mask in zip(live, bits, strict=True):
            if text.matcher.is_error():
                text.failure = _failure(text.matcher, "no mask could be made")
            else:
                masks[row] = mask[: self._grammars.num_words]
        return masks

    def _space(self, num_rows: int) -> IntArray:
        width = self._grammars.num_ll_words if num_rows else 0
        if len(self._bits) < num_rows:
            self._bits = np.zeros((num_rows, width), np.int32)
        return self._bits[:num_rows]

    def _fill(self, matchers: list[tuple[Any, int]], bits: IntArray) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        if len(matchers) == 1:
            fill_next_token_bitmask(matchers[0][0], bits)
        elif matchers:
            if self._executor is None:
                self._executor = LLExecutor(num_threads=min(_MAX_THREADS, os.cpu_count() or 1))
            fill_next_token_bitmask_par(self._executor, matchers, bits)

    def settle(self, constrained: ConstrainedRows, token_ids: Sequence[int]) -> dict[str, str]:
        """Take in the tokens of a step, one for each sampled row of its plan.

        Returns:
            Why requests cannot go on, by their ids.
        """
        plan = constrained.plan
        failures = {}
        rows = zip(constrained.rows, constrained.places, constrained.texts, strict=True)
        for row, place, text in rows:
            request = plan.requests[row]
            text.push(request, plan.starts[row] + plan.num_tokens[row], [token_ids[place]])
            if text.failure:
                failures[request.request_id] = f"structured_outputs: {text.failure}"
        return failures


def _is_repeated(last: StepPlan, plan: StepPlan) -> bool:
    """Whether a plan has the rows of the one before again, which all feed one sampled token."""
    is_decode = last.is_decode_only and plan.is_decode_only and not plan.tables
    return is_decode and plan.requests is last.requests


def _failure(matcher: Any, otherwise: str) -> str:
    reason = " ".join(matcher.get_error().split()) or otherwise
    return shortened(reason, _MAX_REASON)
