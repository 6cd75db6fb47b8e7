"""A flood of requests from one client, and the time to first token of another: with "fcfs" and with
fair shares.

    python -m benchmarks.flood steps
    python -m benchmarks.flood http
    python -m benchmarks.flood gaps --model PATH

``steps`` counts engine steps without a model. ``http`` serves a tiny random model in a separate
process and measures milliseconds, alone and during the flood. ``gaps`` measures the time between
the tokens of running answers while another prompt of 6,000 tokens is computed, with and without a
limit on steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import deque
from itertools import pairwise
from pathlib import Path

from pagespec import LLM, SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.plan import StepPlan
from pagespec.engine.policy import Policy
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from pagespec.serving.async_llm import AsyncLLM

from .bad_clients import request, send
from .crowd import Server

_NUM_PROMPT, _NUM_OUTPUTS = 20, 64
_GREEDY = {"temperature": 0.0, "ignore_eos": True}


# In steps -------------------------------------------------------------------------------------


def _request(name: str, owner: str) -> Request:
    prompt = [ord(c) for c in name.ljust(_NUM_PROMPT)]
    return Request(
        name, prompt, SamplingParams(), max_num_tokens=_NUM_PROMPT + _NUM_OUTPUTS, owner=owner
    )


def first_token_step(
    policy: str, depth: int, num_flood: int, num_before: int
) -> tuple[int, int, int]:
    """Steps from a request's arrival to its first sampled token; preemptions; total number of
    steps."""
    scheduler = Scheduler(
        BlockManager(4096, 16),
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        pipeline_depth=depth,
        policy=Policy(policy),
    )
    for i in range(num_flood):
        scheduler.add(_request(f"f{i}", "flood"))
    plans: deque[StepPlan] = deque()
    first = num_steps = 0
    is_added = False
    while scheduler.has_work or not is_added:
        if num_steps >= num_before and not is_added:
            scheduler.add(_request("other", "other"))
            is_added = True
        plan = scheduler.schedule()
        if plan.requests:
            plans.append(plan)
            num_steps += 1
            for info, sampled in zip(plan.requests, plan.num_samples, strict=True):
                if info.request_id == "other" and sampled and not first:
                    first = num_steps - num_before
        if len(plans) > depth or not plan.requests:
            oldest = plans.popleft()
            scheduler.commit(oldest, [1] * oldest.num_sampled)
    return first, scheduler.queues.num_preemptions, num_steps


def steps() -> None:
    print("1,000 requests of one owner (20 tokens, 64 outputs), 64 places; another owner's request")
    print("policy | steps in flight | arrives after | steps to its first token | preempted | steps")
    for depth in (0, 1):
        for policy in ("fcfs", "fair"):
            for num_before in (1, 32, 64, 100, 500):
                first, preempted, total = first_token_step(policy, depth, 1000, num_before)
                print(f"{policy} | {depth} | {num_before} | {first} | {preempted} | {total}")


# Seconds over HTTP ----------------------------------------------------------------------------


def _post(prompt: str, user: str, max_tokens: int, *, stream: bool) -> bytes:
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream, "user": user, **_GREEDY}
    return request("/v1/completions", json.dumps(body).encode())


async def _first_token(port: int, prompt: str) -> float:
    began = time.perf_counter()
    reader, writer = await send(port, _post(prompt, "other", 4, stream=True))
    try:
        received = b""
        while b"data: {" not in received:
            part = await reader.read(1 << 16)
            if not part:
                raise RuntimeError(f"no token came: {received[-500:]!r}")
            received += part
        return time.perf_counter() - began
    finally:
        writer.transport.abort()


async def _flooder(port: int, index: int) -> None:
    data = _post(f"Number {index} of a flood is", "flood", _NUM_OUTPUTS, stream=False)
    reader, writer = await send(port, data)
    try:
        answer = await reader.read()
        if b" 200 " not in answer[:20]:
            raise RuntimeError(f"a request of the flood was refused: {answer[:500]!r}")
    finally:
        writer.transport.abort()


async def _beside(port: int, num_flood: int, num_times: int) -> list[tuple[float, int]]:
    """Seconds to another user's first token, each with the number of flood requests that were
    unanswered then."""
    flood = [asyncio.create_task(_flooder(port, i)) for i in range(num_flood)]
    try:
        if flood:
            await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        found = []
        for i in range(num_times):
            num_left = sum(not one.done() for one in flood)
            found.append((await _first_token(port, f"Question {i}: what is it?"), num_left))
        for one in flood:
            if one.done():
                one.result()
        return found
    finally:
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


def http(num_flood: int, max_num_seqs: int) -> None:
    print(f"{num_flood} requests of one user, {_NUM_OUTPUTS} outputs each, {max_num_seqs} places;")
    print("ms to another user's first token (requests of the flood that are not answered then)")
    for policy in ("fcfs", "fair"):
        with tempfile.TemporaryDirectory() as folder:
            options = ["--policy", policy, "--max-num-seqs", str(max_num_seqs)]
            server = Server(Path(folder), options)
            try:
                server.wait()
                for name, size, times in (
                    ("warm", 0, 3),
                    ("alone", 0, 15),
                    ("flood", num_flood, 3),
                ):
                    if name == "flood" and policy == "fair":
                        times = 15
                    found = asyncio.run(_beside(server.port, size, times))
                    median = statistics.median(seconds for seconds, _ in found)
                    said = ", ".join(f"{1000 * s:.0f} ({left})" for s, left in found)
                    if name != "warm":
                        print(f"{policy}, {name}: median {1000 * median:.0f}: {said}; load average "
                              f"{os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
            finally:
                server.process.kill()
                server.process.wait()


# Gaps beside a long prompt --------------------------------------------------------------------


async def _gaps(llm: AsyncLLM, num_prompt: int) -> tuple[list[float], float]:
    arrivals: list[list[float]] = [[], []]

    async def neighbour(index: int) -> None:
        params = SamplingParams(max_tokens=400, **_GREEDY)
        async for _ in llm.generate(f"Neighbour {index} tells a story:", params):
            arrivals[index].append(time.perf_counter())

    tasks = [asyncio.create_task(neighbour(i)) for i in range(2)]
    while min(map(len, arrivals)) < 20:
        await asyncio.sleep(0.05)
    begin = time.perf_counter()
    prompt = [(i * 7919) % 40_000 + 100 for i in range(num_prompt)]
    async for _ in llm.generate(prompt, SamplingParams(max_tokens=1, **_GREEDY)):
        pass
    end = time.perf_counter()
    for task in tasks:
        task.cancel()
    await llm.shutdown()
    gaps = [b - a for times in arrivals for a, b in pairwise(times) if b >= begin and a <= end]
    return gaps, end - begin


def gaps(model: str, num_prompt: int, bounds: tuple[float | None, ...] = (0, None)) -> None:
    print("max_inter_token_ms | gaps of two neighbours: number, median, p99, longest | the prompt")
    for bound in bounds:
        llm = AsyncLLM(LLM(model, device="cpu", max_model_len=8192, max_inter_token_ms=bound))
        found, took = asyncio.run(_gaps(llm, num_prompt))
        found.sort()
        p99 = found[int(0.99 * (len(found) - 1))]
        print(
            f"{'automatic (500)' if bound is None else bound} | {len(found)}, "
            f"{statistics.median(found):.2f} s, {p99:.2f} s, {found[-1]:.2f} s | {took:.1f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("steps", "http", "gaps"))
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--flood", type=int, default=1000)
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    options = parser.parse_args()
    if options.what == "steps":
        steps()
        return
    if options.what == "http":
        http(options.flood, options.places)
        return
    from pagespec.model_name import embedded_model_path

    gaps(options.model or str(embedded_model_path()), options.prompt_tokens)


if __name__ == "__main__":
    main()
