"""How far the constrained requests of a runner have come, and the masks of their next tokens.

Everything is learned from plans and results. A matcher takes in the output tokens that an admission
brings (after a preemption), then each token as it is collected; none is ever taken back. A mask
needs all tokens before it, which are settled when its row is planned, as constrained requests are
settled-only (S42). So a thread begins with it as soon as they are collected, and only who samples
the row waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engine.batches import LastTwoBatches
from ..engine.plan import StepPlan
from ..engine.request import RequestInfo
from ..engine.structured_outputs import StructuredOutputs
from .grammars import Grammars
from .reasons import readable

IntArray = NDArray[np.int32]
# A mask takes some 30 us. To wake a thread for each of many cores took longer than all of 64.
_MAX_THREADS = 8
_FEW_MASKS = 64


@dataclass(slots=True, eq=False)
class _Text:
    """A running request's text, as far as it is known.

    Attributes:
        mask: where its mask is among all of them.
        num_known: its tokens that are known, from the first of the prompt.
        unread: outputs that the matcher was not yet given.
        made: done when the matcher has all tokens that were known, and the mask is made.
        failure: why no mask can be made any more.
    """

    matcher: Any
    mask: int
    num_known: int = 0
    unread: list[int] = field(default_factory=list)
    made: Future[None] | None = None
    failure: str = ""

    def push(self, request: RequestInfo, start: int, token_ids: Sequence[int]) -> None:
        """Learn the tokens at positions ``start ..``, of which some may be known."""
        new = token_ids[self.num_known - start :]
        num_prompt = max(0, request.num_prompt_tokens - self.num_known)
        self.num_known += len(new)
        if len(new) > num_prompt:
            self.unread += new[num_prompt:]
            self.made = None


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


class Masks(NamedTuple):
    """The ids that constrained rows of a step may sample.

    Attributes:
        bits: int32 ``[masks, words]``: a bit for each id. Those of a row stay until its token is
            settled.
        numbers: of the masks, by row of the plan. A row whose matcher has failed has none: what it
            samples is for nobody.
        places: of these rows among the sampled ones.
    """

    bits: IntArray
    numbers: dict[int, int]
    places: list[int]


def make_array(num_masks: int, num_words: int) -> IntArray:
    """Memory for masks."""
    return np.zeros((num_masks, num_words), np.int32)


class Matchers:
    """The matchers of the running requests of one runner.

    Plans and results go in as they come: :meth:`take` at each dispatch, :meth:`masks` when the row
    is to be sampled, :meth:`settle` with the tokens. At most two steps are in flight.

    Args:
        make_space: memory for so many masks of so many words, zeros.
    """

    def __init__(
        self, grammars: Grammars, make_space: Callable[[int, int], IntArray] = make_array
    ) -> None:
        self._grammars = grammars
        self._make_space = make_space
        self._bits = np.empty((0, 0), np.int32)
        self._worker: ThreadPoolExecutor | None = None
        self._executor: Any = None
        self._last_job: Future[None] | None = None
        self._constrains = LastTwoBatches[bool]()
        self._repeatable = LastTwoBatches[ConstrainedRows]()
        self.reset()

    def reset(self) -> None:
        """A step failed: no request is known any more."""
        if self._last_job is not None:
            wait([self._last_job])  # of its error nobody asks any more
        self._last_job = None
        self._texts: dict[str, _Text] = {}
        self._free = list(range(len(self._bits) - 1, -1, -1))
        self._leaving: list[int] = []
        self._repeatable.clear()

    def take(self, plan: StepPlan) -> ConstrainedRows | None:
        """Take in a plan that is dispatched; its constrained rows that sample, or None."""
        if self._texts or self._leaving:
            self._release(plan)
        constrains = self._constrains.get(plan.requests)
        if constrains is None:
            asked = (r.sampling_params.structured_outputs is not None for r in plan.requests)
            constrains = self._constrains.put(plan.requests, any(asked))
        if not constrains:
            return None
        is_repeatable = plan.is_decode_only and not plan.tables
        last = self._repeatable.get(plan.requests) if is_repeatable else None
        if last is not None:
            found = ConstrainedRows(plan, last.rows, last.places, last.texts)
        else:
            found = self._find(plan)
            if is_repeatable:
                self._repeatable.put(plan.requests, found)
        self._start([text for text in found.texts if text.made is None and not text.failure])
        return found if found.rows else None

    def _release(self, plan: StepPlan) -> None:
        # The masks of requests that have left may belong to rows of the step before this one.
        self._free += self._leaving
        self._leaving = []
        for request_id in plan.released:
            text = self._texts.pop(request_id, None)
            if text is not None:
                self._leaving.append(text.mask)
        if plan.released:
            self._repeatable.clear()

    def _find(self, plan: StepPlan) -> ConstrainedRows:
        found = ConstrainedRows(plan)
        begin = place = 0
        for row, (request, start, num_tokens, is_sampled) in enumerate(plan.rows()):
            outputs = request.sampling_params.structured_outputs
            if outputs is not None:
                if row in plan.tables:
                    text = self._new_text(outputs)
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
        return found

    def _new_text(self, outputs: StructuredOutputs) -> _Text:
        try:
            return _Text(self._grammars.matcher(outputs), self._take_mask())
        except Exception as error:  # the door let it in: a bug, which ends this request alone
            return _Text(None, self._take_mask(), failure=_shown(error))

    def _take_mask(self) -> int:
        if not self._free:
            if self._last_job is not None:
                self._last_job.result()  # it writes to the memory there is
            old = self._bits
            num_masks = max(_FEW_MASKS, 2 * len(old))
            self._bits = self._make_space(num_masks, self._grammars.num_ll_words)
            if len(old):
                self._bits[: len(old)] = old
            self._free = list(range(num_masks - 1, len(old) - 1, -1))
        return self._free.pop()

    def masks(self, constrained: ConstrainedRows) -> Masks:
        """The masks of a step's rows; waits until they are made."""
        for job in {text.made for text in constrained.texts if text.made is not None}:
            job.result()
        numbers, places = {}, []
        rows = zip(constrained.rows, constrained.places, constrained.texts, strict=True)
        for row, place, text in rows:
            if not text.failure:
                numbers[row] = text.mask
                places.append(place)
        return Masks(self._bits[:, : self._grammars.num_words], numbers, places)

    def settle(self, constrained: ConstrainedRows, token_ids: Sequence[int]) -> dict[str, str]:
        """Take in the tokens of a step, one for each sampled row of its plan, and begin with the
        masks of what follows them.

        Returns:
            Why requests cannot go on, by their ids.
        """
        plan = constrained.plan
        sampled = [token_ids[place] for place in constrained.places]
        masks = [text.mask for text in constrained.texts]
        ids = np.array(sampled, np.int64)
        is_allowed = (self._bits[masks, ids >> 5] >> (ids & 31) & 1).tolist()
        failures, going_on = {}, []
        for i, (row, text) in enumerate(zip(constrained.rows, constrained.texts, strict=True)):
            request = plan.requests[row]
            if not (text.failure or is_allowed[i]):
                text.failure = (
                    f"token {sampled[i]} is not allowed, and other parameters ban all that are"
                )
            if text.failure:
                failures[request.request_id] = f"structured_outputs: {text.failure}"
            elif self._texts.get(request.request_id) is text:
                text.push(request, plan.starts[row] + plan.num_tokens[row], [sampled[i]])
                going_on.append(text)
        self._start(going_on)
        return failures

    # On the thread ----------------------------------------------------------------------------

    def _start(self, texts: list[_Text]) -> None:
        """Have the masks of these texts made, each after all that was asked for before."""
        if not texts:
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="pagespec-masks")
        work = [(text, text.unread) for text in texts]
        self._last_job = self._worker.submit(self._make, work, self._bits)
        for text in texts:
            text.unread, text.made = [], self._last_job

    def _make(self, work: list[tuple[_Text, list[int]]], bits: IntArray) -> None:
        """Give the matchers their tokens, and write the masks. llguidance does both without the
        lock of the interpreter, in one call each for all of them.

        What it raises, which is no Exception if its Rust code panics, ends the requests concerned:
        of tokens all that were in the call, as it cannot be told which matchers took theirs."""
        from llguidance import LLExecutor
        from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor(num_threads=min(_MAX_THREADS, os.cpu_count() or 1))
        one = [(text.matcher, ids[0]) for text, ids in work if len(ids) == 1]
        failure = _failure_of(consume_token_par, self._executor, one) if one else ""
        for text, ids in work:
            if len(ids) > 1:
                text.failure = _failure_of(text.matcher.consume_tokens, ids)
            elif ids:
                text.failure = failure
        live = [text for text, _ in work if not _has_failed(text)]
        masks = [(text.matcher, text.mask) for text in live]
        if not masks:  # llguidance raises
            return
        if _failure_of(fill_next_token_bitmask_par, self._executor, masks, bits):
            for text, mask in zip(live, masks, strict=True):
                text.failure = _failure_of(
                    fill_next_token_bitmask_par, self._executor, [mask], bits
                )
        for text in live:
            _has_failed(text)


def _has_failed(text: _Text) -> bool:
    if not text.failure and text.matcher.is_error():
        text.failure = _shown(text.matcher.get_error())
    return bool(text.failure)


def _failure_of(call: Callable[..., object], *arguments: object) -> str:
    """What a call raised; "" for nothing. Not on a thread that gets signals."""
    try:
        call(*arguments)
    except BaseException as error:
        return _shown(error)
    return ""


def _shown(reason: object) -> str:
    return readable(str(reason)) or "no mask could be made"
