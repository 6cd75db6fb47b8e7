"""Whether steps have draft tokens, and how many per row.

One mode holds for all rows of a step: they have draft tokens, after all steps in flight were
settled, or they are pipelined without. The mode and the numbers follow from the acceptance of each
request so far and from :class:`.StepCosts`, by :func:`.choose_numbers`.

Without draft tokens, acceptance is observed in one of two ways. A drafter that finds proposals in
microseconds is *watched*: it proposes, the proposal is not computed, and the tokens that come are
compared with it. A drafter with a model has *trials*: one step with one draft token per row, after
an interval that doubles with each trial that does not end in drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..request import Request
from .costs import NUM_RATES, StepCosts, choose_numbers

_FIRST_RATE = 0.7  # assumed acceptance of a draft token before any is observed
_FIRST_SHARE = 0.5  # assumed share of steps for which a proposal is found
_FIRST_WEIGHT, _MAX_WEIGHT = 3.0, 20.0  # earlier draft tokens that count in the acceptance
_SHARE_GAIN = 0.2  # weight of the newest proposal in the share
_PRIOR_GAIN = 0.1  # weight of the newest ended request in the assumptions for new ones
_MIN_INTERVAL, _MAX_INTERVAL = 32, 1024  # steps, or tokens of one request, between trials
_MAX_WATCHED = 8  # requests per step, some 10 us each
_WATCHED_LENGTH = 4  # tokens of a proposal that is only watched
_ROWS_PER_DECISION = 32  # one more step between decisions per that many rows
_STEPS_PER_DECISION = 4  # at least, with more than one row
_MAX_REMEMBERED_ROWS, _SHARE_PARTS = 8, 16  # decisions for few rows, by rounded shares
_BUCKET = 64  # other tokens of a step are rounded in the table of numbers
_MAX_ENTRIES = 4096
_NO_DRAFTS = (0,) * (NUM_RATES + 1)

Find = Callable[[Request, int], Sequence[int]]
"""(request, maximum number of tokens) -> draft tokens after its settled tokens"""


class Acceptance:
    """The draft tokens of one request so far; subclasses add state of a drafter.

    Attributes:
        rate: acceptance per draft token, given that those before it are accepted: the mean of the
            assumed rate and all draft tokens so far; of many, recent ones count more.
        weight: number of draft tokens for which ``rate`` counts in the next mean.
        share: share of steps for which the drafter finds a proposal. Recent ones count more.
        end: its number of tokens at its latest proposal.
        watched: the latest proposal that is only watched; empty if there is none.
        interval: tokens until the next trial of this request.
        is_observed: whether a draft token was accepted or rejected.
    """

    __slots__ = ("end", "interval", "is_observed", "rate", "share", "watched", "weight")

    def __init__(self, num_tokens: int, rate: float = _FIRST_RATE, share: float = 1.0) -> None:
        self.rate, self.share, self.end = rate, share, num_tokens
        self.weight = _FIRST_WEIGHT
        self.watched: Sequence[int] = ()
        self.interval = _MIN_INTERVAL
        self.is_observed = False

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Update the acceptance: the accepted draft tokens, then the first wrong one."""
        num_observed = min(num_accepted + 1, num_drafts)
        weight = self.weight + num_observed
        self.rate = (self.rate * self.weight + num_accepted) / weight
        self.weight = min(weight, _MAX_WEIGHT)
        self.is_observed = True
        if num_accepted:
            self.interval = _MIN_INTERVAL
        elif num_drafts == 1:
            self.interval = min(2 * self.interval, _MAX_INTERVAL)

    def note_proposal(self, is_found: bool) -> None:
        """Update the share."""
        self.share += _SHARE_GAIN * (is_found - self.share)

    def note_watched(self, token_ids: Sequence[int]) -> bool:
        """Compare the watched proposal with the tokens that came. Returns whether it is done."""
        for place, token in enumerate(self.watched, self.end):
            if place >= len(token_ids):
                return False
            if token_ids[place] != token:
                self.note(place - self.end + 1, place - self.end)
                self.watched = ()
                return True
        if self.watched:
            self.note(len(self.watched), len(self.watched))
            self.watched = ()
        return True


class DraftMode:
    """Decides whether steps have draft tokens, for a drafter that owns it.

    Args:
        max_draft_tokens: maximum number of draft tokens per row.
        costs: durations of steps.
        acceptance: the state of a request, created at its first use; None if the drafter never
            drafts for it.
        find: finds proposals that are only watched; None: they are too expensive, and trials take
            their place.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        costs: StepCosts,
        acceptance: Callable[[Request], Acceptance | None],
        find: Find | None,
    ) -> None:
        self._most, self.costs = max_draft_tokens, costs
        self._acceptance, self._find = acceptance, find
        self.reset()

    def reset(self) -> None:
        """Forget all observations."""
        self.first_rate, self.first_share = _FIRST_RATE, _FIRST_SHARE
        self._numbers = self._decision = _NO_DRAFTS
        self._bests: dict[tuple[int, int, int], int] = {}
        self._decided_for, self._num_left = (0, 0), 0  # steps for which the decision still holds
        self._step = 1, 0
        self._turn = 0
        # Trials: steps between two of them, steps since the last, and its accepted draft tokens
        # less the rejected ones.
        self._interval, self._num_waited, self._trial_score = _MIN_INTERVAL, 0, 0
        self._is_trial = False
        self._memory: dict[tuple[object, ...], tuple[int, ...]] = {}

    def wants_drafts(self, running: Sequence[Request], num_others: int) -> bool:
        """See :meth:`.DraftObserver.wants_drafts`."""
        if self._decide(running, num_others)[-1]:
            return True
        if self._find is not None:
            self._watch(running, self._find)
            return False
        return self._is_trial_due() and self._pays_if_right(len(running), num_others)

    def begin(self, requests: Sequence[Request], num_tokens: int, is_settled: bool) -> None:
        """See :meth:`.DraftObserver.begin`."""
        num_rows = len(requests)
        num_others = num_tokens - num_rows
        self._step = num_rows, num_others
        self._numbers = self._decide(requests, num_others) if is_settled else _NO_DRAFTS
        if not is_settled or not num_rows:
            return
        if self._numbers[-1]:
            self._interval, self._num_waited, self._is_trial = _MIN_INTERVAL, 0, False
        elif self._find is not None:
            self._watch(requests, self._find)
        elif self._is_trial_due() and self._pays_if_right(num_rows, num_others):
            self._num_waited, self._trial_score, self._is_trial = 0, 0, True
            self._numbers = (1,) * (NUM_RATES + 1)

    @property
    def num_if_right(self) -> int:
        """The number of draft tokens per row that pays in this step if all of them are right."""
        return self._best(*self._step, NUM_RATES)

    def number(self, request: Request, acceptance: Acceptance) -> int:
        """The number of draft tokens of a row of this step. A settled-only request is not
        pipelined, so it may also have some where the others have none."""
        level = int(acceptance.rate * NUM_RATES)
        most = self._numbers[level]
        if most:
            return most
        is_drafting = self._numbers[-1] > 0
        if request.settled_only and not is_drafting:
            most = self._best(*self._step, level)
        if most or not (is_drafting or request.settled_only) or not self.num_if_right:
            return most
        if self._find is not None:
            if is_drafting:  # otherwise it is watched already
                self._watch_one(request, acceptance, self._find)
            return 0
        return int(len(request.token_ids) - acceptance.end >= acceptance.interval)

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """A row with draft tokens was settled."""
        self._trial_score += 2 * num_accepted - num_drafts

    def note_end(self, acceptance: Acceptance) -> None:
        """A request has ended: update what is assumed of new ones."""
        if acceptance.is_observed:
            self.first_rate += _PRIOR_GAIN * (acceptance.rate - self.first_rate)
            self.first_share += _PRIOR_GAIN * (acceptance.share - self.first_share)

    # ------------------------------------------------------------------------------------------

    def _decide(self, requests: Sequence[Request], num_others: int) -> tuple[int, ...]:
        """The number of draft tokens by level of rate; zeros for a step without. With many rows
        the decision is kept for some steps."""
        num_rows = len(requests)
        many = num_rows // _ROWS_PER_DECISION
        decided_for = many or -num_rows, -(-num_others // _BUCKET)
        if self._num_left and decided_for == self._decided_for:
            self._num_left -= 1
            return self._decision
        self._decided_for = decided_for
        self._num_left = max(many, (_STEPS_PER_DECISION - 1) * (num_rows > 1))
        shares = [0.0] * (NUM_RATES + 1)  # by level of rate
        is_pipelined = False
        for request in requests:
            acceptance = request.drafts
            if not isinstance(acceptance, Acceptance):
                acceptance = self._acceptance(request)
                if acceptance is None:
                    is_pipelined = True
                    continue
            shares[int(acceptance.rate * NUM_RATES)] += acceptance.share
            is_pipelined |= not request.settled_only
        exposed_s = self.costs.exposed_s if is_pipelined else 0.0
        step = num_rows, num_others, self._most, exposed_s
        if num_rows > _MAX_REMEMBERED_ROWS:
            self._decision = choose_numbers(self.costs, shares, *step)
            return self._decision
        parts = [round(share * _SHARE_PARTS) for share in shares]
        key = (*step, *parts)
        decision = self._memory.get(key)
        if decision is None:
            shares = [part / _SHARE_PARTS for part in parts]
            decision = choose_numbers(self.costs, shares, *step)
            if len(self._memory) >= _MAX_ENTRIES:
                self._memory.clear()
            self._memory[key] = decision
        self._decision = decision
        return decision

    def _is_trial_due(self) -> bool:
        """Called once per step without draft tokens. After a trial whose draft tokens were mostly
        accepted, the next one follows at once."""
        if self._is_trial:
            self._is_trial = False
            is_rejected = self._trial_score <= 0
            self._interval = min(2 * self._interval, _MAX_INTERVAL) if is_rejected else 1
        self._num_waited += 1
        return self._num_waited >= self._interval

    def _watch(self, requests: Sequence[Request], find: Find) -> None:
        """Watch some of the requests, in turns, if draft tokens could pay."""
        num_rows = len(requests)
        if not num_rows or not self._pays_if_right(num_rows, 0):
            return
        num_watched = min(num_rows, _MAX_WATCHED)
        for i in range(self._turn, self._turn + num_watched):
            request = requests[i % num_rows]
            acceptance = self._acceptance(request)
            if acceptance is not None and not request.must_settle:  # it may have draft tokens
                self._watch_one(request, acceptance, find)
        self._turn = (self._turn + num_watched) % num_rows

    def _watch_one(self, request: Request, acceptance: Acceptance, find: Find) -> None:
        end = len(request.token_ids)
        if acceptance.end < end and acceptance.note_watched(request.token_ids):
            acceptance.watched = found = find(request, min(_WATCHED_LENGTH, self._most))
            acceptance.end = end
            acceptance.note_proposal(len(found) > 0)

    def _pays_if_right(self, num_rows: int, num_others: int) -> bool:
        return self._best(num_rows, num_others, NUM_RATES) > 0

    def _best(self, num_rows: int, num_others: int, level: int) -> int:
        """The number of draft tokens per row if all rows have this level of rate."""
        key = num_rows, -(-num_others // _BUCKET) * _BUCKET, level
        best = self._bests.get(key)
        if best is None:
            shares = [0.0] * (NUM_RATES + 1)
            shares[level] = num_rows = max(1, num_rows)
            best = choose_numbers(self.costs, shares, num_rows, key[1], self._most)[level]
            if len(self._bests) >= _MAX_ENTRIES:
                self._bests.clear()
            self._bests[key] = best
        return best
