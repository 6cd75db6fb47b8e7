"""Run the real scheduler and block manager in lockstep with the specification.

`Pair` applies each action to both and compares the plans row by row. After every action it compares
the abstraction of the real state with the specification's state, field by field, including the
order of the free stack and of the LRU queue. The runner's view of block tables (S32) is derived
from the real plans alone. Real packers run in the loop: the tokens, slots and tables that they
produce from a plan must be those that the specification has for its rows.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from pagespec.engine.block_manager import BlockManager
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.drafting.drafters import SuffixDrafter
from pagespec.engine.invariants import RunnerView
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.plan import StepPlan
from pagespec.engine.planner import PlanAccount
from pagespec.engine.policy import SENIORITY_BITS, Policy
from pagespec.engine.request import Request as RealRequest
from pagespec.engine.request import RequestInfo, RequestState
from pagespec.engine.runner import DraftObserver
from pagespec.engine.sampling_params import SamplingParams
from pagespec.engine.scheduler import Scheduler
from pagespec.engine.segments import Segment as RealSegment
from pagespec.engine.shares import Shares
from pagespec.engine.state_slots import StateSlots
from pagespec.errors import InvalidInputError
from spec import model
from spec.properties import all_tokens
from spec.state import (
    STOP,
    Abort,
    Add,
    Fail,
    Label,
    Pause,
    Plan,
    Request,
    ResetCache,
    Row,
    Schedule,
    Scope,
    Segment,
    Settle,
    Slots,
    State,
    Template,
    prefixes,
)
from tests.support.tables import HistoriesFromPlans, RowSeen, StateTablesFromPlans, TablesFromPlans

_PARAMS = SamplingParams()
_PENALTIES = LogitEdits(repetition_penalty=2.0)  # an edit that needs the request's history
_FLAT = StepCosts([(1, 1.0), (100_000, 1.0)])
_FROZEN = (SamplingParams, RequestInfo, Policy)
_MAX_SAMPLED = 1024  # tokens of earlier steps that are kept: more than any steps in flight sample


class RefinementError(AssertionError):
    """The implementation differs from the specification."""


class Packer(Protocol):
    """The interface of the packers in `tests/support/packers.py`."""

    def read(self, plan: StepPlan) -> list[RowSeen]: ...

    def sampled(self, token_ids: Sequence[int]) -> None: ...

    def reset(self) -> None: ...

    def histories(self) -> dict[str, list[int]] | None:
        """The tokens kept of each request that needs its history, by id (S39); None if none are."""


_SAVED = (
    *("scheduler", "requests", "view", "state_view", "histories", "sampled"),
    *("checker", "packers", "account"),
)


class Saved(NamedTuple):
    """The saved state of a pair. Copying is most of a search's time, so only mutable objects are
    copied: neither the specification's state nor frozen objects."""

    state: State
    objects: bytes
    frozen: list[object]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, frozen: list[object]) -> None:
        super().__init__(file, protocol=5)
        self._frozen = frozen

    def persistent_id(self, value: object) -> int | None:
        if type(value) not in _FROZEN:
            return None
        self._frozen.append(value)
        return len(self._frozen) - 1


class OfferedDrafts(DraftObserver):
    """A drafter that proposes what an action offers, which may be what a real drafter proposes.

    Attributes:
        proposed: draft tokens by request.
        wishes: numbers of tokens to draft by request.
        real: follows the steps.
    """

    def __init__(self, max_draft_tokens: int, max_wanted_drafts: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.max_wanted_drafts = max_wanted_drafts
        self.proposed: dict[int, tuple[int, ...]] = {}
        self.wishes: dict[int, int] = {}
        config = SpeculativeConfig(method="suffix", num_speculative_tokens=max_draft_tokens)
        self.real = SuffixDrafter(config, _FLAT, max_corpus_tokens=64)

    def proposals(self, requests: Iterable[RealRequest]) -> list[tuple[int, tuple[int, ...]]]:
        """What the real drafter proposes, by request."""
        requests = list(requests)
        self.real.begin(requests, len(requests), is_settled=True)
        return [(int(r.request_id), tuple(self.real.propose(r))) for r in requests]

    def note(self, request: RealRequest, num_drafts: int, num_accepted: int) -> None:
        self.real.note(request, num_drafts, num_accepted)

    def end(self, request: RealRequest) -> None:
        self.real.end(request)

    def reset(self) -> None:
        self.real.reset()

    def propose(self, request: RealRequest) -> tuple[int, ...]:
        return self.proposed.get(int(request.request_id), ())

    def wanted(self, request: RealRequest) -> int:
        return self.wishes.get(int(request.request_id), 0)


def real_scheduler(scope: Scope) -> Scheduler:
    """The real scheduler with the settings of ``scope``."""
    has_drafts = scope.max_drafts + scope.max_wanted > 0
    scheduler = Scheduler(
        BlockManager(
            scope.num_blocks,
            scope.block_size,
            enable_prefix_caching=scope.caching,
            num_state_slots=scope.num_states,
            state_interval=scope.interval,
        ),
        max_num_seqs=scope.cap,
        max_num_batched_tokens=scope.budget,
        pipeline_depth=scope.depth,
        policy=Policy(
            scope.policy,
            scope.overtaking,
            tokens_per_arrival=scope.cost_unit,
            arrivals_per_priority=scope.ageing,
            credit=scope.credit,
            ticks_per_token=scope.ticks,
            reply_tokens=scope.reply,
        ),
        drafter=OfferedDrafts(scope.max_drafts, scope.max_wanted) if has_drafts else None,
    )
    scheduler.max_num_samples = scope.max_samples or None
    return scheduler


def _real_segments(template: Template) -> list[RealSegment] | None:
    return [
        RealSegment(length, None if content_hash is None else bytes([content_hash]))
        for length, content_hash in template.segments
    ] or None


def _abstract_segments(request: RealRequest) -> tuple[Segment, ...]:
    """The segments in the form that a runner receives."""
    return tuple(
        Segment(length, None if content_hash is None else content_hash[0])
        for length, content_hash, _ in request.info.segments
    )


class Pair:
    """A state of the specification and the real objects, which must be in the same state."""

    def __init__(self, scope: Scope, packers: Sequence[Packer] = ()) -> None:
        self.scope = scope
        self.state = model.initial(scope)
        self.scheduler = real_scheduler(scope)
        self.account = self.scheduler.account = PlanAccount()
        self.requests: list[RealRequest] = []
        self.view = TablesFromPlans()
        self.state_view = StateTablesFromPlans()
        self.histories = HistoriesFromPlans()
        self.sampled: list[int] = []  # by the steps before, newest first: on the device
        self.checker = RunnerView()
        self.packers = list(packers)
        self.num_packed_steps = 0
        self.compare("at the start")

    def enabled(self) -> list[Label]:
        return [label for label, _ in model.actions(self.state, self.scope)]

    def apply(self, label: Label) -> None:
        """Raises RefinementError at the first difference."""
        made = None
        if isinstance(label, Schedule):
            made = model.plan(self.state, self.scope, *label[1:])[0]
        self.state = model.step(self.state, label, self.scope)
        plan = self._apply_to_real(label)
        if made is not None and plan is not None:
            self._compare_plans(made, plan)
            if plan.requests:
                self.view.take(plan)
                self.state_view.take(plan)
                ids = [t if t >= 0 else self.sampled[-1 - t] for t in plan.token_ids]
                self.histories.take(plan, ids)
                self.sampled = [*label.tokens, *self.sampled][:_MAX_SAMPLED]
                self.checker.check(self.scheduler, plan)
                self._compare_packed(plan, label.tokens)
        self.compare(label)

    def _compare_packed(self, plan: StepPlan, tokens: Sequence[int]) -> None:
        if not self.packers:
            return
        expected = [self._row_expected(row) for row in self.state.flight[-1]]
        for packer in self.packers:
            got = packer.read(plan)
            packer.sampled(tokens)
            for row, a, b in zip(plan.requests, expected, got, strict=True):
                if a != b:
                    raise RefinementError(
                        f"{type(packer).__name__}, step {plan.step}, request {row.request_id}: "
                        f"the specification says {a}, packed are {b}"
                    )
            kept, known = packer.histories(), {r: list(ids) for r, ids in self.histories.items()}
            if kept not in (None, known):
                raise RefinementError(
                    f"{type(packer).__name__}, step {plan.step}: the specification's histories are "
                    f"{known}, kept are {kept}"
                )
        self.num_packed_steps += 1

    def _row_expected(self, row: Row) -> RowSeen:
        size = self.scope.block_size
        table = self.state.requests[row.request].table
        positions = list(range(row.start, row.end))
        ids = all_tokens(self.state, row.request)
        ids = ids[: row.start + row.n] + row.drafts if row.drafts else ids
        return RowSeen(
            [ids[p] for p in positions],
            positions,
            [table[p // size] * size + p % size for p in positions],
            list(table[: -(-row.end // size)]),
        )

    def _apply_to_real(self, label: Label) -> StepPlan | None:
        scheduler = self.scheduler
        if isinstance(label, Add):
            template = label.template
            request = RealRequest(
                str(label.request),
                list(template.prompt),
                _PARAMS,
                max_num_tokens=self.scope.limit(template),
                stop_token_ids=frozenset({STOP}),
                priority=template.priority,
                owner=str(template.owner),
                cache_salt=bytes([template.salt]),
                reads_cache=template.reads_cache,
                needs_history=template.needs_history,
                edits=_PENALTIES if template.needs_history else None,
                settled_only=template.settled_only,
                segments=_real_segments(template),
                prediction=template.prompt[::-1] if label.request % 3 == 0 else (),
            )
            siblings = [
                request.sibling(str(label.request + i), 0, None) for i in range(1, template.n)
            ]
            try:
                scheduler.add(request, siblings)
            except InvalidInputError:
                return None
            self.requests += [request, *siblings]
        elif isinstance(label, Schedule):
            if scheduler.drafter is not None:
                scheduler.drafter.proposed = dict(label.offer)
                scheduler.drafter.wishes = dict(label.wishes)
            return scheduler.schedule(label.budget or None)
        elif isinstance(label, Settle):
            scheduler.commit(scheduler.in_flight[0].plan, label.tokens)
        elif isinstance(label, Abort):
            scheduler.abort(str(label.request))
        elif isinstance(label, Pause):
            scheduler.pause(str(label.request))
        elif isinstance(label, ResetCache):
            scheduler.reset_prefix_cache()
        elif isinstance(label, Fail):
            scheduler.reset("error")
            self.view.clear()
            self.state_view.clear()
            self.histories.clear()
            self.sampled.clear()
            self.checker = RunnerView()
            for packer in self.packers:
                packer.reset()
        else:
            scheduler.resume(str(label.request))
        return None

    def _compare_plans(self, made: Plan, plan: StepPlan) -> None:
        expected = ([tuple(row) for row in made.rows], sorted(made.preempted))
        got = (
            _abstract_rows(plan),
            sorted(int(r.request_id) for r in plan.preempted),
        )
        if plan.copies != made.copies:
            raise RefinementError(f"copies: {made.copies} are specified, {plan.copies} planned")
        if got != expected:
            raise RefinementError(f"plan: the specification says {expected}, the code {got}")
        refused = [(str(r), reason) for r, reason in made.refused if reason != "behind"]
        if self.account.refused != refused:
            raise RefinementError(
                f"refused: the specification says {refused}, the code {self.account.refused}"
            )
        if sorted(self.account.preempted_for) != sorted(map(str, made.preempted_for)):
            raise RefinementError(
                f"preempted for {made.preempted_for}, the code {self.account.preempted_for}"
            )

    def compare(self, after: object) -> None:
        expected = _comparable(self.state)
        got = _comparable(abstraction(self))
        for name, a, b in zip(State._fields, expected, got, strict=True):
            if a != b:
                raise RefinementError(
                    f"{name} after {after}: the specification says {a}, the code {b}"
                )

    def save(self) -> Saved:
        objects = {name: getattr(self, name) for name in _SAVED}
        file, frozen = io.BytesIO(), []
        _Pickler(file, frozen).dump(objects)
        return Saved(self.state, file.getvalue(), frozen)

    def load(self, saved: Saved) -> None:
        self.state = saved.state
        unpickler = pickle.Unpickler(io.BytesIO(saved.objects))
        unpickler.persistent_load = saved.frozen.__getitem__  # type: ignore[method-assign]
        vars(self).update(unpickler.load())


def abstraction(pair: Pair) -> State:
    """The specification's view of the real objects, without the contents of blocks and slots."""
    scheduler, requests = pair.scheduler, pair.requests
    blocks = scheduler.blocks
    names: dict[bytes, int] = {}
    for request in requests:
        salt, segments = request.cache_salt[0], _abstract_segments(request)
        exact = prefixes(salt, tuple(request.token_ids), segments)
        for i, (key, _) in enumerate(request.block_keys):
            names[key] = exact[(i + 1) * blocks.block_size - 1]
    return State(
        requests=tuple(_abstract_request(r) for r in requests),
        waiting=tuple(int(r.request_id) for r in scheduler.queues.waiting),
        running=tuple(int(r.request_id) for r in scheduler.queues.running),
        paused=tuple(int(r.request_id) for r in requests if r.state is RequestState.PAUSED),
        flight=tuple(tuple(_abstract_rows(plan)) for plan, _ in scheduler.in_flight),
        refs=tuple(blocks.ref_counts),
        keys=tuple(None if key is None else names[key] for key in blocks.keys),
        index=tuple(sorted((names[key], block) for key, block in blocks.index.items())),
        free=tuple(blocks.free),
        lru=tuple(blocks.lru),
        contents=(),
        view=tuple(sorted((int(name), table) for name, table in pair.view.items())),
        left=tuple(sorted(map(int, scheduler.queues.released))),
        histories=tuple(sorted((int(name), ids) for name, ids in pair.histories.items())),
        pending=tuple(
            sorted(
                int(sibling.request_id)
                for siblings in scheduler.queues.pending.values()
                for sibling in siblings
            )
        ),
        slots=_abstract_slots(blocks.states, names),
        state_view=tuple(sorted((int(name), table) for name, table in pair.state_view.items())),
        **_abstract_shares(scheduler.queues.shares, pair.scope),
    )


def _abstract_rows(plan: StepPlan) -> list[tuple[int, int, int, int, tuple[int, ...], int]]:
    """(request, start, own tokens, samples, draft tokens, tokens to draft) per row."""
    drafts, wanted = plan.drafts(), plan.wanted_drafts
    own = [n - len(drafts.get(row, ())) for row, n in enumerate(plan.num_tokens)]
    return [
        (int(r.request_id), start, n, samples, drafts.get(row, ()), wanted.get(row, 0))
        for row, ((r, start, _, samples), n) in enumerate(zip(plan.rows(), own, strict=True))
    ]


def _abstract_shares(shares: Shares | None, scope: Scope) -> dict[str, Any]:
    if shares is None:
        return {"queued": (), "clock": scope.credit, "shares": ()}
    accounts = sorted((int(owner), account) for owner, account in shares.accounts().items())
    queued = tuple(int(request.request_id) for request in shares.queued())
    return {"queued": queued, "clock": shares.clock, "shares": tuple(accounts)}


def _abstract_slots(states: StateSlots | None, names: dict[bytes, int]) -> Slots:
    if states is None:
        return Slots((), (), (), (), (), ())
    return Slots(
        refs=tuple(states.ref_counts),
        keys=tuple(None if key is None else names[key] for key in states.keys),
        index=tuple(sorted((names[key], slot) for key, slot in states.index.items())),
        free=tuple(states.free),
        lru=tuple(states.lru),
        contents=(),
    )


def _abstract_request(request: RealRequest) -> Request:
    place = request.rank >> SENIORITY_BITS
    return Request(
        tokens=tuple(request.token_ids),
        num_prompt=request.num_prompt_tokens,
        limit=request.max_num_tokens,
        salt=request.cache_salt[0],
        rank=(place, request.seniority),
        reason=request.finish_reason or "",
        computed=request.num_computed,
        dispatched=request.num_dispatched,
        total=request.num_total,
        table=tuple(request.block_table),
        published=request.num_published,
        reads_cache=request.reads_cache,
        needs_history=request.info.needs_history,
        settled_only=request.settled_only,
        leader=-1 if request.leader is None else int(request.leader.request_id),
        states=tuple(request.state_table),
        owner=int(request.owner),
        charge=request.charge,
        segments=_abstract_segments(request),
    )


def _comparable(state: State) -> State:
    """The state without fields that only the specification has (contents, tokens that are not
    revealed yet), and without counters of finished requests that own nothing."""
    requests = tuple(
        r._replace(computed=0, dispatched=0, total=0, published=0)
        if r.reason and not r.table
        else r._replace(published=0)
        if r.reason
        else r
        for r in (r._replace(turn=-1) for r in state.requests)
    )
    flight = tuple(
        tuple(
            (row.request, row.start, row.n, len(row.samples), row.drafts, row.wanted)
            if isinstance(row, Row)
            else row
            for row in step
        )
        for step in state.flight
    )
    slots = state.slots._replace(contents=())
    return state._replace(requests=requests, flight=flight, contents=(), slots=slots)


def explore(scope: Scope, max_states: int | None = None) -> tuple[int, int, int]:
    """Drive the real objects and the CPU packer through every enabled action in every reachable
    state of ``scope``.

    Returns:
        The numbers of states, transitions and packed steps.
    """
    from tests.support.packers import (
        CpuPacker,
    )  # it imports torch, which the mutants' kill suite does not

    packer = CpuPacker(num_blocks=scope.num_blocks, block_size=scope.block_size)
    pair = Pair(scope, [packer])
    seen = {pair.state}
    frontier = [pair.save()]
    num_transitions = 0
    while frontier:
        saved = frontier.pop()
        pair.load(saved)
        for i, label in enumerate(pair.enabled()):
            if i:
                pair.load(saved)
            pair.apply(label)
            num_transitions += 1
            if pair.state not in seen and (max_states is None or len(seen) < max_states):
                seen.add(pair.state)
                frontier.append(pair.save())
    return len(seen), num_transitions, pair.num_packed_steps
