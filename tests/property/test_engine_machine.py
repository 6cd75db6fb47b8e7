"""Hypothesis drives the whole engine with the content model through random actions.

The tokens of each request must equal those of the same request run alone (T1). The structural
properties must hold after every step.
"""

from __future__ import annotations

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.invariants import check_plan, check_state
from pagespec.engine.policy import Policy
from pagespec.engine.request import Request, RequestState
from pagespec.engine.sampling_params import SamplingParams
from pagespec.engine.scheduler import Scheduler
from pagespec.engine.segments import Segment
from pagespec.errors import EngineError
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner, stream_alone

VOCAB_SIZE = 3
STOP_TOKEN = 2 * TOKEN_STRIDE
_PARAMS = SamplingParams()


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(2, 12),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 8),
        pipeline_depth=st.integers(0, 2),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "shortest_first", "priority", "fair"]),
        max_overtakes=st.integers(0, 4),
        spare_states=st.sampled_from([-1, 0, 2]),
        blocks_per_interval=st.integers(1, 3),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        spare_budget: int,
        pipeline_depth: int,
        caching: bool,
        policy: str,
        max_overtakes: int,
        spare_states: int,
        blocks_per_interval: int,
    ) -> None:
        states = {
            "num_state_slots": max_num_seqs + 1 + spare_states if spare_states >= 0 else 0,
            "state_interval": block_size * blocks_per_interval,
        }
        self.scheduler = Scheduler(
            BlockManager(num_blocks, block_size, enable_prefix_caching=caching, **states),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_budget,
            pipeline_depth=pipeline_depth,
            policy=Policy(policy, max_overtakes),
        )
        self.runner = ContentRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=VOCAB_SIZE,
            pipeline_depth=pipeline_depth,
            **states,
        )
        dispatch = self.runner.dispatch

        def checked_dispatch(plan):
            check_state(self.scheduler)
            check_plan(self.scheduler, plan)
            return dispatch(plan)

        self.runner.dispatch = checked_dispatch
        self.engine = Engine(self.scheduler, self.runner, takes_contents=True)
        self.capacity = num_blocks * block_size + 1
        self.all: list[Request] = []
        self.ended: dict[Request, str] = {}

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20),
        num_outputs=st.integers(1, 8),
        has_stop=st.booleans(),
        salt=st.sampled_from([b"", b"", b"a"]),
        priority=st.integers(0, 1),
        reads_cache=st.sampled_from([True, True, False]),
        needs_history=st.booleans(),
        settled_only=st.sampled_from([False, False, True]),
        num_siblings=st.sampled_from([0, 0, 1, 3]),
        segments=st.just([])
        | st.lists(
            st.tuples(st.integers(1, 9), st.sampled_from([None, b"a", b"a", b"b"])), max_size=4
        ),
    )
    def add(
        self,
        prompt: list[int],
        num_outputs: int,
        has_stop: bool,
        salt: bytes,
        priority: int,
        reads_cache: bool,
        needs_history: bool,
        settled_only: bool,
        num_siblings: int,
        segments: list[tuple[int, bytes | None]],
    ) -> None:
        prompt = [token * TOKEN_STRIDE for token in prompt[: self.capacity - 1]]
        parts, rest = [], len(prompt)
        for length, content_hash in segments:
            if rest:
                parts.append(Segment(min(length, rest), content_hash))
                rest -= parts[-1].length
        if rest:
            parts.append(Segment(rest))
        if segments:  # placeholders are alike
            prompt = [0] * len(prompt)
        request = Request(
            str(len(self.all)),
            prompt,
            _PARAMS,
            max_num_tokens=min(len(prompt) + num_outputs, self.capacity),
            stop_token_ids=frozenset({STOP_TOKEN} if has_stop else ()),
            seed=len(self.all) % 2,
            priority=priority,
            owner=str(priority),
            cache_salt=salt,
            reads_cache=reads_cache,
            needs_history=needs_history,
            settled_only=settled_only,
            segments=parts,
        )
        number = len(self.all)
        siblings = [
            request.sibling(str(number + i), (number + i) % 2, None)
            for i in range(1, num_siblings + 1)
        ]
        self.engine.add(request, siblings=siblings)
        self.all += [request, *siblings]

    def _live(self, index: int) -> Request:
        live = list(self.scheduler.requests.values())
        return live[index % len(live)]

    @precondition(lambda self: self.engine.has_work)
    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.engine.has_work:
                self.engine.step()
                check_state(self.scheduler)

    @precondition(lambda self: self.scheduler.requests)
    @rule(index=st.integers(0, 20), really=st.integers(0, 3))
    def abort(self, index: int, really: int) -> None:
        if really == 0:  # rarely, or nothing ever grows
            self.engine.abort(self._live(index).request_id)

    @precondition(lambda self: self.scheduler.requests)
    @rule(index=st.integers(0, 20))
    def pause(self, index: int) -> None:
        self.scheduler.pause(self._live(index).request_id)

    @precondition(lambda self: self.scheduler.requests)
    @rule(index=st.integers(0, 20))
    def resume(self, index: int) -> None:
        self.scheduler.resume(self._live(index).request_id)

    @precondition(lambda self: self.scheduler.requests)
    @rule(really=st.integers(0, 2))
    def reset_prefix_cache(self, really: int) -> None:
        if really == 0:
            self.engine.reset_prefix_cache()
            self.runner.change_weights()
            check_state(self.scheduler)

    @precondition(lambda self: self.scheduler.requests)
    @rule()
    def settle(self) -> None:
        self.engine.settle()
        assert not self.scheduler.in_flight
        check_state(self.scheduler)

    @precondition(lambda self: self.scheduler.requests)
    @rule(really=st.integers(0, 7))
    def fail(self, really: int) -> None:
        if really == 0:
            self.runner.fail_at_step = 0
            with contextlib.suppress(EngineError):
                while self.engine.has_work:
                    self.engine.step()
            self.runner.fail_at_step = None
            check_state(self.scheduler)

    @invariant()
    def streams_are_those_of_each_request_alone(self) -> None:
        for request in self.all:
            outputs = request.output_token_ids
            alone = stream_alone(
                request.token_ids[: request.num_prompt_tokens],
                request.max_num_tokens,
                seed=request.seed,
                vocab_size=VOCAB_SIZE,
                stop_token_ids=request.stop_token_ids,
                salt=int.from_bytes(request.cache_salt, "little"),
                needs_history=request.info.needs_history,
                segments=request.info.segments,
            )
            assert outputs == alone[: len(outputs)], f"T1: {request}"
            if request.finish_reason in ("stop", "length"):
                assert outputs == alone, f"S25: {request}"
            if request in self.ended:
                assert self.ended[request] == request.finish_reason, "S24"
            elif request.state is RequestState.FINISHED:
                self.ended[request] = request.finish_reason

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request in list(self.scheduler.requests.values()):
            self.scheduler.resume(request.request_id)
        num_steps_max = 50 + 40 * sum(r.max_num_tokens for r in self.all)
        for _ in range(num_steps_max):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.engine.has_work, "L1: some request never finishes"
        assert all(r.finish_reason is not None for r in self.all), "L1"
        self.streams_are_those_of_each_request_alone()
        check_state(self.scheduler)  # S14 among them: every block came back


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(stateful_step_count=40)
