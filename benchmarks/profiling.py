"""The time of a decode step by kernel, and the gaps between kernels.

On a GPU only the device is traced: tracing the host would slow it and open gaps that do not exist
otherwise. Without a GPU the outermost torch operations take the place of kernels.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_STEPS = 20
_NUM_WARMUP_STEPS = 5  # traced and dropped, because the tracer starts slowly
_NUM_ROWS = 15
_GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CPU_CATEGORIES = frozenset({"cpu_op"})


@dataclass(frozen=True, order=True)
class Interval:
    """An event: microseconds, on the trace's own clock."""

    begin: float
    end: float
    name: str = ""


def advances(intervals: Iterable[Interval]) -> Iterator[tuple[str, float]]:
    """For each interval, by start: its name, and by how many microseconds it ends after all
    intervals before it.

    A kernel with dependent launch starts early and waits for those before it, so its time on the
    device has little meaning. Its own work comes after they have ended.
    """
    reached = float("-inf")
    for interval in sorted(intervals):
        yield interval.name, max(0.0, interval.end - max(interval.begin, reached))
        reached = max(reached, interval.end)


def busy_time(intervals: Iterable[Interval]) -> float:
    """Microseconds in which at least one of ``intervals`` ran, on any stream."""
    return sum(advance for _, advance in advances(intervals))


def idle_fraction(intervals: Iterable[Interval]) -> float:
    """Fraction of the time from the first start to the last end in which nothing ran.

    Raises:
        ValueError: there are no intervals, or they take no time.
    """
    known = list(intervals)
    span = max((i.end for i in known), default=0.0) - min((i.begin for i in known), default=0.0)
    if span <= 0:
        raise ValueError("no time passes between the first start and the last end")
    return 1.0 - busy_time(known) / span


@dataclass(frozen=True)
class StepProfile:
    """The profile of ``num_steps`` decode steps.

    Attributes:
        wall_s: their time on the host's clock, from an idle device to an idle device.
    """

    intervals: list[Interval]
    num_steps: int
    wall_s: float

    def summary(self) -> dict[str, float]:
        span = max(i.end for i in self.intervals) - min(i.begin for i in self.intervals)
        return {
            "kernel_us_per_step": busy_time(self.intervals) / self.num_steps,
            "span_us_per_step": span / self.num_steps,
            "wall_us_per_step": self.wall_s * 1e6 / self.num_steps,
            "idle_fraction": idle_fraction(self.intervals),
        }

    def by_name(self) -> list[tuple[str, float, float]]:
        """(name, microseconds per step as counted by :func:`advances`, calls per step), longest
        first."""
        times: dict[str, list[float]] = defaultdict(list)
        for name, advance in advances(self.intervals):
            times[name].append(advance)
        rows = [(n, sum(t) / self.num_steps, len(t) / self.num_steps) for n, t in times.items()]
        return sorted(rows, key=lambda row: -row[1])

    def __str__(self) -> str:
        rows, figures = self.by_name(), self.summary()
        total = figures["kernel_us_per_step"]
        rest = rows[_NUM_ROWS:]
        shown = rows[:_NUM_ROWS]
        if rest:
            shown.append(
                (f"{len(rest)} other names", sum(r[1] for r in rest), sum(r[2] for r in rest))
            )
        lines = [f"{'kernel':<72} {'us/step':>10} {'share':>6} {'calls/step':>12}"]
        lines += [
            f"{name[:72]:<72} {us:>10.1f} {us / total:>6.1%} {calls:>12.1f}"
            for name, us, calls in shown
        ]
        lines.append(
            f"{self.num_steps} steps: {total:,.1f} us of kernels a step in "
            f"{figures['span_us_per_step']:,.1f} us from the first to the last, idle "
            f"{figures['idle_fraction']:.2%}; {figures['wall_us_per_step']:,.1f} us on the host's "
            "clock"
        )
        return "\n".join(lines)


def read_trace(trace: Path, categories: frozenset[str]) -> list[Interval]:
    """The intervals of a Chrome trace with these ``categories``. On the host, those within another
    interval on the same thread are omitted."""
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in categories
    ]
    is_host = categories == _CPU_CATEGORIES
    intervals: list[Interval] = []
    reached: dict[Any, float] = {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        begin, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if is_host and end <= reached.get(event["tid"], float("-inf")):
            continue
        reached[event["tid"]] = end
        intervals.append(Interval(begin, end, event["name"]))
    return intervals


def profile_steps(llm: Any, generate: Callable[[], object], trace: Path) -> StepProfile:
    """Run ``generate`` and trace ``NUM_STEPS`` engine steps of it, from the time when every running
    request decodes.

    Args:
        llm: its engine's ``step`` is replaced meanwhile.
        trace: file for the Chrome trace.

    Raises:
        RuntimeError: ``generate`` ended before that many decode steps.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    is_gpu = str(llm.device).startswith("cuda")
    synchronize: Callable[[], object] = torch.cuda.synchronize if is_gpu else lambda: None
    profiler = profile(
        activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=_NUM_WARMUP_STEPS, active=NUM_STEPS, repeat=1),
        on_trace_ready=lambda ready: ready.export_chrome_trace(str(trace)),
    )
    engine = llm.engine
    step = engine.step
    num_traced = _NUM_WARMUP_STEPS + NUM_STEPS
    num_done = -1  # not started
    begin = wall_s = 0.0

    def watched_step() -> Any:
        nonlocal num_done, begin, wall_s
        if num_done < 0 and _is_decoding(engine.scheduler):
            profiler.start()
            num_done = 0
        finished = step()
        if 0 <= num_done < num_traced:
            num_done += 1
            # The traced steps begin and end with an idle device.
            if num_done == _NUM_WARMUP_STEPS:
                synchronize()
                profiler.step()
                begin = time.perf_counter()
            elif num_done == num_traced:
                synchronize()
                wall_s = time.perf_counter() - begin
                profiler.step()
            else:
                profiler.step()
        return finished

    engine.step = watched_step
    try:
        generate()
    finally:
        engine.step = step
        if num_done >= 0:
            profiler.stop()
    if num_done < num_traced:
        raise RuntimeError(f"the run ended before {NUM_STEPS} decode steps could be traced")
    intervals = read_trace(trace, _GPU_CATEGORIES if is_gpu else _CPU_CATEGORIES)
    return StepProfile(intervals, NUM_STEPS, wall_s)


def _is_decoding(scheduler: Any) -> bool:
    running = scheduler.queues.running
    return bool(running) and all(r.num_dispatched >= r.num_prompt_tokens for r in running)
