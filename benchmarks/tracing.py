"""The cost of a step trace: host time per step with and without one, and the file's size.

    python -m benchmarks.tracing
    python -m benchmarks.tracing --model 0.6b --workload nano [--workload 1024 ...] [--repeat 3]

The first command needs no model: tokens are constants. "decode" steps are only decodes. In "mixed"
ones a request ends in every step and another is admitted with its whole prompt. The second command
runs whole workloads with one engine, alternately without and with a trace.
"""

from __future__ import annotations

import platform
import random
import statistics
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import job as options
from benchmarks.job import Job, run_job, write_json
from benchmarks.throughput import Names, rate, require_workloads
from benchmarks.workload import make_workload
from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.plan import StepPlan, StepResult
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler

PARAMS = SamplingParams()
NUM_STEPS = 1000
PROMPT_LENGTHS = (100, 1024)
_FIRST_REQUEST = 1_000_000  # request ids of an engine that has served for a while


class ConstantRunner:
    """Samples the same token everywhere, at once."""

    pipeline_depth = 1

    def dispatch(self, plan: StepPlan) -> int:
        return plan.num_sampled

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, int)
        return StepResult([12345] * handle)

    def reset(self) -> None:
        pass


class Load:
    """An engine with ``num_rows`` running requests, past their prompts.

    Args:
        is_mixed: whether one of them ends in every step, and another arrives.
    """

    def __init__(self, num_rows: int, is_mixed: bool, trace: Path | None) -> None:
        self._rng = random.Random(0)
        self._names = count(_FIRST_REQUEST)
        self._num_rows, self._is_mixed = num_rows, is_mixed
        scheduler = Scheduler(
            BlockManager(num_rows * 192, 16),
            max_num_seqs=num_rows,
            max_num_batched_tokens=16384,
            pipeline_depth=1,
        )
        self._engine = Engine(scheduler, ConstantRunner(), trace=trace)
        for i in range(num_rows):
            self._add(i + 64 if is_mixed else NUM_STEPS * 2)
        while len(scheduler.queues.running) < num_rows or any(
            r.num_total - r.num_dispatched != 1 for r in scheduler.queues.running
        ):
            self._engine.step()

    def _add(self, num_outputs: int) -> None:
        length = self._rng.randint(*PROMPT_LENGTHS)
        prompt = [self._rng.randrange(30_000) for _ in range(length)]
        name = str(next(self._names))
        self._engine.add(Request(name, prompt, PARAMS, max_num_tokens=length + num_outputs))

    def step(self) -> float:
        """Processor seconds of one engine step, which other processes do not affect."""
        if self._is_mixed:
            self._add(self._num_rows)
        begin = time.thread_time()
        self._engine.step()
        return time.thread_time() - begin


def host_times(num_rows: int, is_mixed: bool) -> tuple[float, float, int]:
    """Median microseconds per step without and with a trace, and the bytes of ``NUM_STEPS`` steps
    (for "mixed" with their arrivals) in the file. Two engines step alternately, so that both have
    the same load of the machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        plain, traced = Load(num_rows, is_mixed, None), Load(num_rows, is_mixed, path)
        num_bytes = path.stat().st_size
        times = [(plain.step(), traced.step()) for _ in range(NUM_STEPS)]
        num_bytes = path.stat().st_size - num_bytes
    plain_s, traced_s = map(statistics.median, zip(*times, strict=True))
    return plain_s * 1e6, traced_s * 1e6, num_bytes


def show_host_times() -> None:
    typer.echo(f"Python {platform.python_version()}; host time of a step, us, medians")
    typer.echo(f"\n{'rows':>5} {'steps':<7} {'not traced':>10} {'traced':>8} {'more':>6} {'MB':>6}")
    for num_rows in (256, 512, 1024):
        for is_mixed in (False, True):
            plain_us, traced_us, num_bytes = host_times(num_rows, is_mixed)
            typer.echo(
                f"{num_rows:>5} {'mixed' if is_mixed else 'decode':<7} {plain_us:>10.0f} "
                f"{traced_us:>8.0f} {traced_us - plain_us:>6.0f} {num_bytes / 1e6:>6.1f}"
            )
    typer.echo(f"\nMB: of the file, for {NUM_STEPS:,} steps")


def show_throughput(model: str, result: dict[str, Any]) -> None:
    typer.echo(f"Qwen3 {model}, random weights; GPU {result['gpu']}, torch {result['torch']}")
    typer.echo(
        f"\n{'workload':<9} {'not traced, tok/s (min..max)':>30} {'traced, tok/s (min..max)':>30} "
        f"{'ratio':>6} {'MB':>6}"
    )
    for name, measured in result["workloads"].items():
        num_tokens = make_workload(name).num_output_tokens
        plain, plain_text = rate(measured["plain_s"], num_tokens)
        traced, traced_text = rate(measured["traced_s"], num_tokens)
        num_mb = measured["trace_bytes"] / 1e6
        typer.echo(
            f"{name:<9} {plain_text:>30} {traced_text:>30} {traced / plain:>6.3f} {num_mb:>6.1f}"
        )


def main(
    model: Annotated[str | None, typer.Option(help="None for the host's time alone.")] = None,
    workload: Names = ["nano"],  # noqa: B006 - typer copies it
    repeat: options.Repeat = 3,
    json: options.Json = None,
) -> None:
    """Measure the cost of a step trace."""
    if model is None:
        show_host_times()
        return
    require_workloads(workload)
    result = run_job(Job("tracing", model, workload, repeat=repeat))
    write_json(json, {"pagespec": result})
    show_throughput(model, result)


if __name__ == "__main__":
    typer.run(main)
