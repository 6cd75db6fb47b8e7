"""Start-up: the GPU is opened early where the engine may use one.

Also tests that the garbage collector is off only inside its block.
"""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import sys
from typing import Any

import pytest

from pagespec.startup import create_cuda_context_async, gc_paused, is_watched, log_shown


class FakeDriver:
    """``num_gpus`` GPUs, of which it notes whose contexts were retained."""

    def __init__(self, num_gpus: int | None) -> None:
        self.num_gpus = num_gpus
        self.retained: list[int] = []

    def cuInit(self, _flags: int) -> int:
        return 0 if self.num_gpus else 100

    def cuDeviceGet(self, device: Any, index: int) -> int:
        if index >= self.num_gpus:
            return 101
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, _context: Any, device: ctypes.c_int) -> int:
        self.retained.append(device.value)
        return 0


@pytest.mark.parametrize(
    ("device", "num_gpus", "retained"),
    [
        ("auto", 1, [0]),
        ("cuda", 2, [0]),
        ("cuda:1", 2, [1]),
        ("cuda:2", 2, []),
        ("auto", 0, []),
        ("auto", None, []),  # no driver
        ("cpu", 1, []),
        ("cuda:x", 1, []),
        ("tpu", 1, []),
    ],
)
def test_the_gpu_that_may_be_used_is_opened(
    device: str, num_gpus: int | None, retained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, asked = FakeDriver(num_gpus), []

    def load(name: str) -> FakeDriver:
        asked.append(name)
        if num_gpus is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    thread = create_cuda_context_async(device)
    assert thread is not None or device in ("cpu", "cuda:x", "tpu")
    if thread is not None:
        thread.join()
        assert asked == ["libcuda.so.1"]
    assert driver.retained == retained


def test_it_is_off_in_the_block_only() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


def test_who_has_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Terminal(io.StringIO):
    """A stream of a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_and_a_notebook_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, watched in ((Terminal(), True), (io.StringIO(), False), (None, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert is_watched() is watched
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert is_watched()


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_the_log_is_shown_in_the_block(
    level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("pagespec")
    monkeypatch.setattr(logger, "propagate", False)  # pytest has handlers at the root
    with log_shown(level):
        logger.info("loading")
        with log_shown():  # of an engine inside a command
            logger.info("probing")
        logger.warning("fewer threads")
    logger.info("after")
    shown = ["loading", "probing"] * (level == logging.INFO) + ["fewer threads"]
    assert capsys.readouterr().err.splitlines() == [f"pagespec: {line}" for line in shown]
    assert not logger.handlers


def test_a_log_that_the_application_configures_is_left_as_it_is(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with log_shown():
        logging.getLogger("pagespec").info("loading")
    assert capsys.readouterr().err == ""
    assert not caplog.messages  # the level is the application's
