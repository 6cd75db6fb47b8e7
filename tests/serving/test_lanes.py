"""Lanes of worker threads: bounded and in order; abandoned work is not done."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from pagespec.serving import lanes
from pagespec.serving.lanes import Lane, Work, lane_of


@pytest.mark.parametrize(
    ("work", "longest", "short", "long"),
    [
        ("text", 1 << 18, "short", "long"),
        ("body", 1 << 19, "bodies", "large-bodies"),
        ("constraint", 1 << 12, "constraints", "large-constraints"),
    ],
)
def test_long_work_is_done_on_threads_of_its_own(
    work: Work, longest: int, short: str, long: str
) -> None:
    def thread_for(length: int) -> str:
        lane = lane_of(work, length)
        return asyncio.run(lane.run(lambda: threading.current_thread().name))

    assert [thread_for(n) for n in (0, longest)] == [f"pagespec-{short}"] * 2
    assert [thread_for(n) for n in (longest + 1, 1 << 40)] == [f"pagespec-{long}"] * 2


def test_calls_run_in_order_on_so_many_threads() -> None:
    lane, running, most, order = Lane("test", 2), [0], [0], []
    lock = threading.Lock()

    def work(number: int) -> int:
        with lock:
            order.append(number)
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1
        return number * 2

    async def main() -> list[int]:
        return await asyncio.gather(*(lane.run(work, number) for number in range(20)))

    assert asyncio.run(main()) == [2 * number for number in range(20)]
    assert most[0] == 2
    assert all(abs(number - place) <= 1 for place, number in enumerate(order))


def test_what_is_cancelled_before_it_began_is_not_done() -> None:
    lane, go_on, done = Lane("test", 1), threading.Event(), []

    async def main() -> None:
        first = asyncio.create_task(lane.run(go_on.wait, 20))
        others = [asyncio.create_task(lane.run(done.append, number)) for number in range(5)]
        await asyncio.sleep(0.05)
        for task in others[:4]:
            task.cancel()
        await asyncio.sleep(0.05)
        go_on.set()
        assert await first
        await others[4]

    asyncio.run(main())
    assert done == [4]


def test_what_is_raised_comes_to_the_caller() -> None:
    lane = Lane("test", 1)

    def fail() -> None:
        raise ValueError("so")

    with pytest.raises(ValueError, match="so"):
        asyncio.run(lane.run(fail))
    assert asyncio.run(lane.run(int, "7")) == 7, "the thread goes on"


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_IDLE_S", 0.05)
    lane = Lane("test-that-ends", 3)

    async def main() -> None:
        await asyncio.gather(*(lane.run(time.sleep, 0.01) for _ in range(6)))

    for _ in range(2):
        asyncio.run(main())
        until = time.monotonic() + 10
        while any(t.name == "pagespec-test-that-ends" for t in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_thread_rests_between_two_works_by_its_own_processor_time() -> None:
    """A queue of long work leaves the interpreter to other threads for a share of the time."""
    lane = Lane("test-that-rests", 1, rest_per_work=3.0)
    ran: list[tuple[float, float, float]] = []

    def work() -> None:
        began, used = time.monotonic(), time.thread_time()
        while time.thread_time() - used < 0.1:
            pass
        ran.append((began, time.monotonic(), time.thread_time() - used))

    async def main() -> None:
        await asyncio.gather(*(lane.run(work) for _ in range(3)))

    asyncio.run(main())
    for (_, ended, used_s), (began, _, _) in pairwise(ran):
        assert began - ended >= 3.0 * used_s


_SHARE = """
import asyncio, json, os, sys, time
os.sched_getaffinity = lambda _: set(range(int(sys.argv[2])))
from pagespec.serving import lanes

lane, ran = getattr(lanes, sys.argv[1]), []

def work():
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < 0.05:
        pass
    ran.append((began, time.monotonic(), time.thread_time() - used))

async def main():
    await asyncio.gather(*(lane.run(work) for _ in range(3)))

asyncio.run(main())
print(json.dumps(ran))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the affinity of processors is Linux's")
@pytest.mark.parametrize("lane", ["LONG", "LARGE_CONSTRAINTS"])
@pytest.mark.parametrize("num_cpus", [1, 2, 4])
def test_long_work_leaves_half_of_few_processors_alone(lane: str, num_cpus: int) -> None:
    """The only thread of long work rests as long as it works."""
    command = [sys.executable, "-c", _SHARE, lane, str(num_cpus)]
    ran = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    for (_, ended, used_s), (began, _, _) in pairwise(ran):
        assert began - ended >= used_s
