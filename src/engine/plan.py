"""The frozen plan of one step: the scheduler's decision, and the only input of a runner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ..errors import EngineError
from .logprobs import StepLogprobs
from .request import Request, RequestInfo

Blocks = tuple[int, ...]
_T = TypeVar("_T")
_Requests = tuple[RequestInfo, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as parallel arrays, a row for each request in it, in rank order.

    Row ``i`` computes positions ``[starts[i], starts[i] + num_tokens[i])`` of ``requests[i]``, and
    one token is sampled from each of its last ``num_samples[i]`` positions. With k samples the
    last k - 1 of its ``token_ids`` are draft tokens: guesses of its first k - 1 samples. Settling
    takes a prefix of the samples (:meth:`accepted`).

    ``copies`` are done first: before the step reads or writes any KV.

    A runner has the plans, in order, and nothing else: the block tables it makes of ``released``,
    ``tables`` and ``new_blocks``, applied in this order, are the requests' own (S32); so are the
    state tables of ``released``, ``state_tables`` and ``new_state_slots``, but for entries that are
    not read again (S51). A plan refers to nothing that changes after it was made.

    Attributes:
        step: 0, 1, 2 ... in dispatch order.
        token_ids: the ids of all positions computed, row after row. Those of a content segment are
            placeholders; the inputs there follow from ``RequestInfo.segments``, the content's
            hash and the position's offset in it. A negative one, ``-(j + 1)``,
            is the j-th token that the step before sampled, which is on the device first: sample
            after sample, row after row. Beyond a pipeline depth of 1, j goes on into the steps
            before that, newest first. A ``range`` if each row feeds the token that the same row of
            the step before sampled.
        copies: (source, destination) block ids, of requests that share a prompt (S33). No source
            is a destination.
        prefixes: of each row admitted in this step whose request needs its history, the ids at
            positions ``[0, start)``, which it does not compute, by row; all of them settled.
            Together with ``token_ids`` of this and the later plans that is all its tokens (S39).
        tables: the whole block table of each row that was admitted in this step, by row.
        new_blocks: the ids appended to the block tables of other rows, by row.
        state_tables: the whole state table of each row that was admitted in this step, by row; -1
            where it has no slot. Empty, as ``new_state_slots``, without recurrent layers.
        new_state_slots: the ids appended to the state tables of other rows, by row.
        released: ids of requests that left the running ones since the plan before, those of
            ``preempted`` included; one of them may be admitted again in this very plan.
        preempted: requests whose blocks were taken back for this step; none of them is a row.
        is_decode_only: every row computes one position and samples one token from it.
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

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def total_num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens that the step samples."""
        return sum(self.num_samples)

    @property
    def has_drafts(self) -> bool:
        return not self.is_decode_only and max(self.num_samples, default=0) > 1

    def rows(self) -> Iterator[tuple[RequestInfo, int, int, int]]:
        """(request, start, num_tokens, num_samples) per row."""
        return zip(self.requests, self.starts, self.num_tokens, self.num_samples, strict=True)

    def drafts(self) -> dict[int, tuple[int, ...]]:
        """The draft tokens of each row that has some, by row."""
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
        """Per row the samples that settling may take: the first, and each that follows a draft
        token equal to the sample at its place.

        Args:
            token_ids: the samples of the step, row after row.
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


def refuse_drafts(plan: StepPlan, runner: str, *, takes_plain: bool = False) -> None:
    """Raises EngineError if a row has draft tokens that ``runner`` does not compute.

    Args:
        takes_plain: it computes those of requests that neither edit their logits nor have a
            constraint; else it samples one token per row.
    """
    for row in plan.drafts() if plan.has_drafts else ():
        info = plan.requests[row]
        is_plain = info.edits is None and info.sampling_params.structured_outputs is None
        if not (takes_plain and is_plain):
            which = " of requests with edits or constraints" if takes_plain else ""
            raise EngineError(
                f"{runner} computes no draft tokens{which}, and the row of "
                f"{info.request_id!r} in step {plan.step} has some"
            )


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a plan.

    Attributes:
        token_ids: the samples of the step, ``num_samples`` of each row, row after row.
        logprobs: if parameters of a row request some.
        failures: why a request cannot go on, by its id; its sampled token is discarded.
    """

    token_ids: Sequence[int]
    logprobs: StepLogprobs | None = None
    failures: Mapping[str, str] = field(default_factory=dict)


class InFlightStep(NamedTuple):
    """A dispatched plan and the live requests of its rows, which only the scheduler may change. It
    is not passed to runners."""

    plan: StepPlan
    requests: tuple[Request, ...]

    def rows(self) -> Iterator[tuple[Request, int, int, int]]:
        """(request, start, num_tokens, num_samples) per row."""
        plan = self.plan
        return zip(self.requests, plan.starts, plan.num_tokens, plan.num_samples, strict=True)


class LastTwoBatches(Generic[_T]):
    """Values derived from the requests of plans, for the two batches that steps may alternate.

    The keys are ``StepPlan.requests``: the tuples are the same objects while a batch comes again.
    With overlap, settled-only requests have a row in every second step (S42).
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: tuple[tuple[_Requests, _T], ...] = ()

    def get(self, requests: _Requests) -> _T | None:
        """The value kept for these requests, unless two other batches came since."""
        for kept, value in self._kept:
            if kept is requests:
                return value
        return None

    def put(self, requests: _Requests, value: _T) -> _T:
        """Keep a value, and return it."""
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
    """Settled ids as they are, others by their place among the tokens that steps in flight sample
    (see ``StepPlan.token_ids``).

    Args:
        num_tokens: draft tokens included.
        in_flight: dispatched and not settled, oldest first.
        drafts: the draft tokens of each row that has some, by row; all before them is settled.
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
    """The place of each request's latest token among the samples in flight, newest first. A row
    with draft tokens has several samples, of which no later row names one before they are settled
    (S42); it counts for the places behind it."""
    places: dict[Request, int] = {}
    num_places = 0
    for plan, requests in newest_first:
        for request, num_samples in zip(requests, plan.num_samples, strict=True):
            if num_samples:
                places.setdefault(request, num_places)
                num_places += num_samples
    return places
