"""The matchers of a runner's constrained requests, and the bitmasks for their next tokens.

Plans and results are the only inputs. A matcher consumes the output tokens known at an admission
(after a preemption), then each accepted token. A bitmask needs all tokens before it. These are
settled when its row is planned, because constrained requests are settled-only (S42). So a thread
computes the bitmask as soon as the tokens are collected, and only the sampling of the row waits for
it.

A row with k draft tokens samples k + 1 tokens, each with its own bitmask. A copy of the matcher
consumes the draft tokens once the row is planned, up to the first one that the grammar forbids. The
row's own matcher consumes accepted tokens only, so it is never rolled back.

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
from ..engine.text.reasoning import ReasoningTracker
from .grammars import Grammars
from .reasoning import Ids
from .reasons import readable
from .texts import Beginning, Text

IntArray = NDArray[np.int32]
# A mask takes some 30 us. Waking a thread on each of many cores took longer than 64 masks.
_MAX_THREADS = 8
_FEW_MASKS = 64
MAX_DRAFT_MASKS = 512
"""Most draft tokens of constrained requests per step: each needs a mask, of one bit per id. With
two steps in flight and two masks per running request, masks take some tens of megabytes."""

_MADE: Future[None] = Future()
_MADE.set_result(None)


@dataclass(slots=True, eq=False)
class _Ahead:
    """The masks behind the draft tokens of a row.

    Attributes:
        masks: the index of the mask behind each draft token.
        num_made: how many of them are written. The grammar forbids the next draft token, or there
            is none, or the mask behind it failed.
        failure: why the next mask could not be computed; empty if it did not fail.
    """

    text: Text
    drafts: tuple[int, ...]
    masks: list[int]
    num_made: int = 0
    failure: str = ""


@dataclass(slots=True)
class ConstrainedRows:
    """The sampled rows of a step whose tokens are constrained.

    Attributes:
        rows: row indices in the plan. places: the indices of their first samples among those of the
            step.
        aheads: of the rows with draft tokens, by row. made_ahead: done when their masks are
            written.
    """

    plan: StepPlan
    rows: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    aheads: dict[int, _Ahead] = field(default_factory=dict)
    made_ahead: Future[None] | None = None

    def __len__(self) -> int:
        return len(self.rows)


class Masks(NamedTuple):
    """The ids that constrained rows of a step may sample.

    Attributes:
        bits: int32 ``[masks, words]``, one bit per id. A mask is unchanged until its sample is
            settled.
        numbers: mask index by sample of the step. Samples that are discarded in any case have none:
            those behind a draft token that the grammar forbids, or of a matcher that has failed.
        rows: the row of the plan of each of these samples.
    """

    bits: IntArray
    numbers: dict[int, int]
    rows: list[int]


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
        self._texts: dict[str, Text] = {}
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
            elif plan.has_drafts:
                self._find_drafts(found)
        self._start([text for text in found.texts if text.made is None and not text.failure])
        if found.aheads:
            aheads = list(found.aheads.values())
            found.made_ahead = self._submit(self._look_ahead, aheads, self._bits)
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
        for row, (request, start, num_tokens, num_samples) in enumerate(plan.rows()):
            outputs = request.sampling_params.structured_outputs
            if outputs is not None:
                if row in plan.tables:
                    text = self._texts[request.request_id] = self._new_text(request)
                    text.push(request, 0, plan.prefixes[row])
                text = self._texts[request.request_id]
                num_own = num_tokens - max(0, num_samples - 1)
                if start + num_own > text.num_known:
                    text.push(request, start, plan.token_ids[begin : begin + num_own])
                if num_samples:
                    found.rows.append(row)
                    found.places.append(place)
                    found.texts.append(text)
            begin += num_tokens
            place += num_samples
        return found

    def _find_drafts(self, found: ConstrainedRows) -> None:
        """Allocate the masks behind the draft tokens of constrained rows."""
        drafts = found.plan.drafts()
        for row, text in zip(found.rows, found.texts, strict=True):
            if row in drafts and not text.failure:
                masks = [self._take_mask() for _ in drafts[row]]
                found.aheads[row] = _Ahead(text, drafts[row], masks)

    def _new_text(self, request: RequestInfo) -> Text:
        try:
            return self._begun_text(request)
        except Exception as error:  # admission accepted it: a bug, which ends only this request
            return Text(None, self._take_mask(), failure=_shown(error))

    def _begun_text(self, request: RequestInfo) -> Text:
        outputs, reasoning = request.sampling_params.structured_outputs, request.reasoning
        if outputs is None:
            raise ValueError(f"request {request.request_id} has no constraint")
        matcher = self._grammars.matcher(outputs)
        text = Text(
            matcher,
            self._take_mask(),
            ends=request.end_token_ids,
            end=int(self._grammars.eos_token_ids[0]),
            early_stops=np.array(sorted(request.early_stop_ids), np.int64),
            min_tokens=request.sampling_params.min_tokens,
        )
        if reasoning is None:
            return text
        tracker = ReasoningTracker(reasoning, self._grammars.token_bytes)
        tokens = self._grammars.reasoning_tokens(reasoning)
        text.matcher = matcher if reasoning.is_open else matcher.deep_copy()
        text.beginning = Beginning(tracker, tokens, matcher)
        return text

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
        if constrained.made_ahead is not None:
            constrained.made_ahead.result()
        numbers, own_rows = {}, []
        rows = zip(constrained.rows, constrained.places, constrained.texts, strict=True)
        for row, place, text in rows:
            if not text.failure:
                numbers[place] = text.mask
                own_rows.append(row)
                if row in constrained.aheads:
                    ahead = constrained.aheads[row]
                    for i, mask in enumerate(ahead.masks[: ahead.num_made]):
                        numbers[place + 1 + i] = mask
                        own_rows.append(row)
        return Masks(self._bits[:, : self._grammars.num_words], numbers, own_rows)

    def settle(
        self, constrained: ConstrainedRows, token_ids: Sequence[int]
    ) -> tuple[dict[str, str], dict[str, int]]:
        """Process the samples of a step, and start computing the masks for the next tokens.

        Returns:
            Why requests cannot continue, and the samples that failed: see
            :class:`.StepResult`.
        """
        plan = constrained.plan
        accepted = plan.accepted(token_ids) if constrained.aheads else []
        sampled = [token_ids[place] for place in constrained.places]
        masks = [text.mask for text in constrained.texts]
        ids = np.array(sampled, np.int64)
        is_allowed = (self._bits[masks, ids >> 5] >> (ids & 31) & 1).tolist()
        failures: dict[str, str] = {}
        failed_samples: dict[str, int] = {}
        going_on = []
        for i, (row, text) in enumerate(zip(constrained.rows, constrained.texts, strict=True)):
            request = plan.requests[row]
            if not (text.failure or is_allowed[i]):
                text.failure = _not_allowed(sampled[i])
            samples: Sequence[int] = [sampled[i]]
            if row in constrained.aheads and not text.failure:
                samples = accepted[row]
                num_right = self._check_ahead(constrained.aheads[row], samples)
                if text.failure:
                    failed_samples[request.request_id] = num_right
            if text.failure:
                failures[request.request_id] = f"structured_outputs: {text.failure}"
            elif self._texts.get(request.request_id) is text:
                start = plan.starts[row] + plan.num_tokens[row] - (plan.num_samples[row] - 1)
                text.push(request, start, samples)
                going_on.append(text)
        for ahead in constrained.aheads.values():
            self._free += ahead.masks
        self._start(going_on)
        return failures, failed_samples

    def _check_ahead(self, ahead: _Ahead, samples: Sequence[int]) -> int:
        """Set the failure of a text if one of the accepted samples behind its draft tokens failed.
        Returns the number of samples before it."""
        for i, token_id in enumerate(samples[1:]):
            if i >= ahead.num_made:  # the samples before are allowed, so the next mask failed
                ahead.text.failure = ahead.failure or _shown("")
            elif not _is_allowed(self._bits[ahead.masks[i]], token_id):
                ahead.text.failure = _not_allowed(token_id)
            if ahead.text.failure:
                return i + 1
        return len(samples)

    # On the thread ----------------------------------------------------------------------------

    def _start(self, texts: list[Text]) -> None:
        """Queue the masks of these texts, after all earlier ones."""
        for text in texts:
            if text.beginning is not None and not text.beginning.is_undecided:
                self._write_free_mask(text, text.beginning)
        jobs = [_Job.of(text) for text in texts if text.made is None]
        if not jobs:
            return
        made = self._submit(self._make, jobs, self._bits)
        for job in jobs:
            job.text.unread, job.text.made = [], made

    def _submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        """Queue work for the thread."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="pagespec-masks")
        self._last_job = self._worker.submit(work, *arguments)
        return self._last_job

    def _write_free_mask(self, text: Text, beginning: Beginning) -> None:
        """Write the mask of a row inside its reasoning. No job writes it at the same time."""
        text.made = _MADE
        num_matched, stops = beginning.tracker.num_matched, text.banned_stops
        state = (True, num_matched, len(stops) > 0)
        if (beginning.is_free, beginning.banned, beginning.is_early) == state:
            return
        self._write_free(text, beginning, self._bits)
        beginning.is_free, beginning.banned, beginning.is_early = state

    def _write_free(self, text: Text, beginning: Beginning, bits: IntArray) -> None:
        row = bits[text.mask]
        row[:] = -1
        _remove(row, beginning.tokens.banned(beginning.tracker.num_matched))
        self._ban(row, text.banned_stops)

    def _ban(self, row: IntArray, ids: Ids) -> None:
        """Ban tokens unless a mask allows no others."""
        if len(ids):
            others = row.copy()
            _remove(others, ids)
            if others[: self._grammars.num_words].any():
                row[:] = others

    def _look_ahead(self, aheads: Sequence[_Ahead], bits: IntArray) -> None:
        """Write the masks behind draft tokens: for each in turn, the masks of all rows at once."""
        forks = [(ahead, text) for ahead in aheads if (text := _fork_of(ahead)) is not None]
        for i in range(max(len(ahead.drafts) for ahead in aheads)):
            forks = [
                (ahead, text)
                for ahead, text in forks
                if i < len(ahead.drafts) and _is_allowed(bits[text.mask], ahead.drafts[i])
            ]
            jobs = []
            for ahead, text in forks:
                text.mask = ahead.masks[i]
                text.failure = _failure_of(text.push_outputs, [ahead.drafts[i]])
                beginning = text.beginning
                if beginning is not None and not beginning.is_undecided:
                    self._write_free(text, beginning, bits)
                elif not text.failure:
                    jobs.append(_Job.of(text))
                    text.unread = []
            if jobs:
                self._make(jobs, bits)
            for ahead, text in forks:
                ahead.failure = text.failure
                ahead.num_made = i + (not text.failure)
            forks = [(ahead, text) for ahead, text in forks if not text.failure]

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
            elif len(job.ids) == 1 and not job.text.is_fork:
                one.append(job)
            elif job.ids:
                job.text.failure = _failure_of(consume_all, job.text.matcher, job.ids)
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
            if not job.text.failure:
                self._ban(bits[job.text.mask], job.banned_stops)

    def _allow_ends(self, text: Text, bits: IntArray) -> None:
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
        banned_stops: see :attr:`Text.banned_stops`.
    """

    text: Text
    ids: list[int]
    opening: Ids | None
    banned_stops: Ids

    @classmethod
    def of(cls, text: Text) -> _Job:
        """The job for the next token of a text."""
        return cls(text, text.unread, text.opening, text.banned_stops)

    @property
    def is_beyond(self) -> bool:
        return self.text.beginning is not None and self.text.beginning.is_beyond

    def try_tokens(self) -> None:
        """Let the matcher consume the tokens. They may open the reasoning instead."""
        beginning = self.text.beginning
        if beginning is not None and not beginning.is_beyond:
            num_taken = self.text.matcher.try_consume_tokens(self.ids)
            beginning.is_beyond = num_taken < len(self.ids)


def consume_all(matcher: Any, token_ids: Sequence[int]) -> bool:
    """Let a matcher consume tokens; False if it now has an error. Unlike its ``consume_tokens`` it
    accepts end tokens behind a complete text, as ``consume_token`` does."""
    return all(matcher.consume_token(token_id) for token_id in token_ids)


def _fork_of(ahead: _Ahead) -> Text | None:
    try:
        return None if ahead.text.failure else ahead.text.fork()
    except BaseException as error:  # not on a thread that receives signals
        ahead.failure = _shown(error)
        return None


def _is_allowed(mask: IntArray, token_id: int) -> bool:
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)


def _not_allowed(token_id: int) -> str:
    return f"token {token_id} is not allowed: other parameters ban all allowed tokens"


def _remove(mask: IntArray, ids: Ids) -> None:
    np.bitwise_and.at(mask, ids >> 5, ~_bits_of(ids))


def _bits_of(ids: Ids) -> IntArray:
    """The bit of each id within its word."""
    return np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32)).view(np.int32)


def _has_failed(text: Text) -> bool:
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
