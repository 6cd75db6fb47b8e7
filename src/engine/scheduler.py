"""The scheduler: owns the requests and the pool, plans steps and settles them.

``schedule`` (dispatch) and ``commit`` (settle) are separate: up to ``pipeline_depth`` earlier
steps may be unsettled when the next is scheduled. Requests have no phases; a row of a plan is a
range of positions. All order comes from ``Request.rank``. ``planner`` decides a
step, ``queues`` hold waiting and running requests. Everything irreversible (tokens, publishing,
finishing, giving blocks back) happens in ``commit``.

No torch here: the scheduler runs, and is checked, without a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..errors import InvalidInputError
from .block_manager import BlockManager
from .config import check_sizes
from .plan import InFlightStep, StepPlan
from .planner import PlanAccount, Planner
from .policy import Policy
from .queues import Queues
from .request import Request, RequestState
from .runner import Drafter
from .segments import check_segments

_RUNNING = RequestState.RUNNING
DEAD_END = "allowed_token_ids, bad_words and min_tokens leave no token to sample"
# What samplers give for a row without a finite logit (kernels/sampling/sampler.py).
_OF_NONE = 0


class Scheduler:
    """Owns the requests and the block pool.

    Args:
        blocks: the pool.
        max_num_seqs: cap on the running set.
        max_num_batched_tokens: token budget of a step; at least ``max_num_seqs``, so that every
            running decode has its token.
        pipeline_depth: unsettled steps allowed when the next one is scheduled.
        policy: order of service.
        drafter: offers draft tokens for rows of settled-only requests; None: no row has any.
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
        if drafter is not None and blocks.states is not None:
            limit = "must be None for a model with recurrent layers"
            raise InvalidInputError("drafter", drafter, limit)
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
        self.failures: dict[str, str] = {}  # why on_token raised, by id; the engine clears them
        self.num_steps = 0
        self.last_budget = max_num_batched_tokens  # of the newest dispatched step
        # Of the newest settled step, unless it was decode-only: (id, draft tokens accepted) of each
        # row with draft tokens.
        self.last_accepted: list[tuple[str, int]] = []
        self.account: PlanAccount | None = None  # of each plan, where a run is traced

    @property
    def has_work(self) -> bool:
        """Whether some request is waiting or running, or some step is in flight."""
        return bool(self.queues.running or self.queues.waiting or self.in_flight)

    # The life of a request --------------------------------------------------------------------

    def add(self, request: Request, siblings: Sequence[Request] = ()) -> None:
        """Admit ``request`` to the waiting ones.

        Args:
            siblings: other continuations of its prompt (:meth:`.Request.sibling`), each a request
                of its own, which wait once it has computed that.

        Raises:
            InvalidInputError: an id is in use; the segments are not the prompt (S59); the prompt
                leaves no room for an output; or the request exceeds the whole pool (S30). Nothing
                was changed.
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
            if self.drafter is not None and self.drafter.serves(arrival):
                arrival.settled_only = True  # draft tokens follow settled ones alone
        for arrival in arrivals:
            self.requests[arrival.request_id] = arrival
        self.queues.arrive(request, siblings)

    def abort(self, request_id: str, reason: str = "abort") -> Request | None:
        """End a request, whatever it is doing, and return it. Unknown or finished: no-op, None."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, reason)
        return request

    def pause(self, request_id: str) -> None:
        """Take a request out of service until ``resume``. What is in flight still settles; then
        its blocks are given back, so that a paused request never keeps others from theirs."""
        request = self._live(request_id)
        if request.state is not RequestState.PAUSED:
            self.queues.withdraw(request, RequestState.PAUSED)

    def resume(self, request_id: str) -> None:
        """Put a paused request back in its place: its rank is what it was (S27)."""
        request = self._live(request_id)
        if request.state is RequestState.PAUSED:
            self.queues.join_waiting(request)

    # Dispatch ---------------------------------------------------------------------------------

    def schedule(self, budget: int | None = None) -> StepPlan:
        """Decide the next step. A plan without rows means that nothing can be computed now (it
        is not in flight and must not be committed). Deterministic in the state and ``budget``
        (S31).

        Args:
            budget: tokens that this step may compute, from the number of running requests, so that
                each could have one, to ``max_num_batched_tokens``; None: as many as these (S18).
        """
        if budget is None:
            budget = self.max_num_batched_tokens
        elif not max(1, len(self.queues.running)) <= budget <= self.max_num_batched_tokens:
            limit = f"{max(1, len(self.queues.running))} to {self.max_num_batched_tokens}"
            raise ValueError(f"a budget of {budget} tokens must be of {limit}")
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
        ).plan()
        if step.requests:
            self.last_budget = budget
            self.num_steps += 1
            self.in_flight.append(step)
            self.last_steps.append(step)
            self.queues.released.clear()
        return step.plan

    # Settle -----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, token_ids: Sequence[int]) -> list[Request]:
        """Settle the oldest step in flight: count its positions as computed, append its tokens,
        publish full blocks, apply stop conditions, give blocks back. Of a row with draft tokens a
        prefix of the samples is taken: those accepted, up to the end of the request.

        Args:
            plan: the oldest plan that ``schedule`` returned and that was not committed.
            token_ids: the samples of the step, ``num_samples`` of each row, row after row.

        Returns:
            The requests that finished.

        Raises:
            ValueError: another plan is older, or the count is wrong; nothing was changed.
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
            self._commit_drafts(step, token_ids, finished)
            return finished
        tokens = iter(token_ids)
        for request, _, num_tokens, num_samples in step.rows():
            self._settle(request, num_tokens, next(tokens) if num_samples else None, finished)
        return finished

    def _commit_drafts(
        self, step: InFlightStep, token_ids: Sequence[int], finished: list[Request]
    ) -> None:
        """Draft tokens are counted nowhere before this: each that is accepted adds one to all
        three counters of its request."""
        rows = zip(step.rows(), step.plan.accepted(token_ids), strict=True)
        for (request, _, num_tokens, num_samples), tokens in rows:
            if num_samples < 2:
                self._settle(request, num_tokens, tokens[0] if tokens else None, finished)
                continue
            num_known = len(request.token_ids)
            self._settle(request, num_tokens - num_samples + 1, tokens[0], finished, tokens[1:])
            num_accepted = max(0, len(request.token_ids) - num_known - 1)
            self.last_accepted.append((request.request_id, num_accepted))

    def _settle(
        self,
        request: Request,
        num_tokens: int,
        token: int | None,
        finished: list[Request],
        more: Sequence[int] = (),
    ) -> None:
        """``num_tokens``: without draft tokens. ``more``: samples behind accepted ones."""
        request.num_computed += num_tokens
        if self.queues.pending and request.num_computed >= request.num_prompt_tokens:
            self.queues.release_siblings(request)
        if request.state is not RequestState.FINISHED:
            if token is not None:
                request.token_ids.append(token)
            if more:
                reason = self._take_more(request, more)
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

    def _take_more(self, request: Request, more: Sequence[int]) -> str | None:
        """Append the samples behind accepted draft tokens, as far as the request goes on; returns
        why it ends."""
        reason = self._stop_reason(request, request.token_ids[-1])
        for token in more:
            if reason is not None:
                break
            if is_dead_end(request, token):
                self.failures[request.request_id] = DEAD_END
            request.num_computed += 1
            request.num_dispatched += 1
            request.num_total += 1
            request.token_ids.append(token)
            reason = self._stop_reason(request, token)
        return reason

    def _stop_reason(self, request: Request, token: int) -> str | None:
        """Stop token before stop string before length (S25)."""
        if token in request.stop_token_ids:
            return "stop"
        if request.on_token is not None:
            try:
                if request.on_token(token):
                    return "stop"
            except Exception as error:
                self.failures[request.request_id] = f"its text could not be read: {error}"
        return "length" if len(request.token_ids) >= request.max_num_tokens else None

    # Reset of the prefix cache ----------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Make the pool as it was at the start: no block is owned or cached, so that nothing is
        read again that was computed under other weights (S41). Running requests are preempted:
        they wait at their ranks, and compute all their tokens afresh.

        Raises:
            RuntimeError: steps are in flight, which would settle into it; nothing was changed.
        """
        if self.in_flight:
            raise RuntimeError(f"{len(self.in_flight)} steps are in flight; commit them first")
        for request in reversed(self.queues.running.copy()):
            self.queues.preempt(request)
        self.blocks.reset()

    # Failure ----------------------------------------------------------------------------------

    def reset(self, reason: str) -> None:
        """End every live request with ``reason``, forget the steps in flight, and empty the pool
        with its prefix cache: blocks that a failed step wrote are never found again (S37).

        It assumes only that a request with no ``finish_reason`` is in ``requests``. So it is safe
        after an interrupt anywhere, also in ``reset``."""
        for request in (*self.requests.values(), *self.queues.draining):
            request.state = RequestState.FINISHED
            request.finish_reason = request.finish_reason or reason
            request.block_table, request.state_table = [], []
            request.num_slots = request.num_published = request.num_past_states = 0
            request.num_computed = request.num_dispatched = request.next_event = 0
        self.blocks.reset()
        self.queues.reset()
        self.in_flight = deque()
        self.last_steps = deque(maxlen=2)  # the runner forgets them too
        self.requests = {}
        self.failures = {}

    # ------------------------------------------------------------------------------------------

    def _live(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise InvalidInputError("request_id", request_id, "is no live request")
        return request

    def _finish(self, request: Request, reason: str) -> None:
        self.queues.withdraw(request, RequestState.FINISHED)
        request.finish_reason = reason
        del self.requests[request.request_id]


def dead_ends(step: InFlightStep, token_ids: Sequence[int]) -> dict[str, str]:
    """Why requests of a step cannot go on, by their ids: their first sample is a token that their
    edits ban. Called just before the step is committed; the scheduler sees to further samples.

    Completed sequences of ``bad_words`` are known only after sampling. Logits are not read.

    Args:
        token_ids: the samples of the step, row after row.
    """
    if _OF_NONE not in token_ids:
        return {}
    found: dict[str, str] = {}
    place = 0
    for request, num_samples in zip(step.requests, step.plan.num_samples, strict=True):
        if num_samples and is_dead_end(request, token_ids[place]):
            found[request.request_id] = DEAD_END
        place += num_samples
    return found


def is_dead_end(request: Request, token_id: int) -> bool:
    """Whether a sample behind the settled tokens of ``request`` is one that its edits ban."""
    edits = request.info.edits
    if token_id != _OF_NONE or edits is None:
        return False
    return edits.bans(token_id, request.output_token_ids)
