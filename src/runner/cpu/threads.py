"""The number of threads of an engine on a CPU: measured at startup and while it serves.

OpenMP threads wait for one another at the end of every matmul. If another process occupies the core
of one thread, all threads wait: two threads on two shared cores took six times as long as one. So
each number of threads is measured, and more threads are used only if they are faster. The load of
other processes changes, so the engine measures again between steps. No bits depend on the number:
every matmul trial compares all numbers that :func:`halvings` returns (:mod:`...kernels.row_trial`).

torch's number of threads belongs to the calling thread, once that thread has computed something.
Engines of one process may step in several threads, each with its own number, so each step sets it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch

from ..host_memory import control_groups

logger = logging.getLogger("pagespec")

_NUM_CALLS = 15
_FEWEST_CALLS = 3
_TRIAL_S = 0.1  # per number of threads
_ROWS, _WIDTH = 64, 576
# While serving: a few calls, which cost some hundredths of a second.
_NUM_CALLS_AGAIN = 7
_TRIAL_AGAIN_S = 0.03

_INTERVAL_S = 10.0
_CONFIRM_S = 1.0
_MOST_SHARE = 0.005
_CLEARLY = 0.8
_SAY_INTERVAL_S = 60.0


class StepThreads:
    """The number of threads of an engine's steps: the one with the fastest matmuls in recent
    measurements. Engines of one process share the object.

    After every 10 s of steps, the current number and its two neighbours are measured. Another
    number is used if it takes less than 0.8 times as long, in two measurements 1 s apart. If
    measuring would take more than 0.5% of the time, it is done less often.

    Args:
        numbers: all numbers that may be used, largest first. A single one is never measured.
        number: the initial number; None: the largest.
        measure: returns the seconds of a matmul with a number of threads. It may leave torch's
            number changed.
        clock: returns seconds.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        number: int | None = None,
        measure: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.numbers = tuple(numbers)
        self.number = number or self.numbers[0]
        self._measure, self._clock = measure or measured_again, clock
        self._lock = threading.Lock()  # serialises measurements
        self._step_s = self._cost_s = 0.0
        self._wait_s = _INTERVAL_S
        self._rival: int | None = None
        self._said, self._said_at = self.number, float("-inf")

    def apply(self) -> None:
        """Set torch's number of threads for a step of the calling thread."""
        is_due = len(self.numbers) > 1 and self._step_s >= self._wait_s
        if is_due and self._lock.acquire(blocking=False):
            try:
                self._measure_again()
            finally:
                self._lock.release()
        _use(self.number)

    def add(self, step_s: float) -> None:
        """Count the seconds of a step."""
        self._step_s += step_s

    def fixed(self, reason: str) -> StepThreads:
        """One fixed number for all steps of an engine that starts now: the fastest under the
        present load. The current number may have fallen while another engine served.

        Args:
            reason: what depends on the number, for the log.
        """
        if len(self.numbers) == 1:
            return self
        number = _quickest(self.numbers, self._measure)[0]
        logger.info("CPU threads: %d, fixed: bits of %s on the number", number, reason)
        return StepThreads((number,))

    def _measure_again(self) -> None:
        self._step_s = 0.0
        at = self.numbers.index(self.number)
        begin = self._clock()
        seconds = {n: self._measure(n) for n in self.numbers[max(0, at - 1) : at + 2]}
        self._cost_s += self._clock() - begin
        best = min(seconds, key=lambda n: (seconds[n], -n))
        is_clear = seconds[best] < _CLEARLY * seconds[self.number]
        if is_clear and best != self._rival:
            self._rival, self._wait_s = best, _CONFIRM_S
            return
        if is_clear:
            self.number = best
        self._rival = None
        self._wait_s = max(_INTERVAL_S, self._cost_s / _MOST_SHARE)
        self._cost_s = 0.0
        self._say(seconds)

    def _say(self, seconds: dict[int, float]) -> None:
        now = self._clock()
        if self.number == self._said or now - self._said_at < _SAY_INTERVAL_S:
            return
        is_fewer = self.number < self._said
        logger.log(
            logging.WARNING if is_fewer else logging.INFO,
            "CPU threads: %d from now on, %d before, as the machine is %s (a matmul by number of "
            "threads: %s); --threads sets a fixed number",
            *(self.number, self._said, "busy" if is_fewer else "quieter", _times(seconds)),
        )
        self._said, self._said_at = self.number, now


def step_threads(threads: int | None, *, num_ranks: int = 1, is_eager: bool = False) -> StepThreads:
    """The number of threads for the steps of an engine of this process.

    Args:
        threads: the number; None: measured.
        num_ranks: size of the group. Ranks compute with torch's number, see :func:`rank_threads`.
        is_eager: whether the module itself runs. The bits of torch's own matmuls may depend on the
            number, so it stays fixed from the start.
    """
    torchs_number()
    if threads is not None or num_ranks > 1:
        return StepThreads((threads or torch.get_num_threads(),))
    shared = shared_threads()
    return shared.fixed("compile='eager' may depend") if is_eager else shared


def rank_threads(threads: int | None, num_ranks: int) -> int:
    """The number for all ranks of a group that starts now on the CPU. Rank 0 chooses it.

    Args:
        threads: the number; None: the fastest at present among those for which every rank has
            cores.
    """
    given = torchs_number()
    if threads is not None:
        return threads
    most = max(1, min(given, usable_cores() // num_ranks))
    return quickest(halvings(most), most, measured)


@cache
def torchs_number() -> int:
    """torch's number of threads before the first engine of the process."""
    return torch.get_num_threads()


@cache
def shared_threads() -> StepThreads:
    """The shared object for all engines of the process whose number is measured."""
    numbers = halvings(min(torchs_number(), usable_cores()))
    number = quickest(numbers, torchs_number(), measured)
    return StepThreads(numbers, number, measured_again)


def halvings(most: int) -> tuple[int, ...]:
    """The numbers of threads that may be used: ``most``, its successive halves, and 1."""
    numbers = []
    while most > 1:
        numbers.append(most)
        most //= 2
    return (*numbers, 1)


def quickest(numbers: Sequence[int], given: int, measure: Callable[[int], float]) -> int:
    """The number of threads with the fastest matmuls. The log states it if it is below ``given``,
    the number that torch would use."""
    best, seconds = _quickest(numbers, measure)
    if best < given:
        logger.warning(
            "CPU threads: %d, where torch would use %d (%d usable cores; a matmul by number of "
            "threads: %s); --threads sets another number",
            *(best, given, usable_cores(), _times(seconds)),
        )
    return best


def _quickest(
    numbers: Sequence[int], measure: Callable[[int], float]
) -> tuple[int, dict[int, float]]:
    """The fastest number (of equal ones the largest), and the seconds of each. torch's number is
    unchanged."""
    before = torch.get_num_threads()
    try:
        seconds = {n: measure(n) for n in numbers}
    finally:
        torch.set_num_threads(before)
    return min(seconds, key=lambda n: (seconds[n], -n)), seconds


def _times(seconds: dict[int, float]) -> str:
    return ", ".join(f"{n}: {s * 1e3:.2f} ms" for n, s in seconds.items())


def _use(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def measured(threads: int, num_calls: int = _NUM_CALLS, trial_s: float = _TRIAL_S) -> float:
    """Median seconds of a matmul with this number of threads, which torch has afterwards.

    Args:
        num_calls: calls to measure; after ``trial_s`` seconds, 3 are enough.
    """
    _use(threads)
    rows, weight = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    torch.nn.functional.linear(rows, weight)  # starts the threads
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < num_calls:
        before = time.perf_counter()
        torch.nn.functional.linear(rows, weight)
        after = time.perf_counter()
        found.append(after - before)
        if after - begin > trial_s and len(found) >= _FEWEST_CALLS:
            break
    return median(found)


measured_again = partial(measured, num_calls=_NUM_CALLS_AGAIN, trial_s=_TRIAL_AGAIN_S)


def usable_cores(root: Path = Path("/")) -> int:
    """Number of cores that the affinity mask and the quotas of control groups allow; at least 1.

    Args:
        root: root of the file system (tests pass another).
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for folder, is_v2 in control_groups(root, "cpu"):
        quota = _quota(folder, is_v2)
        if quota is not None:
            cores = min(cores, int(quota + 0.5))
    return max(1, cores)


def _quota(folder: Path, is_v2: bool) -> float | None:
    """Cores that a control group, version 2 or 1, may use at a time; None for no limit."""
    try:
        if is_v2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):  # no such group, or "max"
        return None
