"""The GPU is opened early where the engine may use one; the collector is off in its block only."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

from pagespec.startup import create_cuda_context_async, gc_paused


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
