"""Helpers of the scheduler's unit tests: a small scheduler, short requests, one checked step."""

from __future__ import annotations

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.invariants import check_plan, check_state
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler


def make_scheduler(num_blocks=16, block_size=2, max_num_seqs=4, budget=16, **more) -> Scheduler:
    return Scheduler(
        BlockManager(
            num_blocks,
            block_size,
            enable_prefix_caching=more.pop("caching", True),
            num_state_slots=more.pop("num_state_slots", 0),
            state_interval=more.pop("state_interval", 0),
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **more,
    )


def add(
    scheduler: Scheduler, name: str, num_prompt_tokens: int, num_outputs=4, token=None, **more
) -> Request:
    first = ord(name[0]) if token is None else token
    request = Request(
        name,
        [first] * num_prompt_tokens,
        SamplingParams(),
        max_num_tokens=num_prompt_tokens + num_outputs,
        **more,
    )
    scheduler.add(request)
    return request


def rows(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(r.request_id, start, n, sampled) for r, start, n, sampled in plan.rows()]


def step(scheduler: Scheduler, token: int = 1) -> StepPlan:
    plan = scheduler.schedule()
    check_state(scheduler)
    check_plan(scheduler, plan)
    if plan.requests:
        scheduler.commit(plan, [token] * plan.num_sampled)
        check_state(scheduler)
    return plan
