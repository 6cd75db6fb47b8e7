"""``pagespec serve`` over a slowed content runner: a process for tests that send signals.

python -m tests.server.serve_content serve --model content --port 0
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from pagespec.cli import main, make_llm
from pagespec.server import run
from tests.support.content_llm import content_llm
from tests.support.content_runner import ContentRunner

ROOT = Path(__file__).resolve().parents[2]
STEP_S = 0.02
NUM_BLOCKS, BLOCK_SIZE = 256, 2
_NARROW, _STEP_S = "TEST_NARROW_SOCKETS", "TEST_STEP_S"


class SlowRunner(ContentRunner):
    def dispatch(self, plan: Any) -> Any:
        time.sleep(float(os.environ.get(_STEP_S, STEP_S)))
        return super().dispatch(plan)


class Process(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    log: Path


@contextmanager
def server_process(
    log: Path, *options: str, is_narrow: bool = False, step_s: float = STEP_S, **settings: Any
) -> Iterator[Process]:
    """A running server; killed at the end if it has not exited by itself."""
    environment = {**os.environ, _NARROW: "1" if is_narrow else "", _STEP_S: str(step_s)}
    with log.open("w") as stderr:
        command = [sys.executable, "-m", __name__, "serve", "--model", "content", "--port", "0"]
        process = subprocess.Popen(
            [*command, *options], cwd=ROOT, stderr=stderr, text=True, env=environment, **settings
        )
    try:
        yield Process(process, _url(process, log), log)
    finally:
        process.kill()
        process.wait()


def _url(process: subprocess.Popen[str], log: Path) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        text = log.read_text()
        if " at http" in text or " at unix:" in text:
            return text.partition(" at ")[2].split()[0].rstrip('",}')
        time.sleep(0.02)
    raise AssertionError(f"the server did not start: {log.read_text()}")


def _make_llm(_model: str, **_: object) -> Any:
    runner = SlowRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=3)
    return content_llm(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, runner=runner)


def _narrow_listen(config: Any) -> socket.socket:
    listener = _listen(config)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections have it as well
    return listener


_listen = run.listen

if __name__ == "__main__":
    os.environ.pop("PAGESPEC_API_KEY", None)
    with (
        mock.patch.object(make_llm, "make_llm", _make_llm),
        mock.patch.object(run, "listen", _narrow_listen if os.environ.get(_NARROW) else _listen),
    ):
        main.main()
