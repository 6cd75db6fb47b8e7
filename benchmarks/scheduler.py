"""Host time of the scheduler: microseconds of schedule + commit per step, without a model.

    python benchmarks/scheduler.py

Two tables: steady decodes (the state of an engine most of the time), and the admission of long
prompts of which half is shared. A runner's tokens are constants here.
"""

from __future__ import annotations

import platform
import random
import statistics
import time

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler

BLOCK_SIZE = 16
PARAMS = SamplingParams()


def _scheduler(num_blocks: int, max_num_seqs: int, budget: int) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )


def _timed_step(scheduler: Scheduler, token: int) -> tuple[float, float]:
    begin = time.perf_counter()
    plan = scheduler.schedule()
    middle = time.perf_counter()
    tokens = [token] * plan.num_sampled
    resumed = time.perf_counter()
    scheduler.commit(plan, tokens)
    return middle - begin, time.perf_counter() - resumed


def decodes(num_requests: int, num_steps: int = 400) -> tuple[float, float, float]:
    """Median microseconds of schedule and of commit, and the mean of their sum. Prompt lengths are
    spread, so that every step has its share of block boundaries."""
    rng = random.Random(0)
    scheduler = _scheduler(num_requests * 64, num_requests, max(8192, num_requests))
    for i in range(num_requests):
        prompt = [rng.randrange(30_000) for _ in range(rng.randint(1, 256))]
        scheduler.add(Request(str(i), prompt, PARAMS, max_num_tokens=1000))
    while len(scheduler.queues.running) < num_requests or any(
        r.num_total - r.num_dispatched != 1 for r in scheduler.queues.running
    ):
        _timed_step(scheduler, 1)
    times = [_timed_step(scheduler, 1) for _ in range(num_steps)]
    schedule_s, commit_s = zip(*times, strict=True)
    return (
        statistics.median(schedule_s) * 1e6,
        statistics.median(commit_s) * 1e6,
        statistics.mean(map(sum, times)) * 1e6,
    )


def shared_prompts(
    num_prompts: int = 1000, num_prompt_tokens: int = 1000, budget: int = 8192
) -> tuple[float, float, int, int]:
    """Seconds in add, seconds in schedule + commit, steps, and cached tokens, until every prompt
    has its first and only token."""
    rng = random.Random(0)
    shared = [rng.randrange(30_000) for _ in range(num_prompt_tokens // 2)]
    num_blocks = num_prompts * num_prompt_tokens // BLOCK_SIZE
    scheduler = _scheduler(num_blocks, 256, budget)
    prompts = [
        shared + [rng.randrange(30_000) for _ in range(num_prompt_tokens - len(shared))]
        for _ in range(num_prompts)
    ]
    begin = time.perf_counter()
    requests = [
        Request(str(i), prompt, PARAMS, max_num_tokens=num_prompt_tokens + 1)
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add(request)
    add_s = time.perf_counter() - begin
    step_s = 0.0
    num_steps = 0
    while scheduler.has_work:
        step_s += sum(_timed_step(scheduler, 1))
        num_steps += 1
    return add_s, step_s, num_steps, sum(r.num_cached_tokens for r in requests)


def main() -> None:
    print(f"Python {platform.python_version()}, blocks of {BLOCK_SIZE}, prefix caching on")
    print("\nrunning decodes | schedule us | commit us | mean of both us | us per request")
    for num_requests in (16, 64, 256, 1024, 4096):
        schedule_us, commit_us, mean_us = decodes(num_requests)
        print(
            f"{num_requests:>15} | {schedule_us:>11.1f} | {commit_us:>9.1f} | {mean_us:>15.1f} | "
            f"{mean_us / num_requests:>12.3f}"
        )
    add_s, step_s, num_steps, num_cached = shared_prompts()
    print("\n1,000 waiting prompts of 1,000 tokens, half of each shared, budget 8,192:")
    print(
        f"add {add_s * 1e3:.1f} ms in total; schedule + commit {step_s * 1e3:.1f} ms in total, "
        f"{num_steps} steps, {step_s / num_steps * 1e6:.0f} us per step, "
        f"{step_s * 1e3:.0f} us per prompt; {num_cached:,} tokens from the cache"
    )


if __name__ == "__main__":
    main()
