"""A process that ends while its threads run native code has its own exit code."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from pagespec.threads import start_native

_PROGRAM = """
import asyncio, sys, threading
from llguidance import LLMatcher, LLTokenizer
from pagespec.serving.engine_thread import EngineThread
from pagespec.serving.lanes import Lane
from pagespec.threads import start_native

tokenizer = LLTokenizer("byte")
grammar = LLMatcher.grammar_from_regex("(a|b|c|d){1,9000}x")

def native(num):
    for _ in range(num):
        LLMatcher(tokenizer, grammar, log_level=0).compute_bitmask()

class Engine:
    has_work = True
    def step(self):
        native(5)

def engine():
    ignore = lambda *_: None
    EngineThread(Engine(), threading.Event(), ignore, ignore, ignore).call(int).result()

def lane():
    async def main():
        working = asyncio.ensure_future(Lane("test", 1, 9.0).run(native, 50))
        await asyncio.sleep(0.02)
        working.cancel()
    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        pass

def plain():
    start_native(lambda: native(50), "test")

{"engine": engine, "lane": lane, "plain": plain}[sys.argv[1]]()
raise SystemExit(7)
"""


@pytest.mark.parametrize("kind", ["engine", "lane", "plain"])
def test_the_exit_code_is_that_of_the_program(kind: str) -> None:
    """Native frames that are unwound during finalization would end it by a signal."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, kind], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (7, "")


def test_a_thread_that_has_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import atexit

    hooks: list[Any] = []
    monkeypatch.setattr(atexit, "register", hooks.append)
    monkeypatch.setattr(atexit, "unregister", hooks.remove)
    go_on = threading.Event()
    thread = start_native(go_on.wait, "test")
    assert len(hooks) == 1
    go_on.set()
    thread.join()
    assert hooks == []
