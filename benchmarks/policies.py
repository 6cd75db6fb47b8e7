"""Four scheduling policies on one arrival trace, without a model.

    python -m benchmarks.policies
    python -m benchmarks.policies --output benchmarks/results/policies.json

The scheduler is the real one. Time comes from a model, so the table needs no GPU and is the same on
every machine. A step takes as long as with Qwen3-0.6B on an H100, according to
docs/notes/gpu-tables.md:

* 0.70 ms in any case (one request decodes in this time),
* 2.4 us per row (256 rows: 7.12 ms, of them attention 5.94, less the 0.70 and its own attention),
* 0.028 us per position read (attention of those 256 rows of some 820 positions each),
* 3.8 us per prompt token (8,192 of them take 37.1 ms in addition to decodes that take 6.1).

Two of three requests are short questions of eight interactive clients (priority 0). The third is a
long document of a batch job (priority 8). Under "fair" each client and the batch job is one owner.
Arrivals are a Poisson process, or bursts: a Poisson process of groups that arrive at once. Latency
is the time from arrival to the last token.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagespec import SamplingParams
from pagespec.cli.bench import percentile
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.plan import StepPlan
from pagespec.engine.policy import Policy
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler

POLICIES = ("fcfs", "fair", "shortest_first", "priority")
STEP_S, ROW_S, READ_S, PROMPT_S = 0.70e-3, 2.4e-6, 0.028e-6, 3.8e-6
NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, BUDGET = 8192, 16, 64, 2048
_LONG_PRIORITY = 8
_BURST = 48
_NUM_CLIENTS = 8


@dataclass(frozen=True)
class Arrival:
    """A future request; ``is_long``: a document of the batch job."""

    second: float
    prompt: list[int]
    num_outputs: int
    is_long: bool

    def request(self, number: int) -> Request:
        return Request(
            str(number),
            self.prompt,
            SamplingParams(),
            max_num_tokens=len(self.prompt) + self.num_outputs,
            priority=_LONG_PRIORITY if self.is_long else 0,
            owner="documents" if self.is_long else f"client {number % _NUM_CLIENTS}",
        )


@dataclass
class Served:
    arrival: Arrival
    first_token: float = 0.0
    end: float = 0.0

    @property
    def latency(self) -> float:
        return self.end - self.arrival.second

    @property
    def wait(self) -> float:
        return self.first_token - self.arrival.second


def _arrival(rng: random.Random, second: float) -> Arrival:
    is_long = rng.random() < 1 / 3
    low, high, most = (1500, 5000, 600) if is_long else (50, 500, 200)
    prompt = [rng.randrange(30_000) for _ in range(rng.randint(low, high))]
    return Arrival(second, prompt, rng.randint(most // 4, most), is_long)


def poisson(rng: random.Random, num_requests: int, per_second: float) -> list[Arrival]:
    second, arrivals = 0.0, []
    for _ in range(num_requests):
        second += rng.expovariate(per_second)
        arrivals.append(_arrival(rng, second))
    return arrivals


def bursts(rng: random.Random, num_requests: int, per_second: float) -> list[Arrival]:
    """Groups of 48 that arrive at once, at the same average rate."""
    second, arrivals = 0.0, []
    while len(arrivals) < num_requests:
        second += rng.expovariate(per_second / _BURST)
        arrivals += [_arrival(rng, second) for _ in range(_BURST)]
    return arrivals[:num_requests]


def seconds_of(plan: StepPlan) -> float:
    """The time of the step on the GPU of the model."""
    seconds = STEP_S + ROW_S * len(plan)
    for _, start, num_tokens, _ in plan.rows():
        seconds += READ_S * (start + num_tokens) + PROMPT_S * (num_tokens if num_tokens > 1 else 0)
    return seconds


def serve(arrivals: Sequence[Arrival], policy: str) -> tuple[list[Served], int]:
    """The times of each request's first and last token, and the number of preemptions."""
    scheduler = Scheduler(
        BlockManager(NUM_BLOCKS, BLOCK_SIZE),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        policy=Policy(policy),
    )
    served = {str(i): Served(arrival) for i, arrival in enumerate(arrivals)}
    now, num_added, num_preemptions = 0.0, 0, 0
    while num_added < len(arrivals) or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[num_added].second)
        while num_added < len(arrivals) and arrivals[num_added].second <= now:
            scheduler.add(arrivals[num_added].request(num_added))
            num_added += 1
        plan = scheduler.schedule()
        now += seconds_of(plan)
        num_preemptions += len(plan.preempted)
        for info, is_sampled in zip(plan.requests, plan.num_samples, strict=True):
            one = served[info.request_id]
            if is_sampled and not one.first_token:
                one.first_token = now
        for request in scheduler.commit(plan, [1] * plan.num_sampled):
            served[request.request_id].end = now
    return list(served.values()), num_preemptions


def _numbers(served: Sequence[Served], num_preemptions: int) -> dict[str, Any]:
    def of(some: Sequence[Served], value: Callable[[Served], float]) -> dict[str, float]:
        values = [value(one) for one in some]
        return {
            "mean": round(sum(values) / len(values), 3),
            "p99": round(percentile(values, 99), 3),
        }

    short = [one for one in served if not one.arrival.is_long]
    long = [one for one in served if one.arrival.is_long]
    return {
        "latency_s": of(served, lambda one: one.latency),
        "short_latency_s": of(short, lambda one: one.latency),
        "long_latency_s": of(long, lambda one: one.latency),
        "short_first_token_s": of(short, lambda one: one.wait),
        "preemptions": num_preemptions,
    }


def measure(num_requests: int, per_second: float, seed: int) -> dict[str, Any]:
    results: dict[str, Any] = {
        "source": "python -m benchmarks.policies",
        "time": "a model of Qwen3-0.6B on an H100 (docs/notes/gpu-tables.md); no GPU was used",
        "requests": num_requests,
        "requests_per_second": per_second,
        "seed": seed,
        "arrivals": {},
    }
    for name, arrive in (("Poisson", poisson), (f"bursts of {_BURST}", bursts)):
        arrivals = arrive(random.Random(seed), num_requests, per_second)
        results["arrivals"][name] = {
            policy: _numbers(*serve(arrivals, policy)) for policy in POLICIES
        }
    return results


def table(results: dict[str, Any]) -> str:
    columns = ("latency_s", "short_latency_s", "long_latency_s", "short_first_token_s")
    lines = [
        "| arrivals | policy | latency, mean / p99, s | short | long | first token of short | "
        "preemptions |",
        "|---|---|---|---|---|---|---|",
    ]
    for arrivals, policies in results["arrivals"].items():
        for policy, numbers in policies.items():
            cells = [f"{numbers[c]['mean']:.2f} / {numbers[c]['p99']:.2f}" for c in columns]
            lines.append(
                f"| {arrivals} | {policy} | {' | '.join(cells)} | {numbers['preemptions']} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=44.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file for benchmarks/pictures.py")
    options = parser.parse_args()
    results = measure(options.requests, options.rate, options.seed)
    print(table(results))
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
