"""Structural properties of a scheduler's state, checked on the real objects.

``LLM(check_invariants=True)`` runs ``check_state`` after every schedule and commit, and
``check_plan`` on every plan. Property numbers are those of ``spec/README.md``. Properties about
contents of blocks and about whole runs are checked by the tests instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, pairwise

from .block_manager import BlockManager
from .ledger import Ledger
from .plan import StepPlan
from .request import Request, RequestState
from .runner import DraftObserver
from .scheduler import Scheduler
from .state_slots import NO_SLOT, StateSlots


class InvariantError(AssertionError):
    """A property of the specification does not hold; ``property_id`` names it."""

    def __init__(self, property_id: str, detail: str) -> None:
        self.property_id = property_id
        super().__init__(f"{property_id}: {detail}")


def _require(condition: bool, property_id: str, detail: str, *values: object) -> None:
    """``detail`` is a format string for ``values``, formatted only if the condition is false:
    formatting takes several times as long as evaluating the conditions."""
    if not condition:
        raise InvariantError(property_id, detail.format(*values))


def check_state(scheduler: Scheduler) -> None:
    """Raises InvariantError if the state violates S1-S4, S6-S8, S10, S11, S14, S17, S18, S20, S23,
    S24, S27, S28, S33, S40, S43, S44, S46, S47, S50, S53, S59 or S60."""
    holders = {*scheduler.requests.values(), *scheduler.queues.draining}
    is_idle = not scheduler.requests and not scheduler.in_flight
    blocks, states = scheduler.blocks, scheduler.blocks.states
    tables = [request.block_table for request in holders]
    _check_ledger(blocks, tables, "block", is_idle, ("S1", "S2", "S3", "S4", "S8", "S14"))
    _check_content(blocks, holders)
    if states is not None:
        slots = [set(request.state_table) for request in holders]
        _check_ledger(states, slots, "slot", is_idle, (*["S43"] * 5, "S50"))
        _check_state_tables(scheduler, states, holders)
    _check_requests(scheduler)
    for step in scheduler.in_flight:
        for request, start, num_tokens, _ in step.rows():
            holds = len(request.block_table) >= blocks.num_blocks_for(start + num_tokens)
            _require(
                holds, "S28", "{} released blocks that step {} writes", request, step.plan.step
            )


def _check_ledger(
    ledger: Ledger,
    tables: Iterable[Iterable[int]],
    kind: str,
    is_idle: bool,
    properties: tuple[str, ...],
) -> None:
    """Check the counts and places of a pool's items.

    Args:
        tables: the items of each holder. is_idle: there is no request, and no step in flight.
        properties: ids of the properties checked; for blocks S1, S2, S3, S4, S8 and S14.
    """
    s1, s2, s3, s4, s8, s14 = properties
    owners = Counter(chain.from_iterable(tables))
    free, lru = set(ledger.free), set(ledger.lru)
    is_once = len(free) == len(ledger.free) and len(lru) == len(ledger.lru)
    _require(is_once, s2, "a {} is queued twice", kind)
    for item, (count, key) in enumerate(zip(ledger.ref_counts, ledger.keys, strict=True)):
        num_owners, is_free, is_cached = owners.get(item, 0), item in free, item in lru
        is_to_be_free, is_to_be_cached = not count and key is None, not count and key is not None
        is_indexed = key is None or ledger.index.get(key) == item
        has_place = is_free == is_to_be_free and is_cached == is_to_be_cached
        if count == num_owners and has_place and is_indexed:
            continue  # fast path: pools have thousands of blocks; violations are examined below
        name = f"{kind} {item}"
        _require(count >= 0, s3, "{} has count {}", name, count)
        _require(count == num_owners, s1, "{}: {} counted, {}", name, count, num_owners)
        places = (count > 0) + is_free + is_cached
        _require(places == 1, s2, "{} is in {} places", name, places)
        _require(is_free == is_to_be_free, s4, "{} on free list", name)
        _require(is_cached == is_to_be_cached, s4, "{} in LRU", name)
        _require(is_indexed, s8, "key of {} is indexed for another item", name)
    for key, item in ledger.index.items():
        _require(ledger.keys[item] == key, s8, "index entry of {} {} is stale", kind, item)
    is_whole = ledger.num_available == len(ledger.keys)
    _require(is_whole or not is_idle, s14, "a {} is owned with no request", kind)


def _check_content(blocks: BlockManager, holders: Iterable[Request]) -> None:
    """Compare the content of positions directly, not their keys."""
    size = blocks.block_size
    first_owners: dict[int, Request] = {}
    for request in holders:
        total = sum(segment.length for segment in request.info.segments)
        _require(total == request.num_prompt_tokens, "S59", "segments of {}", request)
        for i, block in enumerate(request.block_table):
            if blocks.ref_counts[block] < 2:
                continue
            other = first_owners.setdefault(block, request)
            if other is not request:
                begin, end = i * size, (i + 1) * size
                is_same = other.token_ids[begin:end] == request.token_ids[begin:end]
                if is_same and (other.contents or request.contents):
                    is_same = _held(other, begin, end) == _held(request, begin, end)
                _require(is_same, "S60", "{} shares block {} of other content", request, block)


def _held(request: Request, begin: int, end: int) -> list[tuple[bytes, int] | None]:
    """(content hash, offset in the content) per position; None for a token."""
    held: list[tuple[bytes, int] | None] = [None] * (end - begin)
    for content in request.contents:
        for position in range(max(begin, content.begin), min(end, content.end)):
            held[position - begin] = content.content_hash, position - content.begin
    return held


def _check_state_tables(
    scheduler: Scheduler, states: StateSlots, holders: Iterable[Request]
) -> None:
    for request in holders:
        _check_state_table(states, request)
    for step in scheduler.in_flight:
        for request, start, _, _ in step.rows():
            live = request.state_table[max(0, start - 1) // states.interval :]
            holds = bool(live) and NO_SLOT not in live
            _require(holds, "S47", "{} released slots that step {} uses", request, step.plan.step)


def _check_state_table(states: StateSlots, request: Request) -> None:
    table, interval = request.state_table, states.interval
    num_entries = -(-request.num_dispatched // interval)
    _require(len(table) == num_entries, "S44", "{} needs {} states", request, num_entries)
    if request.state is RequestState.FINISHED:
        return
    for i, slot in enumerate(table):
        is_past = (i + 1) * interval < request.num_computed
        _require((slot == NO_SLOT) == is_past, "S44", "entry {} of the states of {}", i, request)
        key = None if is_past else states.keys[slot]
        if key is not None:  # found at admission: the engine publishes past entries only
            own_key = request.block_keys[(i + 1) * states.blocks_per_interval - 1][0]
            is_settled = (i + 1) * interval <= request.num_computed
            _require(key == own_key and is_settled, "S46", "slot {} has a wrong key", slot)


def _check_requests(scheduler: Scheduler) -> None:
    queues = scheduler.queues
    by_state = {RequestState.WAITING: queues.waiting, RequestState.RUNNING: queues.running}
    for state, queue in by_state.items():
        _require(
            all(r.state is state for r in queue), "S23", "wrong state among the {}", state.value
        )
        _require(
            len({id(r) for r in queue}) == len(queue),
            "S23",
            "a request is twice in {}",
            state.value,
        )
        ranks = [r.rank for r in queue]
        _require(all(a < b for a, b in pairwise(ranks)), "S27", "{} out of rank order", state.value)
    num_running = len(queues.running)
    _require(num_running <= scheduler.max_num_seqs, "S18", "{} requests running", num_running)
    num_queued = len(queues.waiting) + num_running
    num_paused = sum(r.state is RequestState.PAUSED for r in scheduler.requests.values())
    pending = [sibling for siblings in queues.pending.values() for sibling in siblings]
    without_turn = queues.shares.queued() if queues.shares is not None else []
    num_placed = num_queued + num_paused + len(pending) + len(without_turn)
    is_whole = num_placed == len(scheduler.requests)
    _require(is_whole, "S23", "a request is in no queue")
    is_pending = all(r.state is RequestState.PENDING for r in pending)
    _require(is_pending, "S23", "wrong state among the pending")
    served = {request.owner for request in queues.waiting}
    for request in without_turn:
        _require(request.state is RequestState.QUEUED, "S23", "{} is not queued", request)
        _require(request.owner in served, "S53", "no request of the owner of {} waits", request)
    for leader in queues.pending:
        is_queued = leader.state in by_state or leader.state is RequestState.QUEUED
        is_coming = is_queued and leader.num_computed < leader.num_prompt_tokens
        _require(is_coming, "S40", "siblings wait for {}", leader)
    for request in (*scheduler.requests.values(), *queues.draining):
        _check_counters(scheduler, request)


def _check_counters(scheduler: Scheduler, request: Request) -> None:
    blocks = scheduler.blocks
    is_ordered = 0 <= request.num_computed <= request.num_dispatched <= request.num_total
    _require(is_ordered, "S17", "counters out of order: {}", request)
    num_blocks = len(request.block_table)
    least = blocks.num_blocks_for(request.num_dispatched)
    most = least
    drafter = scheduler.drafter
    if drafter is not None and num_blocks:
        num_behind = drafter.max_draft_tokens
        if isinstance(drafter, DraftObserver):
            num_behind += drafter.max_wanted_drafts
        most = blocks.num_blocks_for(request.num_dispatched + num_behind)
    _require(least <= num_blocks <= most, "S10", "{} needs {} to {} blocks", request, least, most)
    _require(request.num_slots == num_blocks * blocks.block_size, "S10", "slots of {}", request)
    _require(len(request.token_ids) <= request.max_num_tokens, "S18", "{} is too long", request)
    has_drained = request.num_in_flight == 0
    if request.state is not RequestState.RUNNING and has_drained:
        _require(not request.block_table, "S20", "idle {} holds blocks", request)
    if request.state is RequestState.FINISHED:
        _require(request.finish_reason is not None, "S24", "{} finished without a reason", request)
        return
    for block in request.block_table[request.num_dispatched // blocks.block_size :]:
        _require(blocks.ref_counts[block] == 1, "S33", "{} shares {}, not filled", request, block)
    has_work_left = request.num_computed < len(request.token_ids)
    _require(has_work_left, "S11", "{} has nothing left to compute", request)
    for i, block in enumerate(request.block_table):
        key = blocks.keys[block]
        is_settled = (i + 1) * blocks.block_size <= request.num_computed
        _require(key is None or is_settled, "S7", "block {} of {} is not settled", block, request)
        if key is not None:
            _require(key == request.block_keys[i][0], "S6", "block {} has a wrong key", block)


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Raises InvariantError if a new plan violates S9, S15, S17, S18, S19, S20, S27, S33, S42, S48,
    S56, S63 or S64."""
    if not plan.requests:
        return
    blocks = scheduler.blocks
    num_tokens = plan.total_num_tokens
    _require(num_tokens <= scheduler.max_num_batched_tokens, "S18", "{} tokens", num_tokens)
    _require(len(plan) <= scheduler.max_num_seqs, "S18", "{} rows", len(plan))
    limit = scheduler.max_num_samples
    has_room = limit is None or not plan.has_drafts or plan.num_sampled <= limit
    _require(has_room, "S63", "{} samples", plan.num_sampled)
    _require(not set(plan.preempted) & set(plan.requests), "S20", "a victim stayed in the plan")
    preempted = {info.request_id for info in plan.preempted}
    for request in scheduler.queues.waiting:
        if request.request_id in preempted:
            _require(not request.block_table and not request.num_computed, "S20", "{}", request)
            preempted.discard(request.request_id)
    _require(not preempted, "S20", "{} were preempted and do not wait", preempted)
    *earlier, newest = scheduler.in_flight
    drafting = {request for step in earlier for request, *_, n in step.rows() if n > 1}
    written: set[int] = set()
    for request, start, num_row_tokens, num_samples in newest.rows():
        num_drafts = max(0, num_samples - 1)
        end = start + num_row_tokens - num_drafts
        _require(end > start, "S18", "empty row of {}", request)
        _require(request.state is RequestState.RUNNING, "S27", "{} is not running", request)
        _require(end == request.num_dispatched, "S17", "{} does not end at {}", request, end)
        is_settled = end <= len(request.token_ids)
        is_bound = request.settled_only or request in drafting
        _require(is_settled or not is_bound, "S42", "{} is not settled", request)
        is_sampled = num_samples > 0
        num_known = request.num_total - is_sampled
        _require(is_sampled == (end == num_known), "S19", "{} samples {}", request, num_samples)
        if num_drafts:
            may_draft = end == len(request.token_ids)
            _require(may_draft, "S56", "{} has draft tokens behind unsettled ones", request)
            end += num_drafts
            _require(end < request.max_num_tokens, "S56", "draft tokens of {} too far", request)
        for block_index in range(start // blocks.block_size, -(-end // blocks.block_size)):
            block = request.block_table[block_index]
            _require(block not in written, "S15", "block {} is written by two rows", block)
            is_own = blocks.ref_counts[block] == 1 and blocks.keys[block] is None
            _require(is_own, "S9", "{} writes block {}, shared or published", request, block)
            written.add(block)
        if blocks.states is not None:
            for slot in set(request.state_table[start // blocks.states.interval :]):
                is_own = blocks.states.ref_counts[slot] == 1 and blocks.states.keys[slot] is None
                _require(is_own, "S48", "{} writes slot {}, shared or published", request, slot)
    _check_copies(scheduler, plan)
    _check_wanted(scheduler, plan)


def _check_wanted(scheduler: Scheduler, plan: StepPlan) -> None:
    blocks, requests = scheduler.blocks, scheduler.in_flight[-1].requests
    for row, wanted in plan.wanted_drafts.items():
        request, end = requests[row], plan.starts[row] + plan.num_tokens[row] + wanted
        is_behind = plan.num_samples[row] > 0 and wanted > 0 and end <= request.max_num_tokens - 2
        _require(is_behind, "S64", "{} tokens wanted behind {}", wanted, request)
        _require(end <= request.num_slots, "S64", "drafting of {} has no slots", request)
        first = request.num_dispatched // blocks.block_size
        for block in request.block_table[first : blocks.num_blocks_for(end)]:
            is_own = blocks.ref_counts[block] == 1 and blocks.keys[block] is None
            _require(is_own, "S64", "{} drafts in {}, shared or published", request, block)


def _check_copies(scheduler: Scheduler, plan: StepPlan) -> None:
    blocks, requests = scheduler.blocks, scheduler.in_flight[-1].requests
    admitted = {block for row in plan.tables for block in requests[row].block_table}
    sources = {source for source, _ in plan.copies}
    for source, copy in plan.copies:
        is_owned = blocks.ref_counts[source] > 0
        _require(is_owned, "S33", "block {} is copied, and has no owner", source)
        is_own = blocks.ref_counts[copy] == 1 and blocks.keys[copy] is None and copy in admitted
        _require(
            is_own and copy not in sources, "S33", "block {} must not be a copy's destination", copy
        )


class RunnerView:
    """The state that a runner derives from the plans alone, in order: the block table (S32) and the
    state table (S51) of each running request, and the known tokens of requests that need their
    history (S39). Compared with the scheduler's own state."""

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}
        self._state_tables: dict[str, list[int]] = {}
        # For requests that need their history: number of known tokens, without and with drafts.
        self._num_known: dict[str, tuple[int, int]] = {}

    def check(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """Process a plan that will be dispatched.

        Raises:
            InvariantError: the tables differ from those of the running requests, or the token ids
                from those of the rows.
        """
        if not plan.requests:
            return
        self._take(plan)
        running = {request.request_id: request for request in scheduler.queues.running}
        _require(
            self._tables.keys() == running.keys(), "S32", "tables of requests that are not running"
        )
        for request_id, table in self._tables.items():
            request = running[request_id]
            _require(table == request.block_table, "S32", "sent {} for {}", table, request)
            sent, states = self._state_tables.get(request_id, []), request.state_table
            is_same = len(sent) == len(states) and all(
                slot in (NO_SLOT, known) for slot, known in zip(states, sent, strict=True)
            )
            _require(is_same, "S51", "sent states {} for {}", sent, request)
        self._check_token_ids(scheduler, plan)
        self._check_prefixes(scheduler, plan)

    def _take(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            _require(self._tables.pop(request_id, None) is not None, "S32", "released twice")
            self._state_tables.pop(request_id, None)
            self._num_known.pop(request_id, None)
        for row, slots in plan.state_tables.items():
            self._state_tables[plan.requests[row].request_id] = list(slots)
        for row, slots in plan.new_state_slots.items():
            self._state_tables[plan.requests[row].request_id] += slots
        for row, blocks in plan.tables.items():
            request_id = plan.requests[row].request_id
            _require(request_id not in self._tables, "S32", "{} was not released", request_id)
            self._tables[request_id] = list(blocks)
        for row, blocks in plan.new_blocks.items():
            request_id = plan.requests[row].request_id
            _require(request_id in self._tables, "S32", "{} was never admitted", request_id)
            self._tables[request_id] += blocks

    @staticmethod
    def _check_token_ids(scheduler: Scheduler, plan: StepPlan) -> None:
        ids = iter(plan.token_ids)
        for request, start, num_tokens, num_samples in scheduler.in_flight[-1].rows():
            sent = [next(ids) for _ in range(num_tokens)]
            if num_samples > 1:
                num_tokens -= num_samples - 1
                sent = sent[:num_tokens]
            known = request.token_ids[start : start + num_tokens]
            is_fed = num_tokens == 1 and sent[0] < 0
            _require(is_fed or sent == known, "S32", "sent tokens {} for {}", sent, request)
        _require(next(ids, None) is None, "S32", "more token ids than positions")

    def _check_prefixes(self, scheduler: Scheduler, plan: StepPlan) -> None:
        requests = scheduler.in_flight[-1].requests
        needed = {row for row in plan.tables if plan.requests[row].needs_history}
        _require(plan.prefixes.keys() == needed, "S39", "tokens of other rows were sent")
        for row, ids in plan.prefixes.items():
            known = tuple(requests[row].token_ids[: len(ids)])
            _require(ids == known, "S39", "sent other tokens before the row of {}", requests[row])
            self._num_known[plan.requests[row].request_id] = len(ids), len(ids)
        for info, start, num_tokens, num_samples in plan.rows():
            if info.needs_history:
                begin, end = self._num_known.get(info.request_id, (-1, -1))
                # All tokens after its own are draft tokens, any of which may be rejected.
                is_known = begin <= start <= end
                _require(
                    is_known, "S39", "{} is known up to {}, not {}", info.request_id, end, start
                )
                last = start + num_tokens
                self._num_known[info.request_id] = last - max(0, num_samples - 1), last
