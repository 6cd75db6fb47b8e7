"""Seconds of GPU calls by the GPU's own clock: medians of events, for captured calls or single
runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_seconds(calls: list[Callable[[], object]], repeats: int) -> float:
    """Seconds per call. All are captured in one graph, whose replays are timed with events."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_of_runs(graph.replay, repeats) / len(calls)


def median_of_runs(run: Callable[[], object], repeats: int, num_warm_up: int = 3) -> float:
    """Seconds of one run, uncaptured."""
    times = []
    for repeat in range(repeats + num_warm_up):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if repeat >= num_warm_up:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
