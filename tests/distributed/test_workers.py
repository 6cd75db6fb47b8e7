"""How rank 0 watches the others, and what it makes of their errors; without processes."""

from __future__ import annotations

from typing import Any

import pytest

from pagespec.distributed import workers as module
from pagespec.distributed.channel import Channel, State
from pagespec.distributed.workers import Watch, Workers, describe_error
from pagespec.errors import EngineError, InvalidInputError, UnsupportedModelError


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "sleep", self.pass_s)

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


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


def test_a_group_that_moves_may_take_long(clock: Clock) -> None:
    channel, watch = watched()
    begin = clock.now

    def is_done(_: float) -> bool:
        clock.pass_s(0.9)
        channel.cells[2].num_collectives += (clock.now - begin) % 15 < 0.9
        return clock.now - begin > 300

    watch.wait(is_done)


def test_a_process_that_was_stopped_has_not_waited(clock: Clock) -> None:
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
def test_what_all_ranks_refuse_is_told_as_by_one(error: Exception) -> None:
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


def test_the_words_of_a_rank_come_late(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(2)
    workers = Workers(channel, 1)
    lost, begin = RuntimeError("Connection reset"), clock.now
    assert workers.reason_of(lost) is lost
    assert clock.now - begin < 3
    assert workers.reason_of(KeyboardInterrupt()) is not lost  # at once

    def sleep(seconds: float) -> None:
        clock.pass_s(seconds)
        channel.cells[1].text = describe_error(MemoryError("no memory"))
        channel.cells[1].state = State.FAILED

    monkeypatch.setattr(module.time, "sleep", sleep)
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
