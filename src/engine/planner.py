"""Plans one step: continuous batching with chunked prefill, one pass over requests in rank order.

The rules, with the properties of ``spec/README.md`` that they serve:

* While an older request is short of blocks, no younger one allocates any in that step, and none is
  admitted behind a blocked one (L1).
* A request that needs a block when none is available preempts the youngest requests, but only those
  whose release makes blocks available (S21). They are younger, so they have no row in the plan yet.
* A victim releases its blocks only when none of its tokens is in flight. Until then it is held: it
  gets no row, so that it drains (S28).
* One token of the budget is reserved for every running decode, so that a long prompt never stalls
  them (L6). A prompt is admitted only when blocks for all its present tokens are available.
* Under the policy "fair", if ``max_num_seqs`` requests run, a waiting request may replace a younger
  running one of another owner. This bounds its wait for a place among the running requests.
* A settled-only request computes settled tokens only: it has no row in a step until its last token
  is settled. Other requests are not delayed (S42). The same holds for a request with draft tokens
  in flight, whose next row starts after the accepted ones.
* A sibling shares the blocks of an older request that has computed the prompt. It gets a copy of
  the block that the shared tokens fill in part (S33). Recurrent states are not copied: with
  recurrent layers a sibling is admitted like any other request.
* After the pass, rows that sample after settled tokens may carry draft tokens, within the remaining
  budget and blocks. They get no new block if any request is short of blocks (S56). If the budget or
  the limit of samples is too small, each row in turn gets one more draft token (S63). With
  recurrent layers the next row computes the accepted ones again; one token is reserved for it (L9).
* The same holds for the positions that a second model writes while the runner drafts behind a row:
  with too few blocks, fewer tokens are wanted (S64).
* With recurrent layers a request is admitted only when a state slot is available for it alone. No
  request is preempted for a slot: steps in flight release slots; each running request keeps one.

A traced run has a :class:`PlanAccount`, which records why each request without a row has none. The
reasons are those of ``spec/state.py`` (``REFUSALS``).
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
from .runner import Drafter, DraftObserver
from .state_slots import StateSlots


@dataclass(slots=True)
class PlanAccount:
    """The reasons behind the latest plan; each plan overwrites it.

    Attributes:
        preempted_for: per preempted request of the plan, in order, the id of the request that
            gained its blocks or place.
        refused: (id, reason) of requests without a row, in rank order. Among the waiting requests
            only the oldest refused one is listed; those behind it wait because it does.
        num_evicted: cached blocks that were evicted for this step.
    """

    preempted_for: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    num_evicted: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Planner:
    """A step while it is being planned. Used once: ``plan()``.

    Args, in order:
        queues: their requests are served, admitted and preempted.
        max_num_seqs: maximum number of running requests. max_num_batched_tokens: token budget of
            the step.
        step: its number.
        in_flight: dispatched but unsettled steps, oldest first.
        last_steps: the one or two newest dispatched steps, settled or not; the newest comes last.
        drafter: proposes draft tokens; None: no row has any.
        account: receives the reasons for the plan; None: reasons are not recorded.
        max_num_samples: maximum number of samples of a step with draft tokens; None: no limit.

    Most rows compute one position and sample one token. Only the exceptions are recorded per row;
    ``_freeze`` fills in the rest.
    """

    _queues: Queues
    _max_num_seqs: int
    _max_num_batched_tokens: int
    _step: int
    _in_flight: deque[InFlightStep]
    _last_steps: Sequence[InFlightStep]
    _drafter: Drafter | None = None
    _account: PlanAccount | None = None
    _max_num_samples: int | None = None
    _blocks: BlockManager = field(init=False)
    _running: list[Request] = field(init=False)
    _drafts: dict[int, tuple[int, ...]] = field(init=False, default_factory=dict)
    _wanted: dict[int, int] = field(init=False, default_factory=dict)
    _next_token_ids: dict[int, int] = field(init=False, default_factory=dict)
    _requests: list[Request] = field(init=False, default_factory=list)
    _starts: list[int] = field(init=False, default_factory=list)
    # Per exceptional row: (number of tokens, number of samples).
    _unusual_rows: dict[int, tuple[int, int]] = field(init=False, default_factory=dict)
    _num_extra_tokens: int = 0
    # Blocks and admissions are recorded under the index of the next row to be appended.
    _admitted_rows: list[int] = field(init=False, default_factory=list)
    _new_blocks: dict[int, Blocks] = field(init=False, default_factory=dict)
    _new_state_slots: dict[int, tuple[int, ...]] = field(init=False, default_factory=dict)
    _copies: list[tuple[int, int]] = field(init=False, default_factory=list)
    _preempted: list[Request] = field(init=False, default_factory=list)
    # Victims with tokens in flight: they get no row until they have drained.
    _held: set[Request] = field(init=False, default_factory=set)
    # An older request is short of blocks, so younger ones may not allocate in this step.
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._blocks, self._running = self._queues.blocks, self._queues.running

    def plan(self) -> InFlightStep:
        """Make the plan: admits and preempts requests and allocates blocks. Returns the plan with
        the requests of its rows."""
        account, running, index = self._account, self._running, self._blocks.index
        if account is not None:
            account.preempted_for, account.refused, account.num_evicted = [], [], len(index)
        position = 0
        head = self._next_waiting()
        while head is not None:
            end = len(running)
            if end and running[-1].rank > head.rank:
                end = bisect_left(running, head.rank, key=by_rank)
            self._serve(position, end)
            position = end
            if self._preempted:  # some victims may have been older than the admitted request
                position = bisect_left(running, head.rank, key=by_rank)
            if not self._admit(head, position):
                break
            head = self._next_waiting()
        # Requests younger than the refused head, or all requests if none waits.
        self._serve(position, len(running))
        if self._drafter is not None:
            self._draft(self._drafter)
            if isinstance(self._drafter, DraftObserver) and self._drafter.max_wanted_drafts:
                self._want(self._drafter)
        if account is not None:
            # An eviction removes a key, and no key is added while a step is planned.
            account.num_evicted -= len(index)
        return self._freeze()

    def _next_waiting(self) -> Request | None:
        """The oldest waiting request that was not preempted in this step."""
        waiting = self._queues.waiting
        if self._preempted:
            return next((request for request in waiting if request not in self._preempted), None)
        return waiting[0] if waiting else None

    def _refuse(self, request: Request, reason: str) -> None:
        """Record that ``request`` has no row in this step, and why."""
        if self._account is not None:
            self._account.refused.append((request.request_id, reason))

    # Draft tokens -----------------------------------------------------------------------------

    def _draft(self, drafter: Drafter) -> None:
        """Append draft tokens to rows that sample after settled tokens. Draft tokens do not count
        as dispatched: the next row starts after the accepted ones or, with recurrent layers, after
        the row's own tokens."""
        rows = [
            (row, request)
            for row, request in enumerate(self._requests)
            if request.num_dispatched == len(request.token_ids)  # otherwise it samples nothing, or
        ]  # its last tokens are still unsettled
        if isinstance(drafter, DraftObserver):
            num_tokens = len(self._requests) + self._num_extra_tokens
            drafter.begin([r for _, r in rows], num_tokens, not self._in_flight)
        num_left = self._num_drafts_left() if rows else 0
        if num_left <= 0:
            return
        proposals: list[tuple[int, Request, tuple[int, ...]]] = []
        for row, request in rows:
            # A sample after the last draft token may not exceed the maximum length.
            room = request.max_num_tokens - 1 - request.num_dispatched
            most = min(num_left, room, drafter.max_draft_tokens)
            drafts = tuple(drafter.propose(request)[:most]) if most > 0 else ()
            if drafts:
                proposals.append((row, request, drafts))
        lengths = even_shares([len(drafts) for *_, drafts in proposals], num_left)
        for (row, request, drafts), length in zip(proposals, lengths, strict=True):
            self._add_drafts(row, request, drafts[:length])

    def _num_drafts_left(self) -> int:
        """How many draft tokens the step may have."""
        num_rows = len(self._requests)
        num_left = self._max_num_batched_tokens - num_rows - self._num_extra_tokens
        if self._max_num_samples is None:
            return num_left
        num_others = sum(not num_samples for _, num_samples in self._unusual_rows.values())
        return min(num_left, self._max_num_samples - (num_rows - num_others))

    def _add_drafts(self, row: int, request: Request, drafts: tuple[int, ...]) -> None:
        """Append draft tokens to a row, as many as have a slot or get one."""
        end = request.num_dispatched
        if drafts:
            self._take_free_blocks(row, request, end + len(drafts))
        drafts = drafts[: request.num_slots - end]
        if drafts:
            num_tokens, _ = self._unusual_rows.get(row, (1, 1))
            self._unusual_rows[row] = (num_tokens + len(drafts), 1 + len(drafts))
            self._drafts[row] = drafts
            request.waits_for_samples = True

    def _want(self, drafter: DraftObserver) -> None:
        """How many tokens the runner drafts behind each row that samples. The next row carries
        them, so they and the sample behind them may not exceed the maximum length."""
        for row, request in enumerate(self._requests):
            num_tokens, num_samples = self._unusual_rows.get(row, (1, 1))
            end = self._starts[row] + num_tokens
            if not num_samples:
                self._next_token_ids[row] = request.token_ids[end]
                continue
            most = min(request.max_num_tokens - 2 - end, drafter.max_wanted_drafts)
            wanted = min(drafter.wanted(request), most) if most > 0 else 0
            if wanted > 0:
                self._take_free_blocks(row, request, end + wanted)
                wanted = min(wanted, request.num_slots - end)
            if wanted > 0:
                self._wanted[row] = wanted

    def _take_free_blocks(self, row: int, request: Request, num_tokens: int) -> None:
        """Allocate blocks up to position ``num_tokens``, as many as are available. None if any
        request is short of blocks."""
        num_blocks = self._blocks.num_blocks_for(num_tokens) - len(request.block_table)
        num_taken = min(num_blocks, self._blocks.num_available)
        if num_taken > 0 and not (self._is_closed or self._preempted):
            new = self._blocks.allocate(request, num_taken)
            self._new_blocks[row] = self._new_blocks.get(row, ()) + new

    # Running requests -------------------------------------------------------------------------

    def _serve(self, begin: int, end: int) -> None:
        """Make the rows of running requests ``begin .. end``."""
        add_request, add_start = self._requests.append, self._starts.append
        held = self._held
        # Intervals of states may begin in blocks that rejected draft tokens left: then each row
        # takes the slow path.
        is_fast = self._drafter is None or self._blocks.states is None
        for request in self._running[begin:end]:
            start = request.num_dispatched
            total = request.num_total
            # The most common row first: one token left, not the last one, and a slot for it.
            if (
                is_fast
                and total - start == 1
                and total != request.max_num_tokens
                and not (held or (request.waits_for_samples and total != len(request.token_ids)))
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
        """Allocate state slots of the next row up to position ``num_tokens``."""
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
        """Number of tokens in the row of ``request``, whose blocks are allocated here; or 0, and
        the reason why it has no row."""
        num_tokens = request.num_total - request.num_dispatched
        if request in self._held:
            return 0, "held"
        if num_tokens == 0 or request.num_total == request.max_num_tokens:
            return 0, "ending"  # a step in flight samples its last token
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
        """Tokens that ``request`` may take when it takes more than one: the remaining budget minus
        one token for each younger running request that decodes."""
        num_rows = len(self._requests)
        num_left = self._max_num_batched_tokens - num_rows - self._num_extra_tokens
        if num_left <= 0:
            return 0
        begin = bisect_left(self._running, request.rank, key=by_rank)
        return num_left - sum(
            1
            for other in self._running[begin:]
            if other is not request
            and (
                other.num_total - other.num_dispatched == 1
                or (self._drafter is not None and self._computes_again(other))
            )
            and other.num_total != other.max_num_tokens
            and not other.must_settle
        )

    def _computes_again(self, request: Request) -> bool:
        """Whether the next row of ``request`` computes accepted draft tokens again."""
        return (
            self._blocks.states is not None
            and request.num_total > request.num_dispatched >= request.num_prompt_tokens
        )

    def _take_blocks(self, request: Request, num_tokens: int) -> int:
        """Allocate the blocks for ``num_tokens`` more positions, or as many as are available;
        preempt younger requests if none is. Returns the number of token slots gained."""
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
        """Why a waiting request is not admitted, regardless of the pool; empty if there is no
        reason."""
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
        one of another owner, if it is younger than ``request``; else None."""
        if self._queues.shares is not None:
            for other in reversed(self._running):
                if other.rank <= request.rank:
                    break
                if other.owner != request.owner:
                    return other
        return None

    def _admit(self, request: Request, position: int) -> bool:
        """Move the oldest waiting request to ``running[position]``, with its prefix hits. If False,
        nothing was admitted, and this step admits no other request."""
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
        """Make ``num_blocks`` more blocks available by preempting younger requests and
        ``displaced``. Returns whether they are available. If False, no request was preempted;
        victims with tokens in flight are held out of this step, so that a later step can preempt
        them."""
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
            self._account.preempted_for += [request.request_id] * len(victims)
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
            wanted_drafts=self._wanted,
            next_token_ids=self._next_token_ids,
        )
        return InFlightStep(plan, requests)

    def _batch(self) -> tuple[tuple[Request, ...], tuple[RequestInfo, ...], bool]:
        """The rows' requests, their infos, and whether each row feeds the token that the same row
        of the previous step sampled. If one of the last two batches recurs, the same tuples are
        returned, so that runners can cache values derived from them."""
        requests = tuple(self._requests)
        for age, (plan, batch) in enumerate(reversed(self._last_steps)):
            if requests == batch:
                is_usual = not (self._unusual_rows or self._admitted_rows)
                feeds_itself = age == 0 and plan.is_decode_only and is_usual
                return batch, plan.requests, feeds_itself
        return requests, tuple([request.info for request in requests]), False


def even_shares(wanted: Sequence[int], most: int) -> list[int]:
    """Numbers up to ``wanted`` whose sum is at most ``most``: as equal as possible, and the first
    ones get what is left over."""
    shares = list(wanted)
    if sum(shares) <= most:
        return shares
    num_left, level = most, 0
    for i, least in enumerate(sorted(shares)):
        level = num_left // (len(shares) - i)
        if least > level:
            break
        num_left -= least
    num_over = most - sum(min(number, level) for number in shares)
    for i, number in enumerate(shares):
        is_cut = number > level
        shares[i] = min(number, level) + (is_cut and num_over > 0)
        num_over -= is_cut
    return shares


def choose_victims(
    blocks: BlockManager,
    running: Sequence[Request],
    request: Request,
    num_blocks: int,
    hits: Sequence[int] = (),
    displaced: Request | None = None,
) -> list[Request] | None:
    """The fewest, youngest requests in ``running``, all younger than ``request``, whose release
    together makes ``num_blocks`` more blocks available. Changes nothing.

    Args:
        running: in rank order, oldest first.
        request: the request that needs the blocks.
        hits: cached blocks that ``request`` will share, which therefore do not become available.
        displaced: a request in ``running`` whose place ``request`` takes. It is the first victim,
            even if it releases no block.

    Returns:
        The victims, youngest first. Each releases at least one block (S21): a victim whose blocks
        are all shared with remaining requests would lose its work for nothing. None if all younger
        requests together have too few blocks.
    """
    num_refs = {block: blocks.ref_counts[block] + 1 for block in hits}
    num_gained = 0
    victims: list[Request] = []
    younger = (v for v in reversed(running) if v is not displaced)
    for victim in younger if displaced is None else chain((displaced,), younger):
        if victim is not displaced and (victim.rank <= request.rank or num_gained >= num_blocks):
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
    """The oldest running request with the same prompt as ``request`` that has settled the shared
    tokens. None if the cache holds at least as many tokens for ``request``.

    Args:
        older: running requests older than ``request``, in rank order. Younger ones may be
            preempted for its admission, and then have no blocks.
        request: a sibling; other requests have no common prompt.
        num_cached_tokens: tokens of ``request`` found in the prefix cache.
    """
    num_shared = request.num_shared_tokens
    if not request.reads_cache or num_shared <= num_cached_tokens:
        return None
    for other in older:
        is_alike = other is request.leader or other.leader is request.leader
        if is_alike and other.num_computed >= num_shared:
            return other
    return None
