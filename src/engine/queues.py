"""The waiting and the running queue, both in rank order, and the transitions between them.

A request that leaves the running queue releases its blocks at once or, if a step in flight still
writes them, when that step has settled. ``planner`` decides admission and preemption.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from .block_manager import BlockManager
from .policy import UNRANKED, Policy
from .request import Request, RequestState, by_rank
from .shares import Shares

_RUNNING = RequestState.RUNNING


class Queues:
    """Holds waiting and running requests, and those whose blocks cannot be released yet.

    Attributes:
        waiting, running: in rank order, oldest first.
        released: ids that left ``running`` since the last plan, for the next plan.
        draining: finished or paused requests whose blocks some step in flight still writes.
        pending: siblings by leader, while the leader has not computed the prompt yet (S40). They
            are in no queue, so that requests behind them do not wait for the prompt.
        shares: under the policy "fair", the owners' accounts, and the requests that had no turn
            yet; else None.
        num_preemptions: number of times that a running request lost its blocks to an older one or
            to a reset of the prefix cache.
        num_queried_tokens: tokens, at admission, of requests that read the prefix cache. Siblings
            do not count: their prompt is looked up once, for their leader.
        num_hit_tokens: how many of those tokens were found. The three counters only grow.
    """

    def __init__(self, blocks: BlockManager, policy: Policy) -> None:
        self.blocks = blocks
        self._policy = policy
        self._num_arrivals = 0
        self.num_preemptions = self.num_queried_tokens = self.num_hit_tokens = 0
        self.reset()

    def reset(self) -> None:
        """Empty the queues without releasing blocks; the counters keep their values."""
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.released: list[str] = []
        self.draining: set[Request] = set()
        self.pending: dict[Request, list[Request]] = {}
        self.shares = Shares(self._policy) if self._policy.is_fair else None

    def arrive(self, request: Request, siblings: Sequence[Request] = ()) -> None:
        """Rank a new request and queue it as waiting. Its siblings are ranked, and pending."""
        for arrival in (request, *siblings):
            arrival.seniority = self._num_arrivals
            self._num_arrivals += 1
            arrival.rank = self._policy.rank(arrival)
        for sibling in siblings:
            sibling.state = RequestState.PENDING
        if siblings:
            self.pending[request] = list(siblings)
        self.join_waiting(request)

    def join_waiting(self, request: Request) -> None:
        """Queue the request at its rank, or, before its turn, behind others of its owner. A paused
        request keeps its rank (S27)."""
        shares = self.shares
        if shares is not None and request.rank >= UNRANKED:
            request.state = RequestState.QUEUED
            shares.queue(request)
            self._take_turn(request.owner)
        else:
            self._wait(request)

    def _wait(self, request: Request) -> None:
        request.state = RequestState.WAITING
        insort(self.waiting, request, key=by_rank)
        if self.shares is not None:
            self.shares.note_waiting(request, 1)

    def _take_turn(self, owner: str) -> None:
        """Give an owner's next request its turn, so that an owner with requests has one waiting
        (S53)."""
        if self.shares is not None:
            request = self.shares.take_turn(owner)
            if request is not None:
                self.shares.give_ranks((request, *self.pending.get(request, ())))
                self._wait(request)

    def release_siblings(self, leader: Request) -> None:
        """Move siblings to the waiting queue, when the prompt is computed or its leader left."""
        num_prompt_blocks = leader.num_prompt_tokens // self.blocks.block_size
        for sibling in self.pending.pop(leader, ()):
            sibling.block_keys = leader.block_keys[:num_prompt_blocks]  # hashed once for all
            self.join_waiting(sibling)

    def admit(self, request: Request, position: int, num_tokens: int) -> None:
        """Move the oldest waiting request to its place in rank order among the running ones.
        ``num_tokens``: the number of its tokens whose KV is already in its blocks."""
        assert self.waiting[0] is request
        self.waiting.pop(0)
        self.running.insert(position, request)
        request.state = _RUNNING
        request.num_computed = request.num_dispatched = num_tokens
        request.num_admissions += 1
        if request.num_admissions == 1:
            request.num_cached_tokens = num_tokens
        is_looked_up = self.blocks.enable_prefix_caching and request.reads_cache
        if is_looked_up and request.leader is None:
            self.num_queried_tokens += len(request.token_ids)
            self.num_hit_tokens += num_tokens
        self.set_next_event(request)
        if self.shares is not None:
            self.shares.note_waiting(request, -1)
            self.shares.note_admission(request)
            self._take_turn(request.owner)

    def preempt(self, request: Request) -> None:
        """Take the blocks of a running request that has nothing in flight; it keeps its outputs,
        seed and rank (S20)."""
        self.withdraw(request, RequestState.WAITING)
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._wait(request)

    def withdraw(self, request: Request, state: RequestState) -> None:
        """Take ``request`` out of its queue into ``state``. Its blocks are released now, or when
        the last step that writes them settles (S28)."""
        if self.shares is not None and state is RequestState.FINISHED:
            self.shares.settle_charge(request)
        queue = {_RUNNING: self.running, RequestState.WAITING: self.waiting}.get(request.state)
        if queue is not None:
            del queue[bisect_left(queue, request.rank, key=by_rank)]
        if self.shares is not None:
            if queue is self.waiting:
                self.shares.note_waiting(request, -1)
            elif request.state is RequestState.QUEUED:
                self.shares.unqueue(request)
        if queue is self.running:
            self.released.append(request.request_id)
        if self.pending and state is not RequestState.WAITING:
            self._leave_group(request)
        if state is not RequestState.WAITING:
            self._take_turn(request.owner)
        request.state = state
        request.next_event = 0
        if request.num_in_flight:
            self.draining.add(request)
        else:
            self._give_back(request)

    def _leave_group(self, request: Request) -> None:
        if request.state is RequestState.PENDING:
            assert request.leader is not None
            siblings = self.pending[request.leader]
            siblings.remove(request)
            if not siblings:
                del self.pending[request.leader]
        self.release_siblings(request)

    def end_drain(self, request: Request) -> None:
        """Release the blocks of a draining request if its last step in flight has settled."""
        if not request.num_in_flight:
            self.draining.discard(request)
            self._give_back(request)

    def set_next_event(self, request: Request) -> None:
        """Set the smallest ``num_computed`` at which commit does more than append."""
        next_event = 0
        if request.on_token is None and request not in self.pending:
            next_event = request.max_num_tokens - 1
            if self.blocks.enable_prefix_caching:
                next_full = (request.num_published + 1) * self.blocks.block_size
                next_event = min(next_event, next_full)
            if self.blocks.states is not None:
                next_past = (request.num_past_states + 1) * self.blocks.states.interval + 1
                next_event = min(next_event, next_past)
        request.next_event = next_event

    def _give_back(self, request: Request) -> None:
        self.blocks.release(request)
        request.num_computed = request.num_dispatched = 0
