"""The requests of one prompt, read while the engine's thread ends them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pagespec.engine.outputs import RequestMetrics
from pagespec.serving.served import End, Served


@pytest.fixture
def fast_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("fast_switches")
def test_a_continuation_may_end_while_another_asks_for_errors() -> None:
    nothing: Any = None
    served = Served("0", nothing, nothing, [])
    requests: list[Any] = [object() for _ in range(200)]
    is_over = threading.Event()

    def end_them() -> None:
        while not is_over.is_set():
            for request in requests:
                served.ends[request] = End(RequestMetrics())
            served.ends.clear()

    thread = threading.Thread(target=end_them)
    thread.start()
    try:
        for _ in range(3_000):
            assert served.error() is None
    finally:
        is_over.set()
        thread.join()
