"""The immutable plan of one step: the scheduler's decision and a runner's only input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from .logprobs import StepLogprobs
from .request import Request, RequestInfo

Blocks = tuple[int, ...]
_T = TypeVar("_T")
_Requests = tuple[RequestInfo, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as parallel arrays, with one row per request, in rank order.

    Row ``i`` computes positions ``[starts[i], starts[i] + num_tokens[i])`` of ``requests[i]``, and
    one token is sampled from each of its last ``num_samples[i]`` positions. With k samples the
    last k - 1 of its ``token_ids`` are draft tokens: guesses of its first k - 1 samples. Settling
    accepts a prefix of the samples (:meth:`accepted`).

    ``copies`` are done first, before the step reads or writes any KV.

    A runner's only input is the sequence of plans. It applies ``released``, ``tables`` and
    ``new_blocks``, in this order; the resulting block tables equal the scheduler's (S32). In the
    same way ``released``, ``state_tables`` and ``new_state_slots`` give the state tables, except
    for entries that are not read again (S51). A plan refers to no mutable object.

    Attributes:
        step: 0, 1, 2 ... in dispatch order.
        token_ids: the ids of all positions computed, concatenated in row order. In a content
            segment they are placeholders; the inputs there follow from ``RequestInfo.segments``,
            the content's hash and the position's offset in it. A negative id, ``-(j + 1)``, is the
            j-th token that the previous step sampled (samples concatenated in row order) and that
            may exist only on the device. Beyond a pipeline depth of 1, j continues into earlier
            steps, newest first. A ``range`` if each row feeds the token that the same row of the
            previous step sampled.
        copies: (source, destination) block ids, for requests that share a prompt (S33). No source
            is a destination.
        prefixes: by row, for each row admitted in this step whose request needs its history: the
            settled ids at positions ``[0, start)``, which the row does not compute. Together with
            ``token_ids`` of this and later plans they are all tokens of the request (S39).
        tables: the whole block table of each row admitted in this step, by row.
        new_blocks: the ids appended to the block tables of other rows, by row.
        state_tables: the whole state table of each row admitted in this step, by row; -1 for an
            entry without a slot. Empty without recurrent layers, like ``new_state_slots``.
        new_state_slots: the ids appended to the state tables of other rows, by row.
        released: ids of requests that left the running set since the previous plan, including
            those of ``preempted``; one of them may be admitted again in this same plan.
        preempted: requests preempted for this step; none of them is a row.
        is_decode_only: every row computes one position and samples one token from it.
        has_drafts: whether a row has draft tokens.
        wanted_drafts: by row, how many tokens the runner drafts with a second model behind the
            row's accepted samples. The row's block table covers the positions that drafting
            writes: as many behind the row's as tokens are wanted (S64).
        next_token_ids: by row, the token behind a row that samples nothing; only for a drafter
            with a second model.
    """

    step: int
    requests: tuple[RequestInfo, ...]
    starts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    num_samples: tuple[int, ...]
    token_ids: Sequence[int]
    tables: dict[int, Blocks] = field(default_factory=dict)
    new_blocks: dict[int, Blocks] = field(default_factory=dict)
    state_tables: dict[int, tuple[int, ...]] = field(default_factory=dict)
    new_state_slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    prefixes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    copies: tuple[tuple[int, int], ...] = ()
    released: tuple[str, ...] = ()
    preempted: tuple[RequestInfo, ...] = ()
    is_decode_only: bool = False
    wanted_drafts: Mapping[int, int] = field(default_factory=dict)
    next_token_ids: Mapping[int, int] = field(default_factory=dict)
    has_drafts: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        has_drafts = not self.is_decode_only and max(self.num_samples, default=0) > 1
        object.__setattr__(self, "has_drafts", has_drafts)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def total_num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the step samples."""
        return sum(self.num_samples)

    def rows(self) -> Iterator[tuple[RequestInfo, int, int, int]]:
        """(request, start, num_tokens, num_samples) per row."""
        return zip(self.requests, self.starts, self.num_tokens, self.num_samples, strict=True)

    def drafts(self) -> dict[int, tuple[int, ...]]:
        """The draft tokens of each row that has any, by row."""
        found: dict[int, tuple[int, ...]] = {}
        end = 0
        for row, (num_tokens, num_samples) in enumerate(
            zip(self.num_tokens, self.num_samples, strict=True)
        ):
            end += num_tokens
            if num_samples > 1:
                found[row] = tuple(self.token_ids[end - num_samples + 1 : end])
        return found

    def accepted(self, token_ids: Sequence[int]) -> list[Sequence[int]]:
        """Per row, the samples that settling may accept: the first sample, and each sample that
        follows a draft token equal to the previous sample.

        Args:
            token_ids: the samples of the step, concatenated in row order.
        """
        found: list[Sequence[int]] = []
        drafts = self.drafts() if self.has_drafts else {}
        begin = 0
        for row, num_samples in enumerate(self.num_samples):
            samples = token_ids[begin : begin + num_samples]
            begin += num_samples
            if row in drafts:
                num_right = 0
                for draft, sample in zip(drafts[row], samples, strict=False):
                    if draft != sample:
                        break
                    num_right += 1
                samples = samples[: num_right + 1]
            found.append(samples)
        return found


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a plan.

    Attributes:
        token_ids: the samples of the step, ``num_samples`` per row, concatenated in row order.
        logprobs: present if parameters of a row request log-probabilities.
        failures: why a request cannot continue, by request id. The sample that failed and those
            behind it are discarded.
        failed_samples: the index in its row of the sample that failed, by request id. An absent
            request failed at its first sample. The failure counts only if all draft tokens before
            the sample are accepted and the request does not end before it.
        drafts: by request id, the tokens that the runner drafted behind the accepted samples of its
            row, at most as many as the plan wants. No output depends on them.
    """

    token_ids: Sequence[int]
    logprobs: StepLogprobs | None = None
    failures: Mapping[str, str] = field(default_factory=dict)
    failed_samples: Mapping[str, int] = field(default_factory=dict)
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)


class InFlightStep(NamedTuple):
    """A dispatched plan and the live requests of its rows, which only the scheduler may change.
    Not passed to runners."""

    plan: StepPlan
    requests: tuple[Request, ...]

    def rows(self) -> Iterator[tuple[Request, int, int, int]]:
        """(request, start, num_tokens, num_samples) per row."""
        plan = self.plan
        return zip(self.requests, plan.starts, plan.num_tokens, plan.num_samples, strict=True)


class LastTwoBatches(Generic[_T]):
    """Values derived from the requests of plans, kept for the last two batches.

    The keys are ``StepPlan.requests``, compared by identity: an unchanged batch keeps the same
    tuple. With overlap, settled-only requests have a row in every second step (S42), so two batches
    may alternate.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: tuple[tuple[_Requests, _T], ...] = ()

    def get(self, requests: _Requests) -> _T | None:
        """The value kept for these requests; None if two other batches came since."""
        for kept, value in self._kept:
            if kept is requests:
                return value
        return None

    def put(self, requests: _Requests, value: _T) -> _T:
        """Keep a value and return it."""
        self._kept = ((requests, value), *self._kept[:1])
        return value

    def clear(self) -> None:
        self._kept = ()


def row_token_ids(
    requests: Sequence[Request],
    starts: Sequence[int],
    num_tokens: Sequence[int],
    in_flight: Sequence[InFlightStep],
    drafts: Mapping[int, Sequence[int]],
) -> tuple[int, ...]:
    """Token ids of the rows: settled ids as they are, others as references to samples of steps in
    flight (see ``StepPlan.token_ids``).

    Args:
        num_tokens: per row, including draft tokens.
        in_flight: dispatched but unsettled steps, oldest first.
        drafts: the draft tokens of each row that has any, by row; all tokens before them are
            settled.
    """
    ids: list[int] = []
    places: dict[Request, int] | None = None
    for row, (request, start, n) in enumerate(zip(requests, starts, num_tokens, strict=True)):
        known = request.token_ids
        if start < len(known):
            if n == 1:
                ids.append(known[start])
            else:
                ids += known[start : start + n]
                if row in drafts:
                    ids += drafts[row]
            continue
        if places is None:
            places = _places_in_flight(reversed(in_flight))
        ids.append(-1 - places[request])
    return tuple(ids)


def _places_in_flight(newest_first: Iterable[InFlightStep]) -> dict[Request, int]:
    """The index of each request's latest token among the samples in flight, newest step first. A
    row with draft tokens has several samples; no later row refers to one of them before they are
    settled (S42), but they do count in the indices of other rows."""
    places: dict[Request, int] = {}
    num_places = 0
    for plan, requests in newest_first:
        for request, num_samples in zip(requests, plan.num_samples, strict=True):
            if num_samples:
                places.setdefault(request, num_places)
                num_places += num_samples
    return places
