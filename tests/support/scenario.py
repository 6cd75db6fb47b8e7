"""One seeded random run of the real engine with the content model; every property is checked.

The Hypothesis machines are thorough; these runs are quick. The kill suite of the mutants and other
quick checks run thousands of them. A failure raises ``PropertyError`` with the property's name.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from pagespec.engine.block_manager import BlockManager, OutOfBlocksError
from pagespec.engine.core import Engine
from pagespec.engine.invariants import InvariantError, RunnerView, check_plan, check_state
from pagespec.engine.plan import StepPlan
from pagespec.engine.policy import Policy
from pagespec.engine.request import Request, RequestState
from pagespec.engine.runner import DraftObserver
from pagespec.engine.sampling_params import SamplingParams
from pagespec.engine.scheduler import Scheduler
from pagespec.engine.segments import Segment
from pagespec.errors import EngineError, InvalidInputError
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner, stream_alone

VOCAB_SIZE = 3
STOP_TOKEN = 2 * TOKEN_STRIDE
PropertyError = InvariantError
_PARAMS = SamplingParams()


class MixedDrafts(DraftObserver):
    """A drafter whose tokens are right, wrong or random in turn. They depend only on the request
    and its length, so a plan is still a function of the state. So do the numbers of tokens that it
    lets the runner draft.

    Attributes:
        offered: the latest tokens that the runner drafted, by request.
    """

    def __init__(self, seed: int, max_draft_tokens: int, max_wanted_drafts: int = 0) -> None:
        self._seed, self.max_draft_tokens = seed, max_draft_tokens
        self.max_wanted_drafts = max_wanted_drafts
        self.offered: dict[str, tuple[int, Sequence[int]]] = {}

    def propose(self, request: Request) -> list[int]:
        known = request.token_ids
        rng = random.Random(f"drafts of {self._seed}: {request.request_id}, {len(known)}")
        right = _alone(request)[len(known) - request.num_prompt_tokens :]
        right_for = rng.choice([0, 1, 2, len(right)])
        any_ids = [rng.randrange(VOCAB_SIZE) * TOKEN_STRIDE for _ in range(rng.randint(0, 5))]
        end, offered = self.offered.get(request.request_id, (0, ()))
        return list(offered) if end == len(known) else right[:right_for] + any_ids

    def wanted(self, request: Request) -> int:
        rng = random.Random(f"wishes of {self._seed}: {request.request_id}, {request.num_total}")
        return rng.randint(0, self.max_wanted_drafts + 1)

    def offer(self, request: Request, token_ids: Sequence[int]) -> None:
        assert request.finish_reason is None
        self.offered[request.request_id] = len(request.token_ids), token_ids


class Scenario:
    """Settings, requests and interventions drawn from one seed.

    Args:
        has_states: the model has recurrent layers; None draws it.
        may_be_fair: some scenarios have the policy "fair".
        has_drafts: requests have draft tokens; None draws it.
        has_contents: some prompts have content segments; None draws it.
        has_wishes: in some scenarios with drafts, the runner drafts tokens behind rows.
    """

    def __init__(
        self,
        seed: int,
        *,
        has_states: bool | None = None,
        may_be_fair: bool = True,
        has_drafts: bool | None = None,
        has_contents: bool | None = None,
        has_wishes: bool = True,
    ) -> None:
        rng = self.rng = random.Random(seed)
        # Crowded: short prompts and long outputs in a small pool, so that running requests grow
        # into one another's blocks and preempt.
        self.is_crowded = rng.random() < 0.5
        self.block_size = rng.choice([1, 1, 2] if self.is_crowded else [1, 2, 2, 3, 4])
        self.num_blocks = rng.randint(4, 8) if self.is_crowded else rng.randint(2, 9)
        self.capacity = self.num_blocks * self.block_size + 1
        max_num_seqs = rng.randint(3, 5) if self.is_crowded else rng.randint(1, 5)
        depth = rng.choice([0, 0, 1, 2])
        drawn = random.Random(f"states of {seed}")  # its own, so that the rest stays as it is
        if has_states is None:
            has_states = drawn.random() < 0.4
        states = {
            "num_state_slots": has_states * (max_num_seqs + drawn.choice([1, 1, 2, 4])),
            "state_interval": self.block_size * drawn.choice([1, 1, 2, 3]),
        }
        if has_drafts is None:
            has_drafts = drawn.random() < 0.6
        most_wanted = random.Random(f"wishes of {seed}").choice([0, 1, 3]) if has_wishes else 0
        most = drawn.randint(1, 4)
        self.drafter = MixedDrafts(seed, most, most_wanted) if has_drafts else None
        self.owners = random.Random(f"owners of {seed}")
        self.is_fair = self.owners.random() < 0.4 and may_be_fair
        caching = rng.random() < 0.8
        budget = max_num_seqs + rng.randint(0, 8)
        name = rng.choice(["fcfs", "fcfs", "shortest_first", "priority"])
        self.scheduler = Scheduler(
            BlockManager(
                self.num_blocks,
                self.block_size,
                enable_prefix_caching=caching,
                **states,
            ),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            pipeline_depth=depth,
            policy=Policy("fair" if self.is_fair else name, 3, credit=300, reply_tokens=3),
            drafter=self.drafter,
        )
        self.runner = ContentRunner(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            vocab_size=VOCAB_SIZE,
            pipeline_depth=depth,
            max_draft_tokens=4,
            **states,
        )
        self.contents = random.Random(f"segments of {seed}")
        draws_contents = self.contents.random() < 0.5
        self.has_contents = draws_contents if has_contents is None else has_contents
        self.engine = self.new_engine()
        self.view = RunnerView()
        reset = self.runner.reset
        self.runner.reset = lambda: self._forget_view(reset)  # type: ignore[method-assign]
        schedule = self.scheduler.schedule
        self.scheduler.schedule = lambda *budget: self._watched(schedule, *budget)  # type: ignore[method-assign]
        self.reads_cache, self.max_n = 0.8, 4  # how many requests do; most continuations
        self.has_settled_only = True  # every third request
        self.requests: list[Request] = []
        self.prompts: dict[Request, list[int]] = {}
        self.reasons: dict[Request, str] = {}
        self.first_served: list[Request] = []
        self.has_intervened = False

    def new_engine(self, **options: Any) -> Engine:
        """A new engine over the same scheduler and runner; ``options``: of ``Engine``."""
        return Engine(self.scheduler, self.runner, takes_contents=self.has_contents, **options)

    def _forget_view(self, reset: Callable[[], None]) -> None:
        self.view = RunnerView()
        reset()

    def run(self) -> None:
        """Raises PropertyError, or any error of the engine itself."""
        rng = self.rng
        num_requests = rng.randint(1, 8)
        if self.is_crowded:
            for _ in range(num_requests):
                self.add()
        for _ in range(rng.randint(5, 60)):
            action = rng.random()
            num_prompts = sum(request.leader is None for request in self.requests)
            if num_prompts < num_requests and action < 0.5:
                self.add()
            elif self.scheduler.requests and action < (0.2 if self.is_crowded else 0.62):
                self.intervene(rng.choice(list(self.scheduler.requests)))
            elif self.engine.has_work:
                self.step()
        self.finish()

    def add(self) -> None:
        rng = self.rng
        length = rng.randint(1, min(3 if self.is_crowded else 14, self.capacity - 1))
        prompt = [rng.randrange(2) * TOKEN_STRIDE for _ in range(length)]
        origin = None  # begins alike
        if self.requests and rng.random() < 0.4:  # meet the cache, block for block
            origin = rng.choice(self.requests)
            old = origin.token_ids
            prompt = (old[: rng.randint(1, len(old))] + prompt)[: self.capacity - 1]
            if rng.random() < 0.5:
                whole = len(prompt) // self.block_size * self.block_size
                prompt = prompt[:whole] or prompt
        if self.prompts and rng.random() < 0.1:  # the very list object of an earlier request
            prompt = rng.choice(list(self.prompts.values()))
        segments = self._segments(len(prompt), origin) if self.has_contents else None
        request = Request(
            str(len(self.requests)),
            prompt,
            _PARAMS,
            max_num_tokens=min(len(prompt) + rng.randint(1, 8), self.capacity),
            stop_token_ids=frozenset({STOP_TOKEN} if rng.random() < 0.5 else ()),
            seed=rng.randrange(2),
            priority=rng.randrange(2),
            owner=str(self.owners.randrange(3)),
            cache_salt=rng.choice([b"", b"", b"a"]),
            reads_cache=rng.random() < self.reads_cache,
            needs_history=rng.random() < 0.3,
            settled_only=self.has_settled_only and len(self.requests) % 3 == 0,
            segments=segments,
        )
        siblings = [
            request.sibling(str(len(self.requests) + i), rng.randrange(2), None)
            for i in range(1, min(self.max_n, rng.choice([1, 1, 1, 1, 2, 4])))
        ]
        self.engine.add(request, siblings=siblings)
        for arrival in (request, *siblings):
            self.prompts[arrival] = prompt
            self.requests.append(arrival)
        self._refusals_change_nothing()

    def _segments(self, length: int, origin: Request | None) -> list[Segment]:
        """Segments of a prompt with so many positions. They often repeat those of an earlier
        request, as far as they fit, so that prompts share content or differ at the same positions.
        """
        rng, segments = self.contents, []
        if self.requests and rng.random() < 0.8:
            segments = list((origin or rng.choice(self.requests)).info.segments)
            if rng.random() < 0.3:
                segments = [Segment(n, h and rng.choice([h, b"b"])) for n, h, _ in segments]
        kept = []
        for segment in segments:
            if segment.length <= length:
                kept.append(segment)
                length -= segment.length
        while length:
            content_hash = rng.choice([None, b"a", b"a", b"b", b"ab"])
            kept.append(Segment(rng.randint(1, length), content_hash))
            length -= kept[-1].length
        return kept

    def _refusals_change_nothing(self) -> None:
        blocks = self.scheduler.blocks
        before = copy.deepcopy((blocks.free, blocks.lru, blocks.ref_counts))
        greedy = Request("greedy", [0], _PARAMS, max_num_tokens=2)
        try:
            blocks.allocate(greedy, blocks.num_available + 1)
        except OutOfBlocksError:
            pass
        else:
            raise PropertyError("S13", "more blocks were given than there are")
        if (blocks.free, blocks.lru, blocks.ref_counts) != before:
            raise PropertyError("S13", "a failed allocation changed the pool")
        too_long = Request("x", [0], _PARAMS, max_num_tokens=self.capacity + 1)
        try:
            self.scheduler.add(too_long)
        except InvalidInputError:
            return
        raise PropertyError("S30", "a request that can never fit was admitted")

    def intervene(self, request_id: str) -> None:
        self.has_intervened = True
        action = self.rng.random()
        if action < 0.25:
            self.engine.abort(request_id)
            if self.scheduler.abort(request_id) is not None:
                raise PropertyError("S26", "a second abort did something")
        elif action < 0.3:
            self.runner.fail_at_step = 0
            try:
                while self.engine.has_work:
                    self.step()
            except EngineError:
                pass
            self.runner.fail_at_step = None
        elif action < 0.65:
            self.engine.pause(request_id)
        elif action < 0.95:
            self.engine.resume(request_id)
        else:
            self.reset_prefix_cache()
        check_state(self.scheduler)

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()
        self.runner.change_weights()
        blocks = self.scheduler.blocks
        if blocks.index or len(blocks.free) < self.num_blocks or self.scheduler.in_flight:
            raise PropertyError("S41", "after a reset of the prefix cache something is left of it")

    def step(self) -> None:
        emitted = {r: len(r.token_ids) for r in self.requests}
        ended = {r for r in self.requests if r.finish_reason is not None}
        self.engine.step()
        check_state(self.scheduler)
        for request in self.requests:
            if request in ended and len(request.token_ids) != emitted[request]:
                raise PropertyError("S24", f"{request} emitted after its end")
            self._check_stream(request)

    def finish(self) -> None:
        for request_id in list(self.scheduler.requests):
            self.engine.resume(request_id)
        num_steps_max = 50 + 40 * sum(r.max_num_tokens for r in self.requests)
        while self.engine.has_work:
            num_steps_max -= 1
            if num_steps_max < 0:
                raise PropertyError("L1", "requests go on without end")
            self.step()
        for request in self.requests:
            if request.finish_reason is None:
                raise PropertyError("L1", f"{request} never finished")
        check_state(self.scheduler)

    def _check_stream(self, request: Request) -> None:
        outputs = request.output_token_ids
        if self.prompts[request] != request.token_ids[: request.num_prompt_tokens]:
            raise PropertyError("S6", f"the prompt of {request} is shared and was changed")
        alone = _alone(request)
        if len(outputs) > len(alone):
            raise PropertyError("S25", f"{request} went past its end")
        if outputs != alone[: len(outputs)]:
            raise PropertyError("T1", f"{request} differs from its run alone")
        if request.finish_reason in ("stop", "length"):
            if len(outputs) != len(alone):
                raise PropertyError("S25", f"{request} ended early")
            reason = "stop" if alone[-1] in request.stop_token_ids else "length"
            if request.finish_reason != reason:
                raise PropertyError("S25", f"{request} ended with the wrong reason")
        if self.reasons.setdefault(request, request.finish_reason or "") not in (
            "",
            request.finish_reason,
        ):
            raise PropertyError("S24", f"{request} ended twice")
        self.reasons[request] = request.finish_reason or ""

    # What a single plan must be like, given the state before it ---------------------------------

    def _watched(self, schedule, *budget: int | None) -> StepPlan:
        scheduler = self.scheduler
        twin = _twin(scheduler)
        num_available = scheduler.blocks.num_available
        num_waiting = len(scheduler.queues.waiting)
        running = list(scheduler.queues.running)
        tables = {r: list(r.block_table) for r in running}
        refs = list(scheduler.blocks.ref_counts)
        num_to_come = {r: r.num_total for r in running}
        decodes = [
            r
            for r in running
            if r.num_total - r.num_dispatched == 1
            and r.num_total != r.max_num_tokens
            and not r.must_settle
        ]
        plan = schedule(*budget)
        check_state(scheduler)
        check_plan(scheduler, plan)
        self.view.check(scheduler, plan)
        if list(plan.rows()) and _shape(twin.schedule(*budget)) != _shape(plan):
            raise PropertyError("S31", "the same state gave another plan")
        rows = set(scheduler.in_flight[-1].requests) if plan.requests else set()
        names = {info.request_id for info in plan.preempted}
        preempted = [request for request in running if request.request_id in names]
        for victim in preempted:
            gave = any(
                refs[block] == sum(block in tables[v] for v in preempted)
                for block in tables[victim]
            )
            if not gave:
                raise PropertyError("S21", f"{victim} was preempted for nothing")
            if any(r.rank > victim.rank and r in preempted for r in rows):
                raise PropertyError("L3", f"{victim} lost its blocks to a younger one")
        if preempted and min(r.rank for r in preempted) < min(r.rank for r in rows):
            raise PropertyError("L3", "the oldest was preempted")
        # A table may be longer: rejected draft tokens leave blocks.
        num_wanted = sum(
            max(0, -(-num_to_come[r] // self.block_size) - len(tables[r])) for r in running
        )
        if num_available >= num_wanted and not num_waiting:
            for request in decodes:
                if request.state is RequestState.RUNNING and request not in rows:
                    name = "L9" if request.settled_only else "L6"
                    raise PropertyError(name, f"{request} got no token")
        if scheduler.has_work and not rows and not scheduler.in_flight:
            raise PropertyError("L2", "nothing is computed though there is work")
        self._check_order(rows)
        return plan

    def _check_order(self, rows: set[Request]) -> None:
        """L5: apart from pauses, no request is first served after more than K later arrivals."""
        for request in sorted(rows, key=lambda r: r.rank):
            if request not in self.first_served:
                self.first_served.append(request)
        if self.has_intervened:
            return
        served = {r: i for i, r in enumerate(self.first_served)}
        policy = self.scheduler.policy
        bound = 0 if policy.name in ("fcfs", "fair") else policy.max_overtakes
        waiting = (RequestState.WAITING, RequestState.QUEUED)
        for request in self.requests:
            if request.state not in waiting or request in served:
                continue
            if request.leader is not None:
                continue  # others were served while its leader computed the prompt for it
            rivals = [r for r in served if not policy.is_fair or r.owner == request.owner]
            num_overtakes = sum(r.seniority > request.seniority for r in rivals)
            if num_overtakes > bound:
                raise PropertyError("L5", f"{request} was overtaken {num_overtakes} times")


def _alone(request: Request) -> list[int]:
    """The outputs of ``request`` when it runs alone."""
    return stream_alone(
        request.token_ids[: request.num_prompt_tokens],
        request.max_num_tokens,
        seed=request.seed,
        vocab_size=VOCAB_SIZE,
        stop_token_ids=request.stop_token_ids,
        salt=int.from_bytes(request.cache_salt, "little"),
        needs_history=request.info.needs_history,
        segments=request.info.segments,
    )


def _twin(scheduler: Scheduler) -> Scheduler:
    twin = copy.copy(scheduler)
    twin.__dict__.pop("schedule", None)
    return copy.deepcopy(twin)


def _shape(plan: StepPlan) -> tuple[object, ...]:
    rows = tuple((r.request_id, start, n, s) for r, start, n, s in plan.rows())
    preempted = tuple(r.request_id for r in plan.preempted)
    told = (plan.tables, plan.new_blocks, plan.released, plan.prefixes, tuple(plan.token_ids))
    return rows, preempted, told, plan.copies
