"""The matchers of a runner's constrained requests, and the bitmasks for their next tokens.

Plans and results are the only inputs. A matcher consumes the output tokens known at an admission
(after a preemption), then each collected token; it never rolls back. A bitmask needs all tokens
before it. These are settled when its row is planned, because constrained requests are settled-only
(S42). So a thread computes the bitmask as soon as the tokens are collected, and only the sampling
of the row waits for it.

A constraint applies to the content of an answer. If reasoning may precede it, a row has a separate
mask before and inside the reasoning (:mod:`.reasoning`), and the matcher gets the tokens after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engine.plan import LastTwoBatches, StepPlan
from ..engine.request import RequestInfo
from ..engine.text.reasoning import Phase, ReasoningTracker
from .grammars import Grammars
from .reasoning import Ids, ReasoningTokens
from .reasons import readable

IntArray = NDArray[np.int32]
# A mask takes some 30 us. Waking a thread on each of many cores took longer than 64 masks.
_MAX_THREADS = 8
_FEW_MASKS = 64


_MADE: Future[None] = Future()
_MADE.set_result(None)


@dataclass(slots=True, eq=False)
class _Beginning:
    """A text whose content has not begun.

    Attributes:
        fresh: a matcher at the beginning of the content.
        is_free: whether the row's mask allows all tokens except ``banned``.
        is_beyond: whether the text so far can only open the reasoning, and cannot be content.
    """

    tracker: ReasoningTracker
    tokens: ReasoningTokens
    fresh: Any
    is_free: bool = False
    banned: int = 0
    is_beyond: bool = False

    @property
    def is_undecided(self) -> bool:
        return self.tracker.phase is Phase.UNDECIDED


@dataclass(slots=True, eq=False)
class _Text:
    """The known text of a running request.

    Attributes:
        mask: index of its mask.
        num_known: number of its known tokens, including the prompt.
        unread: outputs that the matcher has not consumed yet.
        made: done when the matcher has consumed all known tokens and the mask is written.
        failure: why no further mask can be computed.
        beginning: state before the content begins; None from the content's first token on.
        ends: additional tokens that are allowed wherever the model's end tokens are. The matcher
            consumes ``end`` in place of each.
    """

    matcher: Any
    mask: int
    num_known: int = 0
    unread: list[int] = field(default_factory=list)
    made: Future[None] | None = None
    failure: str = ""
    beginning: _Beginning | None = None
    ends: frozenset[int] = frozenset()
    end: int = 0

    @property
    def opening(self) -> Ids | None:
        """Tokens that open the reasoning now; None once the content has begun."""
        beginning = self.beginning
        return None if beginning is None else beginning.tokens.opening(beginning.tracker.head)

    def push(self, request: RequestInfo, start: int, token_ids: Sequence[int]) -> None:
        """Add the tokens at positions ``start ..``, some of which may be known already."""
        new = token_ids[self.num_known - start :]
        num_prompt = max(0, request.num_prompt_tokens - self.num_known)
        self.num_known += len(new)
        outputs = new[num_prompt:]
        if not outputs:
            return
        if self.ends:
            outputs = [self.end if i in self.ends else i for i in outputs]
        self.made = None
        num_before = 0
        while self.beginning is not None and num_before < len(outputs):
            self._push_before_content(self.beginning, outputs[num_before])
            num_before += 1
        self.unread += outputs[num_before:]

    def _push_before_content(self, beginning: _Beginning, token_id: int) -> None:
        # If the answer turns out to begin with content, the matcher needs its first token too.
        self.unread.append(token_id)
        tracker = beginning.tracker
        phase = tracker.push(token_id)
        if phase is Phase.REASONING or tracker.num_skipped:
            self.unread.clear()
            self.matcher = beginning.fresh
        if phase is Phase.CONTENT:
            self.beginning = None


@dataclass(slots=True)
class ConstrainedRows:
    """The sampled rows of a step whose tokens are constrained.

    Attributes:
        rows: row indices in the plan. places: their indices among the sampled rows.
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
        bits: int32 ``[masks, words]``, one bit per id. A row's mask is unchanged until its token is
            settled.
        numbers: mask index by row of the plan. A row whose matcher has failed has none: its
            sampled token is discarded.
        places: indices of these rows among the sampled ones.
    """

    bits: IntArray
    numbers: dict[int, int]
    places: list[int]


def make_array(num_masks: int, num_words: int) -> IntArray:
    """Allocate zeroed masks."""
    return np.zeros((num_masks, num_words), np.int32)


class Matchers:
    """The matchers of the running requests of one runner.

    Plans and results are passed in order: :meth:`take` at each dispatch, :meth:`masks` when a row
    is to be sampled, :meth:`settle` with the tokens. At most two steps are in flight.

    Args:
        make_space: allocates zeroed memory for a number of masks of a number of words.
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
        """Discard all requests, after a failed step."""
        if self._last_job is not None:
            wait([self._last_job])  # its error no longer matters
        self._last_job = None
        self._texts: dict[str, _Text] = {}
        self._free = list(range(len(self._bits) - 1, -1, -1))
        self._leaving: list[int] = []
        self._repeatable.clear()

    def take(self, plan: StepPlan) -> ConstrainedRows | None:
        """Process a plan that is dispatched. Returns its constrained rows that sample, or None."""
        if self._texts or self._leaving:
            self._release(plan)
        constrains = self._constrains.get(plan.requests)
        if constrains is None:
            constrained = (r.sampling_params.structured_outputs is not None for r in plan.requests)
            constrains = self._constrains.put(plan.requests, any(constrained))
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
        # Masks of requests that have left may still belong to rows of the previous step.
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
                    text = self._texts[request.request_id] = self._new_text(request)
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

    def _new_text(self, request: RequestInfo) -> _Text:
        try:
            return self._begun_text(request)
        except Exception as error:  # admission accepted it: a bug, which ends only this request
            return _Text(None, self._take_mask(), failure=_shown(error))

    def _begun_text(self, request: RequestInfo) -> _Text:
        outputs, reasoning = request.sampling_params.structured_outputs, request.reasoning
        if outputs is None:
            raise ValueError(f"request {request.request_id} has no constraint")
        matcher = self._grammars.matcher(outputs)
        ends, end = request.end_token_ids, int(self._grammars.eos_token_ids[0])
        if reasoning is None:
            return _Text(matcher, self._take_mask(), ends=ends, end=end)
        tracker = ReasoningTracker(reasoning, self._grammars.token_bytes)
        tokens = self._grammars.reasoning_tokens(reasoning)
        early = matcher if reasoning.is_open else matcher.deep_copy()
        beginning = _Beginning(tracker, tokens, matcher)
        return _Text(early, self._take_mask(), beginning=beginning, ends=ends, end=end)

    def _take_mask(self) -> int:
        if not self._free:
            if self._last_job is not None:
                self._last_job.result()  # it writes to the memory that is replaced
            old = self._bits
            num_masks = max(_FEW_MASKS, 2 * len(old))
            self._bits = self._make_space(num_masks, self._grammars.num_ll_words)
            if len(old):
                self._bits[: len(old)] = old
            self._free = list(range(num_masks - 1, len(old) - 1, -1))
        return self._free.pop()

    def masks(self, constrained: ConstrainedRows) -> Masks:
        """The masks of a step's rows; waits until they are computed."""
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
        """Process the tokens of a step, one per sampled row of its plan, and start computing the
        masks for the next tokens.

        Returns:
            Why requests cannot continue, by request id.
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
                    f"token {sampled[i]} is not allowed: other parameters ban all allowed tokens"
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
        """Queue the masks of these texts, after all earlier ones."""
        for text in texts:
            if text.beginning is not None and not text.beginning.is_undecided:
                self._write_free_mask(text, text.beginning)
        jobs = [_Job(text, text.unread, text.opening) for text in texts if text.made is None]
        if not jobs:
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="pagespec-masks")
        self._last_job = self._worker.submit(self._make, jobs, self._bits)
        for job in jobs:
            job.text.unread, job.text.made = [], self._last_job

    def _write_free_mask(self, text: _Text, beginning: _Beginning) -> None:
        """Write the mask of a row inside its reasoning. No job writes it at the same time."""
        text.made = _MADE
        num_matched = beginning.tracker.num_matched
        if beginning.is_free and beginning.banned == num_matched:
            return
        banned = beginning.tokens.banned(num_matched)
        row = self._bits[text.mask]
        row[:] = -1
        np.bitwise_and.at(row, banned >> 5, ~_bits_of(banned))
        beginning.is_free, beginning.banned = True, num_matched

    def _make(self, jobs: list[_Job], bits: IntArray) -> None:
        """Pass the matchers their tokens and write the masks. llguidance does each in one call for
        all matchers, without holding the GIL.

        An exception of llguidance, or a panic of its Rust code, ends all requests of the call,
        because it is unknown which matchers consumed their tokens."""
        from llguidance import LLExecutor
        from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor(num_threads=min(_MAX_THREADS, os.cpu_count() or 1))
        one = []
        for job in jobs:
            if job.opening is not None:
                job.text.failure = _failure_of(job.try_tokens)
            elif len(job.ids) == 1:
                one.append(job)
            elif job.ids:
                job.text.failure = _failure_of(job.text.matcher.consume_tokens, job.ids)
        if one:
            pairs = [(job.text.matcher, job.ids[0]) for job in one]
            failure = _failure_of(consume_token_par, self._executor, pairs)
            for job in one:
                job.text.failure = failure
        live = [job.text for job in jobs if not job.is_beyond and not _has_failed(job.text)]
        masks = [(text.matcher, text.mask) for text in live]
        # llguidance raises for an empty list.
        if masks and _failure_of(fill_next_token_bitmask_par, self._executor, masks, bits):
            for text, mask in zip(live, masks, strict=True):
                text.failure = _failure_of(
                    fill_next_token_bitmask_par, self._executor, [mask], bits
                )
        for text in live:
            if not _has_failed(text) and text.ends:
                self._allow_ends(text, bits)
        for job in jobs:
            if job.opening is not None and not job.text.failure:
                row = bits[job.text.mask]
                if job.is_beyond:
                    row[:] = 0
                np.bitwise_or.at(row, job.opening >> 5, _bits_of(job.opening))

    def _allow_ends(self, text: _Text, bits: IntArray) -> None:
        """Allow the tokens that end this text, if the model's end tokens are allowed."""
        row, own = bits[text.mask], self._grammars.eos_token_ids
        if (row[own >> 5] & _bits_of(own)).any():
            ends = np.array(sorted(text.ends), np.int64)
            np.bitwise_or.at(row, ends >> 5, _bits_of(ends))


@dataclass(slots=True)
class _Job:
    """A mask to compute.

    Attributes:
        ids: outputs that the matcher consumes first.
        opening: tokens that open the reasoning, which are also allowed; None once the content has
            begun.
    """

    text: _Text
    ids: list[int]
    opening: Ids | None

    @property
    def is_beyond(self) -> bool:
        return self.text.beginning is not None and self.text.beginning.is_beyond

    def try_tokens(self) -> None:
        """Let the matcher consume the tokens. They may open the reasoning instead."""
        beginning = self.text.beginning
        if beginning is not None and not beginning.is_beyond:
            num_taken = self.text.matcher.try_consume_tokens(self.ids)
            beginning.is_beyond = num_taken < len(self.ids)


def _bits_of(ids: Ids) -> IntArray:
    """The bit of each id within its word."""
    return np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32)).view(np.int32)


def _has_failed(text: _Text) -> bool:
    if not text.failure and text.matcher.is_error():
        text.failure = _shown(text.matcher.get_error())
    return bool(text.failure)


def _failure_of(call: Callable[..., object], *arguments: object) -> str:
    """The text of a call's exception; "" if none. Not for a thread that receives signals."""
    try:
        call(*arguments)
    except BaseException as error:
        return _shown(error)
    return ""


def _shown(reason: object) -> str:
    return readable(str(reason)) or "no mask could be made"
