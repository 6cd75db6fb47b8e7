"""Hypothesis drives the real scheduler, block manager and packers in lockstep with the
specification.

Each action of the specification is one rule. Pools range from tiny to large.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagespec.engine.invariants import check_state
from spec import model
from spec.state import (
    Abort,
    Add,
    Fail,
    Pause,
    ResetCache,
    Resume,
    Schedule,
    Scope,
    Segment,
    Template,
    contents_by_position,
)
from tests.support.packers import CpuPacker
from tests.support.refinement import Packer, Pair


def segments_of(cuts: list[tuple[int, int | None]], length: int) -> tuple[Segment, ...]:
    """Segments of a prompt: as many of the drawn (length, content) pairs as fit, then a token
    segment."""
    segments: list[Segment] = []
    for most, content in cuts:
        if length:
            segments.append(Segment(min(most, length), content))
            length -= segments[-1].length
    return (*segments, Segment(length)) if length else tuple(segments)


class LockstepMachine(RuleBasedStateMachine):
    max_depth = 2
    max_scale = 4
    max_drafts = 3

    def packers(self, scope: Scope) -> list[Packer]:
        return [CpuPacker(num_blocks=scope.num_blocks, block_size=scope.block_size)]

    @initialize(
        is_large=st.booleans(),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(2, 6),
        cap=st.integers(1, 4),
        spare_budget=st.integers(0, 6),
        depth=st.integers(0, 2),
        policy=st.sampled_from(["fcfs", "shortest_first", "priority", "fair", "fair"]),
        credit=st.integers(0, 12),
        overtaking=st.integers(0, 3),
        caching=st.booleans(),
        spare_states=st.sampled_from([-1, -1, 0, 1, 3]),
        blocks_per_interval=st.integers(1, 3),
        max_drafts=st.sampled_from([0, 1, 2, 3]),
        max_wanted=st.sampled_from([0, 0, 1, 3]),
        spare_samples=st.sampled_from([None, None, 0, 1, 3]),
    )
    def start(
        self,
        is_large: bool,
        block_size: int,
        num_blocks: int,
        cap: int,
        spare_budget: int,
        depth: int,
        policy: str,
        credit: int,
        overtaking: int,
        caching: bool,
        spare_states: int,
        blocks_per_interval: int,
        max_drafts: int,
        max_wanted: int,
        spare_samples: int | None,
    ) -> None:
        scale = self.max_scale if is_large else 1
        scope = Scope(
            "drawn",
            (),
            num_requests=12 * scale,
            num_blocks=num_blocks * scale,
            block_size=block_size,
            budget=cap * scale + spare_budget * scale,
            cap=cap * scale,
            max_model_len=num_blocks * scale * block_size + 1,
            depth=min(depth, self.max_depth),
            policy=policy,
            overtaking=overtaking if policy not in ("fcfs", "fair") else 0,
            credit=credit if policy == "fair" else 0,
            ticks=2,
            reply=4,
            cost_unit=2,
            caching=caching,
            num_states=cap * scale + 1 + spare_states * scale if spare_states >= 0 else 0,
            interval=block_size * blocks_per_interval,
            max_drafts=min(max_drafts, self.max_drafts),
            max_wanted=min(max_wanted, self.max_drafts),
            max_samples=0 if spare_samples is None else cap * scale + spare_samples,
        )
        self.pair = Pair(scope, self.packers(scope))

    @property
    def state(self):
        return self.pair.state

    @property
    def num_requests(self) -> int:
        return len(self.state.requests) if hasattr(self, "pair") else 0

    @precondition(lambda self: self.num_requests + 3 <= self.pair.scope.num_requests)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        shared=st.integers(0, 40),
        max_tokens=st.integers(1, 8),
        salt=st.sampled_from([0, 0, 1]),
        priority=st.integers(0, 2),
        reads_cache=st.sampled_from([True, True, False]),
        needs_history=st.booleans(),
        settled_only=st.sampled_from([False, False, True]),
        n=st.sampled_from([1, 1, 2, 3]),
        owner=st.integers(0, 2),
        cuts=st.just([])
        | st.lists(
            st.tuples(st.integers(1, 9), st.sampled_from([None, 1, 1, 2])), min_size=1, max_size=5
        ),
        changes_contents=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        shared: int,
        max_tokens: int,
        salt: int,
        priority: int,
        reads_cache: bool,
        needs_history: bool,
        settled_only: bool,
        n: int,
        owner: int,
        cuts: list[tuple[int, int | None]],
        changes_contents: bool,
    ) -> None:
        if self.state.requests:  # begin as an earlier request did, so that the cache is met
            earlier = self.state.requests[shared % len(self.state.requests)]
            old = earlier.tokens
            prompt = list(old[: shared % (len(old) + 1)]) + prompt
            if not changes_contents:
                cuts = [*earlier.segments, *cuts]
        segments = segments_of(cuts, len(prompt))
        contents = contents_by_position(segments)
        if changes_contents:  # other content, at the places of an earlier request's perhaps
            prompt = [0 if p in contents else token for p, token in enumerate(prompt)]
        flags = reads_cache, needs_history, settled_only
        template = Template(tuple(prompt), max_tokens, salt, priority, *flags, n, owner, segments)
        self.pair.apply(Add(len(self.state.requests), template))

    @precondition(lambda self: model.can_schedule(self.state, self.pair.scope))
    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        self.schedule(data)

    def schedule(self, data: st.DataObject) -> None:
        scope = self.pair.scope
        least = max(1, len(self.state.running))
        budget = data.draw(st.just(0) | st.integers(least, max(least, scope.budget)))
        made, _ = model.plan(self.state, scope, budget)
        token = st.sampled_from([0, 0, 0, 1, 1, 1, 2])
        offer = []
        if scope.max_drafts:  # more of them than have room, and for rows that may have none
            drafts = st.lists(token, max_size=scope.max_drafts + 1).map(tuple)
            offer = [(row.request, data.draw(drafts)) for row in made.rows]
            drafter = self.pair.scheduler.drafter
            if drafter is not None and data.draw(st.booleans()):
                offer = drafter.proposals(self.pair.scheduler.requests.values())
        wishes = []
        if scope.max_wanted:
            number = st.integers(0, scope.max_wanted + 1)
            wishes = [(row.request, data.draw(number)) for row in made.rows]
        label = Schedule((), budget, tuple(offer), tuple(wishes))
        made, _ = model.plan(self.state, scope, *label[1:])
        count = sum(row.num_samples for row in made.rows)
        tokens = data.draw(st.lists(token, min_size=count, max_size=count))
        self.pair.apply(label._replace(tokens=tuple(tokens)))
        check_state(self.pair.scheduler)

    @precondition(lambda self: self.state.running or self.state.waiting)
    @rule(data=st.data(), num_steps=st.integers(2, 8))
    def run(self, data: st.DataObject, num_steps: int) -> None:
        """Steps as an engine runs them, so that requests grow."""
        for _ in range(num_steps):
            if model.can_schedule(self.state, self.pair.scope):
                self.schedule(data)
            if len(self.state.flight) > self.pair.scope.depth:
                self.settle()

    @precondition(lambda self: self.state.flight)
    @rule()
    def settle(self) -> None:
        self.pair.apply(model.settle_label(self.state))
        check_state(self.pair.scheduler)

    @precondition(lambda self: self.state.requests)
    @rule(index=st.integers(0, 50), really=st.integers(0, 3))
    def abort(self, index: int, really: int) -> None:
        if really == 0:  # rarely, or nothing ever grows
            self.pair.apply(Abort(index % len(self.state.requests)))

    @precondition(lambda self: self.state.running or self.state.waiting)
    @rule(index=st.integers(0, 50), really=st.integers(0, 1))
    def pause(self, index: int, really: int) -> None:
        if really == 0:
            state = self.state
            live = (*state.running, *state.waiting, *state.pending, *state.queued)
            self.pair.apply(Pause(live[index % len(live)]))

    @precondition(lambda self: self.state.requests and not self.state.flight)
    @rule(really=st.integers(0, 2))
    def reset_cache(self, really: int) -> None:
        if really == 0:
            self.pair.apply(ResetCache())
            check_state(self.pair.scheduler)

    @precondition(lambda self: self.state.requests)
    @rule(really=st.integers(0, 9))
    def fail(self, really: int) -> None:
        if really == 0:
            self.pair.apply(Fail())
            check_state(self.pair.scheduler)

    @precondition(lambda self: self.state.paused)
    @rule(index=st.integers(0, 50))
    def resume(self, index: int) -> None:
        self.pair.apply(Resume(self.state.paused[index % len(self.state.paused)]))


TestLockstepMachine = LockstepMachine.TestCase
TestLockstepMachine.settings = settings(stateful_step_count=40)
