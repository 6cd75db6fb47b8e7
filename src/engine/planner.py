"""Plans one step: continuous batching with chunked prefill, a single walk in rank order.

The rules, with the properties of ``spec/README.md`` they serve:

* While an older request is short of blocks, no younger one allocates any in that step, and none is
  admitted behind a blocked one (L1).
* A request that needs a block when none is available preempts the youngest requests, and only those
  whose release makes blocks available (S21). Being younger, they are not rows yet.
* A victim gives its blocks back only once none of its tokens is in flight; until then it is held
  out of the plan, so that it drains (S28).
* One token of the budget is kept for every running decode, so that a long prompt never stalls
  them (L6); a prompt is admitted only when blocks for all its present tokens are available.
* Under the policy "fair" a waiting request may take the place of a younger running one of another
  owner, where the running ones are ``max_num_seqs``: this is what bounds its wait for a slot.
* Of a settled-only request no token is computed that is not settled: it is left out of steps until
  then, and the others are not (S42).
* A sibling shares the blocks of an older one that has computed the prompt. It gets a copy of the
  block that the shared tokens fill in part (S33). States are not copied: with recurrent layers it
  is admitted as any request.
* After the walk, rows of settled-only requests may carry draft tokens: with the tokens of the
  budget and the blocks that are left, and with no block where a request is short of some (S56).
* With recurrent layers a request is admitted only when there is a state slot for it alone. None is
  preempted for a slot: steps in flight give slots back, and each running request keeps one.

A traced run has a :class:`PlanAccount`, in which each decision that leaves a request without a row
writes its reason. The reasons are those of ``spec/state.py`` (``REFUSALS``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from .block_manager import BlockManager
from .plan import Blocks, InFlightStep, StepPlan, row_token_ids
from .queues import Queues
from .request import Request, RequestInfo, RequestState, by_rank
from .runner import Drafter
from .state_slots import StateSlots


@dataclass(slots=True)
class PlanAccount:
    """Why the latest plan is what it is; each plan overwrites it.

    Attributes:
        askers: per preempted request of the plan, in order, the id of the request it was preempted
            for.
        refused: (id, reason) of requests without a row, in rank order. Of the waiting requests only
            the oldest refused is named: those behind it wait because it does.
        num_evicted: cached blocks that were evicted for this step.
    """

    askers: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    num_evicted: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Planner:
    """The draft of one step. Used once: ``plan()``.

    Args, in order:
        queues: their requests are served, admitted and preempted.
        max_num_seqs: cap on the running set. max_num_batched_tokens: token budget of the step.
        step: its number.
        in_flight: dispatched and not settled, oldest first.
        last_steps: the one or two newest dispatched, settled or not; the newest comes last.
        drafter: offers draft tokens; None: no row has any.
        account: to be overwritten with the reasons of the plan; None: reasons are not kept.

    Rows of one sampled token are the rule, so only the exceptions are written down a row at a
    time; ``_freeze`` fills in the rest.
    """

    _queues: Queues
    _max_num_seqs: int
    _max_num_batched_tokens: int
    _step: int
    _in_flight: deque[InFlightStep]
    _last_steps: Sequence[InFlightStep]
    _drafter: Drafter | None = None
    _account: PlanAccount | None = None
    _blocks: BlockManager = field(init=False)
    _running: list[Request] = field(init=False)
    _drafts: dict[int, tuple[int, ...]] = field(init=False, default_factory=dict)
    _requests: list[Request] = field(init=False, default_factory=list)
    _starts: list[int] = field(init=False, default_factory=list)
    # Numbers of tokens and of samples.
    _unusual_rows: dict[int, tuple[int, int]] = field(init=False, default_factory=dict)
    _num_extra_tokens: int = 0
    # Blocks are taken, and requests admitted, for the row that is written next.
    _admitted_rows: list[int] = field(init=False, default_factory=list)
    _new_blocks: dict[int, Blocks] = field(init=False, default_factory=dict)
    _new_state_slots: dict[int, tuple[int, ...]] = field(init=False, default_factory=dict)
    _copies: list[tuple[int, int]] = field(init=False, default_factory=list)
    _preempted: list[Request] = field(init=False, default_factory=list)
    # Victims with tokens in flight: kept out of the plan until they have drained.
    _held: set[Request] = field(init=False, default_factory=set)
    # An older request is short of blocks, so younger ones may not allocate in this step.
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._blocks, self._running = self._queues.blocks, self._queues.running

    def plan(self) -> InFlightStep:
        """Walk, moving requests between the queues and blocks into tables; return the plan with
        its rows' requests."""
        account, running, index = self._account, self._running, self._blocks.index
        if account is not None:
            account.askers, account.refused, account.num_evicted = [], [], len(index)
        position = 0
        head = self._next_waiting()
        while head is not None:
            end = len(running)
            if end and running[-1].rank > head.rank:
                end = bisect_left(running, head.rank, key=by_rank)
            self._serve(position, end)
            position = end
            if self._preempted:  # victims may have left from before it
                position = bisect_left(running, head.rank, key=by_rank)
            if not self._admit(head, position):
                break
            head = self._next_waiting()
        # Younger than the refused head, or all if none waits.
        self._serve(position, len(running))
        if self._drafter is not None:
            self._draft(self._drafter)
        if account is not None:
            # An eviction removes a key, and nothing is published while a step is planned.
            account.num_evicted -= len(index)
        return self._freeze()

    def _next_waiting(self) -> Request | None:
        """The oldest waiting request that was not preempted in this step."""
        waiting = self._queues.waiting
        if self._preempted:
            return next((request for request in waiting if request not in self._preempted), None)
        return waiting[0] if waiting else None

    def _refuse(self, request: Request, reason: str) -> None:
        """``request`` has no row in this step."""
        if self._account is not None:
            self._account.refused.append((request.request_id, reason))

    # Draft tokens -----------------------------------------------------------------------------

    def _draft(self, drafter: Drafter) -> None:
        """Extend rows that sample behind settled tokens by draft tokens. Nothing counts them as
        dispatched: the next row starts behind those that are accepted."""
        blocks = self._blocks
        for row, request in enumerate(self._requests):
            end = request.num_dispatched
            if not request.settled_only or end != len(request.token_ids):
                continue  # it samples none, or has its next row before these are settled
            num_left = self._max_num_batched_tokens - len(self._requests) - self._num_extra_tokens
            # A sample behind the last draft token may not exceed the longest form.
            most = min(num_left, request.max_num_tokens - 1 - end, drafter.max_draft_tokens)
            drafts = tuple(drafter.propose(request)[:most]) if most > 0 else ()
            num_wanted = blocks.num_blocks_for(end + len(drafts)) - len(request.block_table)
            if drafts and num_wanted > 0 and not (self._is_closed or self._preempted):
                num_taken = min(num_wanted, blocks.num_available)
                if num_taken:
                    new = blocks.allocate(request, num_taken)
                    self._new_blocks[row] = self._new_blocks.get(row, ()) + new
            drafts = drafts[: request.num_slots - end]
            if drafts:
                num_tokens, _ = self._unusual_rows.get(row, (1, 1))
                self._unusual_rows[row] = (num_tokens + len(drafts), 1 + len(drafts))
                self._num_extra_tokens += len(drafts)
                self._drafts[row] = drafts

    # Running requests -------------------------------------------------------------------------

    def _serve(self, begin: int, end: int) -> None:
        """Give running requests ``begin .. end`` their rows."""
        add_request, add_start = self._requests.append, self._starts.append
        held = self._held
        for request in self._running[begin:end]:
            start = request.num_dispatched
            total = request.num_total
            # By far the commonest row first: one token to go, not the last one, and a slot for it.
            if (
                total - start == 1
                and total != request.max_num_tokens
                and not (held or (request.settled_only and total != len(request.token_ids)))
                and (start != request.num_slots or self._grow(request))
            ):
                add_request(request)
                add_start(start)
                request.num_dispatched = total
                request.num_total = total + 1
            elif request.state is RequestState.RUNNING:
                self._serve_slowly(request)

    def _grow(self, request: Request) -> bool:
        """Fast path: allocate one block for ``request`` if one is free or cached."""
        if self._is_closed or request.state is not RequestState.RUNNING:
            return False
        if not self._blocks.num_available:
            return False
        self._new_blocks[len(self._requests)] = self._blocks.allocate(request, 1)
        if self._blocks.states is not None:
            self._extend_states(self._blocks.states, request, request.num_dispatched + 1)
        return True

    def _extend_states(self, states: StateSlots, request: Request, num_tokens: int) -> None:
        """State slots of the row that is written next, as far as it is computed."""
        slots = states.extend(request, num_tokens)
        if slots:
            self._new_state_slots[len(self._requests)] = slots

    def _serve_slowly(self, request: Request) -> None:
        start = request.num_dispatched
        num_tokens, refusal = self._fit(request)
        if refusal:
            self._refuse(request, refusal)
            return
        if self._blocks.states is not None:
            self._extend_states(self._blocks.states, request, start + num_tokens)
        is_sampled = start + num_tokens == request.num_total
        if num_tokens != 1 or not is_sampled:
            self._unusual_rows[len(self._requests)] = (num_tokens, int(is_sampled))
            self._num_extra_tokens += num_tokens - 1
        self._requests.append(request)
        self._starts.append(start)
        request.num_dispatched = start + num_tokens
        request.num_total += is_sampled

    def _fit(self, request: Request) -> tuple[int, str]:
        """Tokens of the row of ``request``, whose blocks are allocated; or 0, and why it has no
        row."""
        num_tokens = request.num_total - request.num_dispatched
        if request in self._held:
            return 0, "held"
        if num_tokens == 0 or request.num_total == request.max_num_tokens:
            return 0, "ending"  # its last token is being sampled
        if request.must_settle:
            return 0, "unsettled"
        if num_tokens > 1:
            num_tokens = min(num_tokens, self._budget_behind(request))
            if num_tokens <= 0:
                return 0, "budget"
        num_slots_left = request.num_slots - request.num_dispatched
        if num_tokens > num_slots_left:
            shortage = "closed" if self._is_closed else "blocks"
            num_tokens = min(num_tokens, num_slots_left + self._take_blocks(request, num_tokens))
            if num_tokens <= 0:
                return 0, shortage
        return num_tokens, ""

    def _budget_behind(self, request: Request) -> int:
        """Tokens ``request`` may take beyond one: the rest of the budget less one token for each
        younger running request that has one token to go."""
        num_rows = len(self._requests)
        num_left = self._max_num_batched_tokens - num_rows - self._num_extra_tokens
        if num_left <= 0:
            return 0
        begin = bisect_left(self._running, request.rank, key=by_rank)
        return num_left - sum(
            1
            for other in self._running[begin:]
            if other is not request
            and other.num_total - other.num_dispatched == 1
            and other.num_total != other.max_num_tokens
            and not other.must_settle
        )

    def _take_blocks(self, request: Request, num_tokens: int) -> int:
        """Allocate what ``num_tokens`` more positions need, or what there is; preempt younger
        ones if there is none at all. Returns the slots gained."""
        if self._is_closed:
            return 0
        blocks = self._blocks
        num_blocks = blocks.num_blocks_for(request.num_dispatched + num_tokens)
        num_wanted = num_blocks - len(request.block_table)
        if blocks.num_available == 0 and request.num_slots == request.num_dispatched:
            self._make_room(request, 1)
        num_taken = min(num_wanted, blocks.num_available)
        if num_taken < num_wanted:
            self._is_closed = True
        if num_taken:
            self._new_blocks[len(self._requests)] = blocks.allocate(request, num_taken)
        return num_taken * blocks.block_size

    # Admission and preemption -----------------------------------------------------------------

    def _obstacle(self, request: Request) -> str:
        """Why a waiting request is not admitted, whatever the pool has; empty: nothing forbids
        it."""
        if self._is_closed:
            return "closed"
        if self._preempted:
            return "preempting"
        if self._is_full() and self._displaced_by(request) is None:
            return "full"
        if request.num_in_flight:
            return "draining"
        return "" if self._budget_behind(request) >= 1 else "budget"

    def _is_full(self) -> bool:
        return len(self._running) >= self._max_num_seqs

    def _displaced_by(self, request: Request) -> Request | None:
        """Under the policy "fair", the running request that ``request`` may displace: the youngest
        of another owner, if it is younger than ``request``."""
        if self._queues.shares is not None:
            for other in reversed(self._running):
                if other.rank <= request.rank:
                    break
                if other.owner != request.owner:
                    return other
        return None

    def _admit(self, request: Request, position: int) -> bool:
        """Move the head of the waiting ones to ``running[position]``, with its prefix hits. On
        False nothing was admitted, and the walk admits no other request in this step."""
        obstacle = self._obstacle(request)
        if obstacle:
            self._refuse(request, obstacle)
            return False
        blocks = self._blocks
        displaced = self._displaced_by(request) if self._is_full() else None
        hits = blocks.match(request)
        if blocks.states is not None and not blocks.states.has_one_beside(request, len(hits)):
            self._refuse(request, "state slots")
            return False
        num_tokens = len(hits) * blocks.block_size
        source = None
        if request.leader is not None and blocks.states is None:
            source = find_source(self._running[:position], request, num_tokens)
        if source is not None:
            num_tokens = request.num_shared_tokens
            hits = source.block_table[: num_tokens // blocks.block_size]
        num_wanted = blocks.num_blocks_for(request.num_total) - len(hits)
        num_available = blocks.num_available - blocks.num_cached_among(hits)
        shortage = num_wanted - num_available
        if not self._make_room(request, shortage, hits, displaced):
            self._is_closed = True
            self._refuse(request, "blocks" if shortage > 0 else "full")
            return False
        blocks.acquire(request, hits)
        if source is not None and num_tokens > request.num_slots:
            (copy,) = blocks.allocate(request, 1)
            self._copies.append((source.block_table[len(hits)], copy))
        self._admitted_rows.append(len(self._requests))
        self._queues.admit(request, position, num_tokens)
        return True

    def _make_room(
        self,
        request: Request,
        num_blocks: int,
        hits: Sequence[int] = (),
        displaced: Request | None = None,
    ) -> bool:
        """Make ``num_blocks`` more blocks available by preempting younger requests, and
        ``displaced``. True when the blocks are available. On False no request was preempted; if the
        victims have tokens in flight they are held out of this step, so that a later step can
        preempt them."""
        if num_blocks <= 0 and displaced is None:
            return True
        victims = choose_victims(self._blocks, self._running, request, num_blocks, hits, displaced)
        if victims is None:
            return False
        if any(victim.num_in_flight for victim in victims):
            self._held.update(victims)
            return False
        for victim in victims:
            self._queues.preempt(victim)
        self._preempted += victims
        if self._account is not None:
            self._account.askers += [request.request_id] * len(victims)
        return True

    # ------------------------------------------------------------------------------------------

    def _freeze(self) -> InFlightStep:
        num_rows = len(self._requests)
        num_tokens = [1] * num_rows
        num_samples = [1] * num_rows
        for row, (num_row_tokens, num_row_samples) in self._unusual_rows.items():
            num_tokens[row], num_samples[row] = num_row_tokens, num_row_samples
        tables, state_tables, prefixes = {}, {}, {}
        for row in self._admitted_rows:
            request = self._requests[row]
            tables[row] = tuple(request.block_table)
            self._new_blocks.pop(row, None)
            if request.state_table:
                state_tables[row] = tuple(request.state_table)
                self._new_state_slots.pop(row, None)
            if request.info.needs_history:
                prefixes[row] = tuple(request.token_ids[: self._starts[row]])
        requests, infos, feeds_itself = self._batch()
        plan = StepPlan(
            step=self._step,
            requests=infos,
            starts=tuple(self._starts),
            num_tokens=tuple(num_tokens),
            num_samples=tuple(num_samples),
            token_ids=range(-1, -num_rows - 1, -1)
            if feeds_itself
            else row_token_ids(requests, self._starts, num_tokens, self._in_flight, self._drafts),
            tables=tables,
            new_blocks=self._new_blocks,
            state_tables=state_tables,
            new_state_slots=self._new_state_slots,
            prefixes=prefixes,
            copies=tuple(self._copies),
            released=tuple(self._queues.released),
            preempted=tuple(victim.info for victim in self._preempted),
            is_decode_only=num_rows > 0 and not self._unusual_rows,
        )
        return InFlightStep(plan, requests)

    def _batch(self) -> tuple[tuple[Request, ...], tuple[RequestInfo, ...], bool]:
        """The rows' requests, what the plan says of them, and whether each row feeds the token
        that the same row of the step before sampled. A batch that comes again, at once or in turns
        with another, is the same objects: what is made of it can be kept."""
        requests = tuple(self._requests)
        for age, (plan, batch) in enumerate(reversed(self._last_steps)):
            if requests == batch:
                is_usual = not (self._unusual_rows or self._admitted_rows)
                feeds_itself = age == 0 and plan.is_decode_only and is_usual
                return batch, plan.requests, feeds_itself
        return requests, tuple([request.info for request in requests]), False


def choose_victims(
    blocks: BlockManager,
    running: Sequence[Request],
    asker: Request,
    num_blocks: int,
    hits: Sequence[int] = (),
    displaced: Request | None = None,
) -> list[Request] | None:
    """The fewest youngest of ``running``, all younger than ``asker``, whose release together makes
    ``num_blocks`` more blocks available. Changes nothing.

    Args:
        running: in rank order, oldest first.
        hits: blocks that the asker is about to share, which therefore do not become available.
        displaced: one of ``running`` whose place the asker takes. It is the first of the victims,
            and needs give no block.

    Returns:
        The victims, youngest first, each of which gives at least one block (S21): one that shares
        all its blocks with requests that stay would lose its work for nothing. None if not even
        all the younger ones together have enough.
    """
    num_refs = {block: blocks.ref_counts[block] + 1 for block in hits}
    num_gained = 0
    victims: list[Request] = []
    younger = (v for v in reversed(running) if v is not displaced)
    for victim in younger if displaced is None else chain((displaced,), younger):
        if victim is not displaced and (victim.rank <= asker.rank or num_gained >= num_blocks):
            break
        victims.append(victim)
        for block in victim.block_table:
            num_refs[block] = num_refs.get(block, blocks.ref_counts[block]) - 1
            num_gained += num_refs[block] == 0
    if num_gained < num_blocks:
        return None
    return [
        v for v in victims if v is displaced or any(num_refs[block] == 0 for block in v.block_table)
    ]


def find_source(
    older: Iterable[Request], request: Request, num_cached_tokens: int
) -> Request | None:
    """The oldest that continues the prompt of ``request`` and has settled what they share, if that
    is more than ``request`` finds in the cache.

    Args:
        older: running requests older than ``request``, in rank order. Younger ones may be
            preempted for its admission, and then have no blocks.
        request: a sibling; others have a prompt of their own.
    """
    num_shared = request.num_shared_tokens
    if not request.reads_cache or num_shared <= num_cached_tokens:
        return None
    for other in older:
        is_alike = other is request.leader or other.leader is request.leader
        if is_alike and other.num_computed >= num_shared:
            return other
    return None
