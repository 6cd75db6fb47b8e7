"""Structural properties of a scheduler's state, checked on the real objects.

``LLM(check_invariants=True)`` runs ``check_state`` after every schedule and commit and
``check_plan`` on every plan. Numbers are those of ``spec/README.md``; properties about contents
and about runs as a whole are checked by the tests, not here.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from .plan import StepPlan
from .request import Request, RequestState
from .scheduler import Scheduler


class InvariantError(AssertionError):
    """A property of the specification does not hold; ``property_id`` names it."""

    def __init__(self, property_id: str, detail: str) -> None:
        self.property_id = property_id
        super().__init__(f"{property_id}: {detail}")


def _require(condition: bool, property_id: str, detail: str) -> None:
    if not condition:
        raise InvariantError(property_id, detail)


def check_state(scheduler: Scheduler) -> None:
    """Raises InvariantError if the state breaks S1-S4, S6-S8, S10, S11, S14, S17, S18, S20, S23,
    S24, S27, S28, S33 or S40."""
    _check_pool(scheduler)
    _check_requests(scheduler)
    for plan, requests in scheduler.in_flight:
        for request, start, num_tokens in zip(requests, plan.starts, plan.num_tokens, strict=True):
            num_blocks = scheduler.blocks.num_blocks_for(start + num_tokens)
            holds = len(request.block_table) >= num_blocks
            _require(holds, "S28", f"{request} gave back blocks that step {plan.step} writes")


def _check_pool(scheduler: Scheduler) -> None:
    blocks = scheduler.blocks
    holders = {*scheduler.requests.values(), *scheduler.queues.draining}
    owners = Counter(block for request in holders for block in request.block_table)
    free, lru = Counter(blocks.free_blocks), Counter(list(blocks.lru_blocks))
    most = max((*free.values(), *lru.values()), default=1)
    _require(most == 1, "S2", "a block is queued twice")
    for block in range(blocks.num_blocks):
        count, key = blocks.ref_counts[block], blocks.keys[block]
        _require(count >= 0, "S3", f"block {block} has count {count}")
        _require(count == owners[block], "S1", f"block {block}: {count} counted, {owners[block]}")
        places = (count > 0) + free[block] + lru[block]
        _require(places == 1, "S2", f"block {block} is in {places} places")
        _require(free[block] == (count == 0 and key is None), "S4", f"block {block} on free list")
        _require(lru[block] == (count == 0 and key is not None), "S4", f"block {block} in LRU")
        if key is not None:
            _require(blocks.index.get(key) == block, "S8", f"key of block {block} leads elsewhere")
    for key, block in blocks.index.items():
        _require(blocks.keys[block] == key, "S8", f"index entry of block {block} is stale")
    if not scheduler.requests and not scheduler.in_flight:
        num_idle = len(blocks.free_blocks) + len(blocks.lru_blocks)
        _require(num_idle == blocks.num_blocks, "S14", f"{num_idle} blocks idle with no request")


def _check_requests(scheduler: Scheduler) -> None:
    queues = scheduler.queues
    by_state = {RequestState.WAITING: queues.waiting, RequestState.RUNNING: queues.running}
    for state, queue in by_state.items():
        _require(all(r.state is state for r in queue), "S23", f"a stranger among the {state.value}")
        _require(len({id(r) for r in queue}) == len(queue), "S23", f"twice {state.value}")
        ranks = [r.rank for r in queue]
        _require(all(a < b for a, b in pairwise(ranks)), "S27", f"{state.value} out of rank order")
    num_running = len(queues.running)
    _require(num_running <= scheduler.max_num_seqs, "S18", f"{num_running} requests running")
    num_queued = len(queues.waiting) + num_running
    num_paused = sum(r.state is RequestState.PAUSED for r in scheduler.requests.values())
    pending = [sibling for siblings in queues.pending.values() for sibling in siblings]
    is_whole = num_queued + num_paused + len(pending) == len(scheduler.requests)
    _require(is_whole, "S23", "a request is in no queue")
    is_pending = all(r.state is RequestState.PENDING for r in pending)
    _require(is_pending, "S23", "a stranger among the pending")
    for leader in queues.pending:
        is_coming = leader.state in by_state and leader.num_computed < leader.num_prompt_tokens
        _require(is_coming, "S40", f"siblings wait for {leader}")
    for request in (*scheduler.requests.values(), *queues.draining):
        _check_counters(scheduler, request)


def _check_counters(scheduler: Scheduler, request: Request) -> None:
    blocks = scheduler.blocks
    is_ordered = 0 <= request.num_computed <= request.num_dispatched <= request.num_total
    _require(is_ordered, "S17", f"counters out of order: {request}")
    num_blocks = blocks.num_blocks_for(request.num_dispatched)
    _require(len(request.block_table) == num_blocks, "S10", f"{request} needs {num_blocks} blocks")
    _require(request.num_slots == num_blocks * blocks.block_size, "S10", f"slots of {request}")
    _require(len(request.token_ids) <= request.max_num_tokens, "S18", f"{request} is too long")
    has_drained = request.num_in_flight == 0
    if request.state is not RequestState.RUNNING and has_drained:
        _require(not request.block_table, "S20", f"idle {request} holds blocks")
    if request.state is RequestState.FINISHED:
        _require(request.finish_reason is not None, "S24", f"{request} finished for no reason")
        return
    if request.num_dispatched % blocks.block_size:
        block = request.block_table[request.num_dispatched // blocks.block_size]
        _require(blocks.ref_counts[block] == 1, "S33", f"{request} shares {block}, not filled")
    has_work_left = request.num_computed < len(request.token_ids)
    _require(has_work_left, "S11", f"nothing is left to compute of {request}")
    for i, block in enumerate(request.block_table):
        key = blocks.keys[block]
        is_settled = (i + 1) * blocks.block_size <= request.num_computed
        _require(key is None or is_settled, "S7", f"block {block} of {request} is not settled")
        if key is not None:
            _require(key == request.block_keys[i][0], "S6", f"block {block} has another's key")


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Raises InvariantError if a fresh plan breaks S9, S15, S17, S18, S19, S20, S27, S33 or
    S42."""
    if not plan.requests:
        return
    blocks = scheduler.blocks
    requests = scheduler.in_flight[-1].requests
    num_tokens = plan.total_num_tokens
    _require(num_tokens <= scheduler.max_num_batched_tokens, "S18", f"{num_tokens} tokens")
    _require(len(plan) <= scheduler.max_num_seqs, "S18", f"{len(plan)} rows")
    _require(not set(plan.preempted) & set(plan.requests), "S20", "a victim stayed in the plan")
    preempted = {info.request_id for info in plan.preempted}
    for request in scheduler.queues.waiting:
        if request.request_id in preempted:
            _require(not request.block_table and not request.num_computed, "S20", f"{request}")
            preempted.discard(request.request_id)
    _require(not preempted, "S20", f"{preempted} were preempted and do not wait")
    written: set[int] = set()
    rows = zip(requests, plan.starts, plan.num_tokens, plan.sampled, strict=True)
    for request, start, num_row_tokens, is_sampled in rows:
        end = start + num_row_tokens
        _require(num_row_tokens >= 1, "S18", f"empty row of {request}")
        _require(request.state is RequestState.RUNNING, "S27", f"{request} is not running")
        _require(end == request.num_dispatched, "S17", f"{request} does not end at {end}")
        is_settled = end <= len(request.token_ids)
        _require(is_settled or not request.settled_only, "S42", f"{request} is not settled")
        num_known = request.num_total - is_sampled
        _require(is_sampled == (end == num_known), "S19", f"{request} sampled={is_sampled}")
        for block_index in range(start // blocks.block_size, -(-end // blocks.block_size)):
            block = request.block_table[block_index]
            _require(block not in written, "S15", f"block {block} is written by two rows")
            is_own = blocks.ref_counts[block] == 1 and blocks.keys[block] is None
            _require(is_own, "S9", f"{request} writes block {block}, shared or published")
            written.add(block)
    _check_copies(scheduler, plan)


def _check_copies(scheduler: Scheduler, plan: StepPlan) -> None:
    blocks, requests = scheduler.blocks, scheduler.in_flight[-1].requests
    admitted = {block for row in plan.tables for block in requests[row].block_table}
    sources = {source for source, _ in plan.copies}
    for source, copy in plan.copies:
        _require(blocks.ref_counts[source] > 0, "S33", f"block {source} is copied, and nobody's")
        is_own = blocks.ref_counts[copy] == 1 and blocks.keys[copy] is None and copy in admitted
        _require(is_own and copy not in sources, "S33", f"block {copy} is no place for a copy")


class RunnerView:
    """What a runner makes of the plans, given to it in their order, and of nothing else: the block
    table of each running request (S32), and how far it knows the tokens of one that needs its
    history (S39). Checked against the scheduler's own."""

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}
        self._num_known: dict[str, int] = {}  # tokens of the requests that need their history

    def check(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """Take in a plan that is to be dispatched.

        Raises:
            InvariantError: the tables are not those of the running requests, or the token ids not
                those of the rows.
        """
        if not plan.requests:
            return
        self._take(plan)
        running = {request.request_id: request for request in scheduler.queues.running}
        _require(self._tables.keys() == running.keys(), "S32", "other requests than the running")
        for request_id, table in self._tables.items():
            request = running[request_id]
            _require(table == request.block_table, "S32", f"told {table} for {request}")
        self._check_token_ids(scheduler, plan)
        self._check_prefixes(scheduler, plan)

    def _take(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            _require(self._tables.pop(request_id, None) is not None, "S32", "released twice")
            self._num_known.pop(request_id, None)
        for row, blocks in plan.tables.items():
            request_id = plan.requests[row].request_id
            _require(request_id not in self._tables, "S32", f"{request_id} was not released")
            self._tables[request_id] = list(blocks)
        for row, blocks in plan.new_blocks.items():
            request_id = plan.requests[row].request_id
            _require(request_id in self._tables, "S32", f"{request_id} was never admitted")
            self._tables[request_id] += blocks

    @staticmethod
    def _check_token_ids(scheduler: Scheduler, plan: StepPlan) -> None:
        requests = scheduler.in_flight[-1].requests
        ids = iter(plan.token_ids)
        for request, start, num_tokens in zip(requests, plan.starts, plan.num_tokens, strict=True):
            told = [next(ids) for _ in range(num_tokens)]
            known = request.token_ids[start : start + num_tokens]
            is_fed = num_tokens == 1 and told[0] < 0
            _require(is_fed or told == known, "S32", f"told tokens {told} for {request}")
        _require(next(ids, None) is None, "S32", "more token ids than positions")

    def _check_prefixes(self, scheduler: Scheduler, plan: StepPlan) -> None:
        requests = scheduler.in_flight[-1].requests
        asked = {row for row in plan.tables if plan.requests[row].needs_history}
        _require(plan.prefixes.keys() == asked, "S39", "told are the tokens of other rows")
        for row, ids in plan.prefixes.items():
            known = tuple(requests[row].token_ids[: len(ids)])
            _require(ids == known, "S39", f"told other tokens before the row of {requests[row]}")
            self._num_known[plan.requests[row].request_id] = len(ids)
        for info, start, num_tokens, _ in plan.rows():
            if info.needs_history:
                begin = self._num_known.get(info.request_id)
                _require(begin == start, "S39", f"{info.request_id} is known to {begin}: {start}")
                self._num_known[info.request_id] = start + num_tokens
