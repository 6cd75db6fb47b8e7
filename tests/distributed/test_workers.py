"""How rank 0 monitors the other ranks and reports their errors; no processes are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pagespec.distributed import workers as module
from pagespec.distributed.channel import Channel, State
from pagespec.distributed.workers import Watch, Workers, describe_error
from pagespec.errors import EngineError, InvalidInputError, UnsupportedModelError


class Clock:
    """Replaces the module time; ``on_sleep`` is called after each sleep."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.pass_s(seconds)
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def watched(num_ranks: int = 3) -> tuple[Channel, Watch]:
    channel = Channel(num_ranks)
    return channel, Watch(Workers(channel, 1), channel)


def test_the_rank_that_is_behind_is_named(clock: Clock) -> None:
    channel, watch = watched()
    for cell, num_collectives in zip(channel.cells, (7, 6, 7), strict=True):
        cell.num_collectives = num_collectives
    begin = clock.now

    def is_done(seconds: float) -> bool:
        clock.pass_s(seconds)
        return False

    with pytest.raises(EngineError, match="rank 1 has made no progress for 20 s"):
        watch.wait(is_done)
    assert 19 < clock.now - begin < 22


@pytest.mark.parametrize("far", [(7, 7, 7), (6, 7, 7), (5, 6, 7)])
def test_a_stopped_rank_is_named_however_far_it_has_come(
    clock: Clock, far: tuple[int, int, int]
) -> None:
    """The rank stops within a collective that it has counted, or ahead of the waiting rank."""
    channel = Channel(3)
    workers = Workers(channel, 1)
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    workers._processes += processes  # type: ignore[arg-type]
    watch = Watch(workers, channel)
    for cell, num_collectives in zip(channel.cells, far, strict=True):
        cell.num_collectives = num_collectives
    try:
        processes[1].send_signal(signal.SIGSTOP)
        os.waitpid(processes[1].pid, os.WUNTRACED)
        pid = processes[1].pid
        with pytest.raises(EngineError, match=f"rank 2 has made no progress .*process {pid} was"):
            watch.wait(lambda seconds: bool(clock.pass_s(seconds)))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_ranks_that_have_come_equally_far_are_all_named(clock: Clock) -> None:
    channel, watch = watched()
    for cell, num_collectives in zip(channel.cells, (7, 8, 7), strict=True):
        cell.num_collectives = num_collectives
    with pytest.raises(EngineError, match=r"ranks \[0, 2\] have made no progress for 20 s"):
        watch.wait(lambda seconds: bool(clock.pass_s(seconds)))


_GROUPS = """
import sys, torch
from pagespec.distributed.group import join_group, leave_group, make_store
hook = sys.excepthook
for _ in range(3):
    join_group(make_store(1), 0, 1, torch.device("cpu"))
    leave_group()
raise ValueError("of the user")
"""


def test_tracebacks_after_groups_are_those_of_before() -> None:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    ended = subprocess.run(
        [sys.executable, "-c", _GROUPS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.stderr.rstrip().endswith("\nValueError: of the user")
    assert "[rank" not in ended.stderr


def test_a_group_that_moves_may_take_long(clock: Clock) -> None:
    channel, watch = watched()
    begin = clock.now

    def is_done(_: float) -> bool:
        clock.pass_s(0.9)
        channel.cells[2].num_collectives += (clock.now - begin) % 15 < 0.9
        return clock.now - begin > 300

    watch.wait(is_done)


def test_time_in_a_stopped_process_is_not_waiting_time(clock: Clock) -> None:
    _, watch = watched()
    num_polls = 0

    def is_done(_: float) -> bool:
        nonlocal num_polls
        num_polls += 1
        clock.pass_s(3600 if num_polls % 4 == 0 else 0.02)
        return num_polls == 40

    watch.wait(is_done)


@pytest.mark.parametrize(
    "error",
    [
        InvalidInputError("tensor_parallel_size", 3, "does not divide the 4 heads"),
        InvalidInputError("model", "/a/folder", "must have weights"),
        UnsupportedModelError("GPT2LMHeadModel: no plan"),
    ],
)
def test_an_error_of_all_ranks_has_the_message_of_one(error: Exception) -> None:
    channel = Channel(3)
    workers = Workers(channel, 1)
    channel.cells[2].text = describe_error(error)
    channel.cells[2].state = State.FAILED
    with pytest.raises(type(error), match=r"rank 2\)") as caught:
        workers.check()
    assert str(caught.value) == f"{error} (rank 2)"
    assert vars(caught.value).get("value") == vars(error).get("value")
    assert workers.reason_of(error) is error
    lost = RuntimeError("Connection closed by peer")
    assert str(workers.reason_of(lost)) == f"{error} (rank 2)"


def test_the_error_of_a_rank_comes_late(clock: Clock) -> None:
    channel = Channel(2)
    workers = Workers(channel, 1)
    lost, begin = RuntimeError("Connection reset"), clock.now
    assert workers.reason_of(lost) is lost
    assert clock.now - begin < 3
    assert workers.reason_of(KeyboardInterrupt()) is not lost  # at once

    def fail() -> None:
        channel.cells[1].text = describe_error(MemoryError("no memory"))
        channel.cells[1].state = State.FAILED

    clock.on_sleep = fail
    reason = workers.reason_of(lost)
    assert isinstance(reason, EngineError)
    assert str(reason) == "rank 1 has failed: MemoryError: no memory"


@pytest.mark.parametrize(
    "error",
    [
        InvalidInputError("model", "語" * 9000, "語" * 9000),
        InvalidInputError("model", object(), "must be a folder"),
        RuntimeError("\x00\ud800" * 9000),
    ],
)
def test_an_error_of_any_length_fits_a_cell(error: Any) -> None:
    channel = Channel(2)
    channel.cells[1].text = describe_error(error)
    channel.cells[1].state = State.FAILED
    kind = InvalidInputError if isinstance(error, InvalidInputError) else EngineError
    with pytest.raises(kind, match="rank 1"):
        Workers(channel, 1).check()
