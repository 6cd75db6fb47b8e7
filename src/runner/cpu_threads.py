"""How many threads an engine on a CPU computes with: chosen once per process, at start.

OpenMP's threads wait for one another at the end of every matmul. Where another process holds the
core of one of them, all wait: two threads on two shared cores took six times the time of one. So
each number of threads is measured, and more threads are used only where they are quicker. The
number stays as it is while the process serves, as an order of summation may depend on it.
"""

from __future__ import annotations

import logging
import os
import time
from functools import cache
from pathlib import Path
from statistics import median

import torch

from .host_memory import control_groups

logger = logging.getLogger("pagespec")

_NUM_CALLS = 15
_FEWEST_CALLS = 3
_TRIAL_S = 0.1  # for one number of threads
_ROWS, _WIDTH = 64, 576


def use_threads(threads: int | None) -> None:
    """Sets torch's number of threads: as given, or the quickest of a trial."""
    if threads is None:
        threads = quickest()
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


@cache
def quickest() -> int:
    """Of the numbers of threads up to what torch, affinity and quotas allow, that of the quickest
    matmuls. Says so where it is fewer than torch would use."""
    given = torch.get_num_threads()
    most = min(given, usable_cores())
    seconds: dict[int, float] = {}
    candidate = most
    while candidate > 1 or not seconds:
        seconds[candidate] = measured(candidate)
        candidate //= 2
    if most > 1:
        seconds[1] = measured(1)
    torch.set_num_threads(given)
    best = min(seconds, key=lambda n: (seconds[n], -n))
    if best < given:
        times = ", ".join(f"{n}: {s * 1e3:.2f} ms" for n, s in seconds.items())
        logger.warning(
            "CPU threads: %d, where torch would use %d (%d usable cores; a matmul by number of "
            "threads: %s); --threads sets another number",
            *(best, given, usable_cores(), times),
        )
    return best


def measured(threads: int) -> float:
    """Median seconds of a matmul with so many threads."""
    torch.set_num_threads(threads)
    rows, weight = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    torch.nn.functional.linear(rows, weight)  # threads are started here
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < _NUM_CALLS:
        before = time.perf_counter()
        torch.nn.functional.linear(rows, weight)
        after = time.perf_counter()
        found.append(after - before)
        if after - begin > _TRIAL_S and len(found) >= _FEWEST_CALLS:
            break
    return median(found)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that affinity allows and that quotas of control groups pay for; at least 1.

    Args:
        root: of the file system (tests give one of their own).
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for folder, is_v2 in control_groups(root, "cpu"):
        quota = _quota(folder, is_v2)
        if quota is not None:
            cores = min(cores, int(quota + 0.5))
    return max(1, cores)


def _quota(folder: Path, is_v2: bool) -> float | None:
    """Cores that a group may use at a time, in version 2 or 1; None for no limit."""
    try:
        if is_v2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):  # no such group, or "max"
        return None
