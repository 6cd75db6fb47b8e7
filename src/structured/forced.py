"""Draft tokens from grammars: tokens that the constraint of a request forces.

Inside a JSON object whose schema has fixed names, most tokens are forced by the text before them.
They are proposed like any other draft tokens, so a wrong one costs time and never changes output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.drafting.drafters import PredictionDrafter, is_long_row
from ..engine.request import Request
from ..engine.runner import DraftObserver
from ..engine.structured_outputs import StructuredOutputs
from ..engine.text.reasoning import Phase, ReasoningTracker
from .grammars import Grammars
from .matchers import MAX_DRAFT_MASKS, consume_all


@dataclass(slots=True)
class _Followed:
    """A constrained request.

    Attributes:
        matcher: has consumed its known content tokens; None before the content begins, and if the
            request can no longer be followed.
        num_read: number of outputs read so far.
        tracker: None once the content has begun.
        num_guessed: draft tokens of the other drafter in the latest proposal, with the first
            forbidden one.
        num_allowed: how many of them the grammar allows.
    """

    matcher: Any
    tracker: ReasoningTracker | None
    num_read: int = 0
    num_guessed: int = 0
    num_allowed: int = 0


class ForcedDrafter(DraftObserver):
    """Adds forced tokens to the proposals of another drafter, for constrained requests.

    A proposal of the other drafter is cut before the first token that the grammar forbids; the
    tokens that are forced there follow. It has a matcher of its own per request, so it never waits
    for bitmasks.

    Args:
        grammars: the runner's compiled constraints.
        other: the other drafter. Its limits hold for forced tokens too.
        max_draft_masks: most draft tokens of constrained requests per step, oldest requests first.
    """

    def __init__(
        self, grammars: Grammars, other: PredictionDrafter, max_draft_masks: int = MAX_DRAFT_MASKS
    ) -> None:
        self.max_draft_tokens = other.max_draft_tokens
        self.max_wanted_drafts = other.max_wanted_drafts
        self._grammars, self.other = grammars, other
        self._max_draft_masks = self._num_left = max_draft_masks
        self._followed: dict[str, _Followed] = {}

    def wants_drafts(self, running: Sequence[Request], num_others: int) -> bool:
        return self.other.wants_drafts(running, num_others)

    def begin(self, requests: Sequence[Request], num_tokens: int, is_settled: bool) -> None:
        self._num_left = self._max_draft_masks
        self.other.begin(requests, num_tokens, is_settled)

    def propose(self, request: Request) -> Sequence[int]:
        guesses = self.other.propose(request)
        outputs = request.sampling_params.structured_outputs
        if outputs is None or is_long_row(request):
            return guesses
        most = min(self.other.num_if_right, self._num_left)
        guesses = guesses[: self._num_left]
        if not (guesses or most):
            return guesses
        found: Sequence[int] = guesses
        try:
            found = self._with_forced(request, outputs, list(guesses), most)
        except BaseException as error:  # a drafter must not end a request
            if not (isinstance(error, Exception) or _is_panic(error)):
                raise
            self._followed[request.request_id] = _Followed(None, None)
        self._num_left -= len(found)
        return found

    def wanted(self, request: Request) -> int:
        return self.other.wanted(request)

    def offer(self, request: Request, token_ids: Sequence[int]) -> None:
        self.other.offer(request, token_ids)

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The other drafter receives the counts of its own draft tokens."""
        followed = self._followed.get(request.request_id)
        if followed is not None:
            if num_drafts > followed.num_allowed:
                num_drafts = followed.num_guessed
            num_accepted = min(num_accepted, followed.num_allowed)
        if num_drafts:
            self.other.note(request, num_drafts, num_accepted)

    def end(self, request: Request) -> None:
        self._followed.pop(request.request_id, None)
        self.other.end(request)

    def reset(self) -> None:
        self._followed.clear()
        self.other.reset()

    def _with_forced(
        self, request: Request, outputs: StructuredOutputs, guesses: list[int], most: int
    ) -> list[int]:
        followed = self._follow(request, outputs)
        matcher = followed.matcher
        followed.num_allowed = followed.num_guessed = len(guesses)
        if matcher is None:
            return guesses
        ahead = matcher.deep_copy()
        own, end = self._own_ids(request, guesses)
        if end in own:  # nothing is sampled behind it
            guesses = guesses[: own.index(end)]
            followed.num_allowed = followed.num_guessed = len(guesses)
        num_allowed = ahead.try_consume_tokens(own[: len(guesses)])
        if num_allowed < len(guesses):
            followed.num_allowed, followed.num_guessed = num_allowed, num_allowed + 1
        found = guesses[:num_allowed]
        num_left = most - num_allowed
        return found + ahead.compute_ff_tokens()[:num_left] if num_left > 0 else found

    def _follow(self, request: Request, outputs: StructuredOutputs) -> _Followed:
        """The request's matcher at its last token."""
        followed = self._followed.get(request.request_id)
        if followed is None:
            reasoning, bytes_of = request.info.reasoning, self._grammars.token_bytes
            tracker = None if reasoning is None else ReasoningTracker(reasoning, bytes_of)
            matcher = None if tracker is not None else self._grammars.matcher(outputs)
            followed = self._followed[request.request_id] = _Followed(matcher, tracker)
        new = request.token_ids[request.num_prompt_tokens + followed.num_read :]
        followed.num_read += len(new)
        tracker = followed.tracker
        if tracker is not None:
            phases = (tracker.push(token_id) for token_id in new)  # none once the content has begun
            if Phase.CONTENT not in phases:
                return followed
            followed.tracker, followed.matcher = None, self._grammars.matcher(outputs)
            new = request.output_token_ids[tracker.num_skipped or 0 :]
        if followed.matcher is not None and new:
            own, _ = self._own_ids(request, new)
            if not consume_all(followed.matcher, own):
                followed.matcher = None
        return followed

    def _own_ids(self, request: Request, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Tokens as matchers consume them, and the end token of matchers."""
        ends, end = request.info.end_token_ids, int(self._grammars.eos_token_ids[0])
        return [end if i in ends else i for i in token_ids], end


def _is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic of Rust code."""
    return type(error).__module__ == "pyo3_runtime"
