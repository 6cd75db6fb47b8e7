"""The scheduler: owns the requests and the block pool, plans steps and settles them.

``schedule`` (dispatch) and ``commit`` (settle) are separate: up to ``pipeline_depth`` earlier
steps may be unsettled when the next one is scheduled. Requests have no prefill or decode phase; a
row of a plan is a range of positions. All ordering uses ``Request.rank``. ``planner`` decides a
step; ``queues`` hold waiting and running requests. Everything irreversible (tokens, publishing,
finishing, releasing blocks) happens in ``commit``.

The module imports no torch: the scheduler runs, and is checked, without a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import InvalidInputError
from .block_manager import BlockManager
from .config import check_sizes
from .plan import InFlightStep, StepPlan
from .planner import PlanAccount, Planner
from .policy import Policy
from .queues import Queues
from .request import Request, RequestState
from .runner import Drafter, DraftObserver
from .segments import check_segments

_RUNNING = RequestState.RUNNING
DEAD_END = "allowed_token_ids, bad_words and min_tokens leave no token to sample"
# The token id that samplers return for a row without a finite logit (kernels/sampling/sampler.py).
_TOKEN_WITHOUT_LOGITS = 0
_NO_FAILURES: Final[Mapping[str, tuple[int, str]]] = {}


class DraftCounts:
    """Cumulative counts of draft tokens of settled rows.

    Attributes:
        num_drafts: number of rows with draft tokens.
        num_draft_tokens, num_accepted_tokens: their draft tokens, and those accepted among them.
        accepted_per_position: number of accepted draft tokens by their place in the draft.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_position = [0] * (0 if drafter is None else drafter.max_draft_tokens)

    @property
    def num_rejected_tokens(self) -> int:
        return self.num_draft_tokens - self.num_accepted_tokens

    def copied(self) -> dict[str, Any]:
        """The counts now, by attribute."""
        return {**vars(self), "accepted_per_position": list(self.accepted_per_position)}

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count one row."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_per_position[place] += 1


class Scheduler:
    """Owns the requests and the block pool.

    Args:
        blocks: the block pool.
        max_num_seqs: maximum number of running requests.
        max_num_batched_tokens: token budget of a step; at least ``max_num_seqs``, so that every
            running request can decode one token.
        pipeline_depth: number of unsettled steps allowed when the next one is scheduled.
        policy: the order of service.
        drafter: proposes draft tokens for rows that sample after settled tokens; None: no draft
            tokens.

    Attributes:
        max_num_samples: maximum number of samples of a step with draft tokens (S63); None: no
            limit. The engine sets the runner's.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pipeline_depth: int = 0,
        policy: Policy | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise InvalidInputError("max_num_seqs", max_num_seqs, "must be 1 or more")
        num_state_slots = None if blocks.states is None else blocks.states.num_slots
        check_sizes(max_num_seqs, max_num_batched_tokens, num_state_slots)
        self.blocks = blocks
        self.drafter = drafter
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pipeline_depth = pipeline_depth
        self.policy = policy or Policy()
        self.requests: dict[str, Request] = {}  # live: waiting, running or paused
        self.queues = Queues(blocks, self.policy)
        self.in_flight: deque[InFlightStep] = deque()
        self.last_steps: deque[InFlightStep] = deque(maxlen=2)  # the newest dispatched comes last
        # Why requests ended with "error" in a commit, by request id; the engine clears it.
        self.failures: dict[str, str] = {}
        self.num_steps = 0
        self.max_num_samples: int | None = None
        self.last_budget = max_num_batched_tokens  # of the newest dispatched step
        self.draft_counts = DraftCounts(drafter)
        # Of the newest settled step, unless it was decode-only: (id, draft tokens accepted) of each
        # row with draft tokens.
        self.last_accepted: list[tuple[str, int]] = []
        self.account: PlanAccount | None = None  # reasons for each plan, in traced runs

    @property
    def has_work(self) -> bool:
        """Whether some request is waiting or running, or some step is in flight."""
        return bool(self.queues.running or self.queues.waiting or self.in_flight)

    # The life cycle of a request --------------------------------------------------------------

    def add(self, request: Request, siblings: Sequence[Request] = ()) -> None:
        """Append ``request`` to the waiting requests.

        Args:
            siblings: other continuations of its prompt (:meth:`.Request.sibling`), each a separate
                request. A sibling waits once ``request`` has computed the prompt.

        Raises:
            InvalidInputError: an id is in use; the segments do not cover the prompt (S59); the
                prompt leaves no space for an output; or the request exceeds the whole pool (S30).
                Nothing was changed.
        """
        arrivals = (request, *siblings)
        for arrival in arrivals:
            if arrival.request_id in self.requests:
                raise InvalidInputError("request_id", arrival.request_id, "is in use")
        if not 1 <= request.num_prompt_tokens < request.max_num_tokens:
            limit = f"must have 1 to {request.max_num_tokens - 1} tokens"
            raise InvalidInputError("prompt", f"{request.num_prompt_tokens} tokens", limit)
        check_segments(request.info.segments, request.num_prompt_tokens)
        # The last token is sampled but never fed back, so its KV needs no slot.
        num_blocks = self.blocks.num_blocks_for(request.max_num_tokens - 1)
        if num_blocks > self.blocks.num_blocks:
            limit = (
                f"needs {num_blocks} KV blocks of {self.blocks.block_size} tokens, "
                f"the pool has num_blocks = {self.blocks.num_blocks}"
            )
            raise InvalidInputError("prompt + max_tokens", request.max_num_tokens, limit)
        for arrival in arrivals:
            self.requests[arrival.request_id] = arrival
        self.queues.arrive(request, siblings)

    def abort(self, request_id: str, reason: str = "abort") -> Request | None:
        """End a request in any state and return it; None if it is unknown or finished."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, reason)
        return request

    def pause(self, request_id: str) -> None:
        """Take a request out of service until ``resume``. Steps in flight still settle; then its
        blocks are released, so that a paused request never blocks others."""
        request = self._live(request_id)
        if request.state is not RequestState.PAUSED:
            self.queues.withdraw(request, RequestState.PAUSED)

    def resume(self, request_id: str) -> None:
        """Return a paused request to the waiting queue at its unchanged rank (S27)."""
        request = self._live(request_id)
        if request.state is RequestState.PAUSED:
            self.queues.join_waiting(request)

    # Dispatch ---------------------------------------------------------------------------------

    def schedule(self, budget: int | None = None) -> StepPlan:
        """Decide the next step. A plan without rows means that nothing can be computed now; it is
        not in flight and must not be committed. The plan depends only on the state and ``budget``
        (S31).

        Args:
            budget: token budget of this step, from the number of running requests (one token each)
                to ``max_num_batched_tokens``; None: ``max_num_batched_tokens`` (S18).
        """
        if budget is None:
            budget = self.max_num_batched_tokens
        elif not max(1, len(self.queues.running)) <= budget <= self.max_num_batched_tokens:
            limit = f"{max(1, len(self.queues.running))} to {self.max_num_batched_tokens}"
            raise ValueError(f"budget = {budget}: must be {limit} tokens")
        if len(self.in_flight) > self.pipeline_depth:
            raise RuntimeError(f"{len(self.in_flight)} steps are in flight; commit one first")
        step = Planner(
            self.queues,
            self.max_num_seqs,
            budget,
            self.num_steps,
            self.in_flight,
            self.last_steps,
            self.drafter,
            self.account,
            self.max_num_samples,
        ).plan()
        if step.requests:
            self.last_budget = budget
            self.num_steps += 1
            self.in_flight.append(step)
            self.last_steps.append(step)
            self.queues.released.clear()
        return step.plan

    def should_settle_first(self) -> bool:
        """Whether the engine should settle the steps in flight before it schedules, so that all
        requests may have draft tokens in one step. Requests whose draft tokens are in flight have
        no row before they are settled (S42), and would alternate with the others.

        Called while a step is in flight, at most once per step. The plan itself does not depend on
        it: steps may be settled at any time.
        """
        drafter = self.drafter
        if drafter is None:
            return False
        plan, requests = self.in_flight[-1]
        if plan.wanted_drafts:  # tokens that are drafted there are of use only in the next row
            return True
        if plan.has_drafts and any(r.waits_for_samples and not r.settled_only for r in requests):
            return True
        if not isinstance(drafter, DraftObserver):
            return True  # it proposes in each step
        num_others = 0 if plan.is_decode_only else plan.total_num_tokens - plan.num_sampled
        return drafter.wants_drafts(self.queues.running, num_others)

    # Settle -----------------------------------------------------------------------------------

    def commit(
        self,
        plan: StepPlan,
        token_ids: Sequence[int],
        failing: Mapping[str, tuple[int, str]] = _NO_FAILURES,
    ) -> list[Request]:
        """Settle the oldest step in flight: count its positions as computed, append its tokens,
        publish full blocks, apply stop conditions, release blocks. For a row with draft tokens,
        take the accepted prefix of its samples, up to the end of the request.

        Args:
            plan: the oldest plan that ``schedule`` returned and that was not committed.
            token_ids: the samples of the step, ``num_samples`` per row, concatenated in row order.
            failing: (index in its row, at least 1; reason) of samples after draft tokens that
                failed, by request id. A request that reaches the sample ends there with "error".

        Returns:
            The requests that finished.

        Raises:
            ValueError: ``plan`` is not the oldest, or the count is wrong; nothing was changed.
        """
        if not self.in_flight or self.in_flight[0].plan is not plan:
            raise ValueError(f"step {plan.step} is not the oldest step in flight")
        if len(token_ids) != plan.num_sampled:
            raise ValueError(f"{len(token_ids)} tokens for {plan.num_sampled} samples")
        step = self.in_flight.popleft()
        finished: list[Request] = []
        if plan.is_decode_only:
            for request, token in zip(step.requests, token_ids, strict=True):
                num_computed = request.num_computed + 1
                if num_computed < request.next_event and token not in request.stop_token_ids:
                    request.num_computed = num_computed
                    request.token_ids.append(token)
                else:
                    self._settle(request, 1, token, finished)
            return finished
        self.last_accepted = []
        if plan.has_drafts:
            self._commit_drafts(step, token_ids, failing, finished)
            return finished
        tokens = iter(token_ids)
        for request, _, num_tokens, num_samples in step.rows():
            self._settle(request, num_tokens, next(tokens) if num_samples else None, finished)
        return finished

    def _commit_drafts(
        self,
        step: InFlightStep,
        token_ids: Sequence[int],
        failing: Mapping[str, tuple[int, str]],
        finished: list[Request],
    ) -> None:
        """Settle a step with draft tokens. They are counted only here: each accepted one adds one
        to all three counters of its request. With recurrent layers it adds one to ``num_total``
        only, because the state behind it was not kept: the next row computes it again."""
        rows = zip(step.rows(), step.plan.accepted(token_ids), strict=True)
        has_states = self.blocks.states is not None
        for (request, _, num_tokens, num_samples), tokens in rows:
            if num_samples < 2:
                self._settle(request, num_tokens, tokens[0] if tokens else None, finished)
                continue
            request.waits_for_samples = request.settled_only
            num_accepted = len(tokens) - 1
            num_computed = request.num_computed + num_tokens - num_samples + 1 + num_accepted
            if (
                num_computed < request.next_event
                and not (failing or has_states or request.info.edits is not None)
                and request.stop_token_ids.isdisjoint(tokens)
            ):  # the most common row first: tokens are appended
                request.num_computed = num_computed
                request.num_dispatched += num_accepted
                request.num_total += num_accepted
                request.token_ids += tokens
                self.last_accepted.append((request.request_id, num_accepted))
                self._note_drafts(request, num_samples - 1, num_accepted)
                continue
            num_known = len(request.token_ids)
            failed, failure = failing.get(request.request_id, (num_samples, ""))
            if failed >= len(tokens):
                failure = ""  # of a sample that is not accepted
            num_own = num_tokens - num_samples + 1
            self._settle(request, num_own, tokens[0], finished, tokens[1:failed], failure)
            num_accepted = max(0, len(request.token_ids) - num_known - 1)
            self.last_accepted.append((request.request_id, num_accepted))
            if num_known < len(request.token_ids):  # otherwise it had ended before
                self._note_drafts(request, num_samples - 1, num_accepted)

    def offer_drafts(self, step: InFlightStep, drafts: Mapping[str, Sequence[int]]) -> None:
        """Give the drafter the tokens that the runner drafted in a step, just committed.

        Args:
            drafts: by request id. Those of finished requests are dropped.
        """
        if isinstance(self.drafter, DraftObserver):
            for request in step.requests:
                if request.request_id in drafts and request.state is not RequestState.FINISHED:
                    self.drafter.offer(request, drafts[request.request_id])

    def _note_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.draft_counts.add(num_drafts, num_accepted)
        request.num_drafted += num_drafts
        request.num_accepted += num_accepted
        if isinstance(self.drafter, DraftObserver):
            self.drafter.note(request, num_drafts, num_accepted)

    def _settle(
        self,
        request: Request,
        num_tokens: int,
        token: int | None,
        finished: list[Request],
        more: Sequence[int] = (),
        failure: str = "",
    ) -> None:
        """Args:
        num_tokens: positions computed, without draft tokens.
        more: samples after the first, which accepted draft tokens precede.
        failure: why the sample after these failed; empty if it did not.
        """
        request.num_computed += num_tokens
        if self.queues.pending and request.num_computed >= request.num_prompt_tokens:
            self.queues.release_siblings(request)
        if request.state is not RequestState.FINISHED:
            if token is not None:
                request.token_ids.append(token)
            if more or failure:
                reason = self._take_more(request, more, failure)
                self.blocks.publish(request)
            else:
                self.blocks.publish(request)
                reason = None if token is None else self._stop_reason(request, token)
            if reason is not None:
                self._finish(request, reason)
                finished.append(request)
            elif request.state is _RUNNING:
                self.queues.set_next_event(request)
        draining = self.queues.draining
        if draining and request in draining:
            self.queues.end_drain(request)

    def _take_more(self, request: Request, more: Sequence[int], failure: str) -> str | None:
        """Append the samples that follow accepted draft tokens until the request ends. Returns the
        reason if it ends. ``failure``: see :meth:`_settle`."""
        reason = self._stop_reason(request, request.token_ids[-1])
        num_computed = 1 if self.blocks.states is None else 0
        for token in more:
            if reason is not None:
                break
            if is_dead_end(request, token):
                failure = DEAD_END
                break
            request.num_computed += num_computed
            request.num_dispatched += num_computed
            request.num_total += 1
            request.token_ids.append(token)
            reason = self._stop_reason(request, token)
        if failure and reason is None:
            self.failures[request.request_id] = failure
            return "error"
        return reason

    def _stop_reason(self, request: Request, token: int) -> str | None:
        """The reason to stop. A stop token takes precedence over a stop string, and a stop string
        over the length limit (S25). "error" if the text of the token cannot be read."""
        if token in request.stop_token_ids:
            return "stop"
        if request.on_token is not None:
            try:
                if request.on_token(token):
                    return "stop"
            except Exception as error:
                self.failures[request.request_id] = f"its text could not be read: {error}"
                return "error"
        return "length" if len(request.token_ids) >= request.max_num_tokens else None

    # Reset of the prefix cache ----------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Reset the pool to its initial state: no block is owned or cached, so that KV computed
        under other weights is never read again (S41). Running requests are preempted: they wait at
        their ranks and recompute all their tokens.

        Raises:
            RuntimeError: steps are in flight and would settle into the pool; nothing was changed.
        """
        if self.in_flight:
            raise RuntimeError(f"{len(self.in_flight)} steps are in flight; commit them first")
        for request in reversed(self.queues.running.copy()):
            self.queues.preempt(request)
        self.blocks.reset()

    # Failure ----------------------------------------------------------------------------------

    def reset(self, reason: str) -> None:
        """End every live request with ``reason``, discard the steps in flight, and empty the pool
        with its prefix cache: blocks that a failed step wrote are never found again (S37).

        It only assumes that every request without a ``finish_reason`` is in ``requests``. So it is
        safe after an interrupt anywhere, including in ``reset``."""
        for request in (*self.requests.values(), *self.queues.draining):
            request.state = RequestState.FINISHED
            request.finish_reason = request.finish_reason or reason
            request.block_table, request.state_table = [], []
            request.num_slots = request.num_published = request.num_past_states = 0
            request.num_computed = request.num_dispatched = request.next_event = 0
        self.blocks.reset()
        self.queues.reset()
        self.in_flight = deque()
        self.last_steps = deque(maxlen=2)  # the runner discards its own as well
        self.requests = {}
        self.failures = {}
        if isinstance(self.drafter, DraftObserver):
            self.drafter.reset()

    # ------------------------------------------------------------------------------------------

    def _live(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise InvalidInputError("request_id", request_id, "is not a live request")
        return request

    def _finish(self, request: Request, reason: str) -> None:
        self.queues.withdraw(request, RequestState.FINISHED)
        request.finish_reason = reason
        del self.requests[request.request_id]
        if isinstance(self.drafter, DraftObserver):
            self.drafter.end(request)


def dead_ends(step: InFlightStep, token_ids: Sequence[int]) -> dict[str, str]:
    """Requests of a step that cannot continue, with the reason by request id. Their first
    sample is a token that their edits ban. Called just before the step is committed; ``commit``
    checks further samples.

    Completed sequences of ``bad_words`` are known only after sampling. Logits are not read.

    Args:
        token_ids: the samples of the step, concatenated in row order.
    """
    if _TOKEN_WITHOUT_LOGITS not in token_ids:
        return {}
    found: dict[str, str] = {}
    place = 0
    for request, num_samples in zip(step.requests, step.plan.num_samples, strict=True):
        if num_samples and is_dead_end(request, token_ids[place]):
            found[request.request_id] = DEAD_END
        place += num_samples
    return found


def is_dead_end(request: Request, token_id: int) -> bool:
    """Whether a sample after the settled tokens of ``request`` is banned by its edits."""
    edits = request.info.edits
    if token_id != _TOKEN_WITHOUT_LOGITS or edits is None:
        return False
    return edits.bans(token_id, request.output_token_ids)
