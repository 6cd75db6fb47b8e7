"""A server over an engine, and fixtures that block calls inside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pagespec import LLM
from tests.support.server import serving

HELD_S = 60.0


@pytest.fixture(scope="module")
def http(llm: LLM) -> Iterator[httpx.Client]:
    """A client of a server over the file's fixture ``llm``."""
    with serving(llm) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


class Held:
    """Blocked calls: the first one sets ``has_begun``; ``goes_on`` releases them."""

    def __init__(self) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Held]:
    """Blocks those calls of ``owner.name`` whose arguments satisfy ``is_slow``."""

    def hold(owner: Any, name: str, is_slow: Callable[..., bool]) -> Held:
        held, function = Held(), getattr(owner, name)

        def call(*args: Any) -> Any:
            if is_slow(*args):
                held.has_begun.set()
                assert held.goes_on.wait(HELD_S), "others waited for it"
            return function(*args)

        monkeypatch.setattr(owner, name, call)
        return held

    return hold
