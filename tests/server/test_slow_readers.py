"""Clients that do not read are disconnected; they block neither other clients nor shutdown."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.raw_http import head
from tests.server.serve_content import Process, server_process
from tests.server.test_run import Stream

# Each chunk repeats the id.
BODY = {"prompt": [0, 0], "max_tokens": 480, "ignore_eos": True, "seed": 1, "stream": True,
        "request_id": "x" * 256, "return_token_ids": True}  # fmt: skip


@contextmanager
def deaf_client(url: str, body: dict[str, Any] = BODY, path: str = "/v1/completions",
                num_read: int = 0) -> Iterator[socket.socket]:  # fmt: skip
    """A client that sends a request and reads only ``num_read`` bytes of the answer."""
    parts = urlsplit(url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(20)
        connection.connect((parts.hostname, parts.port))
        content = json.dumps(body).encode()
        size = f"Content-Length: {len(content)}"
        connection.sendall(head(path, "Content-Type: application/json", size) + content)
        while num_read > 0:
            num_read -= len(connection.recv(min(num_read, 1024)))
        yield connection


def load(server: Process) -> int:
    return int(httpx.get(f"{server.url}/load", timeout=20).json()["server_load"])


def wait_until_stuck(server: Process, *, is_quick: bool = False) -> None:
    """Until it has written all that is taken, some 80 KB: 250 chunks have more than 120 KB.

    Args:
        is_quick: whether its steps take 5 ms.
    """
    time.sleep(2 if is_quick else 5)
    assert load(server) >= 1, "the answer was taken whole: the test shows nothing"


def test_a_client_that_never_reads_is_let_go(tmp_path: Path) -> None:
    options = ["--write-timeout", "2"]
    with (
        server_process(tmp_path / "log", *options, is_narrow=True, step_s=0.002) as server,
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(deaf_client(server.url, num_read=n)) for n in (0, 0, 5000)]
        # What is whole is let go as well: its connection, and the bytes that it would hold.
        whole = {**BODY, "stream": False, "n": 4, "temperature": 1}
        clients.append(stack.enter_context(deaf_client(server.url, whole)))
        until = time.monotonic() + 60
        while load(server):
            assert time.monotonic() < until, "a client is kept for ever"
            time.sleep(0.1)
        until = time.monotonic() + 30
        for client in clients:
            with pytest.raises(ConnectionError):  # noqa: PT012
                while time.monotonic() < until:
                    client.sendall(b"\r\n")
                    time.sleep(0.05)
        assert Stream(server).read()[-1]["finish_reason"] == "length"
        assert "Traceback" not in server.log.read_text()


@pytest.mark.nightly
def test_a_client_that_reads_slowly_is_served_to_the_end(tmp_path: Path) -> None:
    """Longer than the limit, as it takes some bytes all the time."""
    options = ["--write-timeout", "1"]
    with (
        server_process(tmp_path / "log", *options, is_narrow=True) as server,
        deaf_client(server.url) as client,
    ):
        received, began = b"", time.monotonic()
        while b"[DONE]" not in received:
            part = client.recv(8192)
            assert part, "it was let go"
            received += part
            time.sleep(0.05)
        assert time.monotonic() - began > 3


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, marks=pytest.mark.nightly),
    ],
)
def test_the_drain_ends_in_time_whatever_clients_read(
    tmp_path: Path, number: signal.Signals
) -> None:
    options = ["--drain-timeout", "1"]
    with (
        server_process(tmp_path / "log", *options, is_narrow=True, step_s=0.005) as server,
        deaf_client(server.url),
        deaf_client(server.url, num_read=3000),
        deaf_client(server.url, {**BODY, "stream": False, "n": 4, "temperature": 1}),
    ):
        wait_until_stuck(server, is_quick=True)
        stream = Stream(server, max_tokens=400)
        began = time.monotonic()
        server.process.send_signal(number)
        assert stream.read()[-1]["finish_reason"] == "abort"
        assert server.process.wait(30) == 0
        elapsed_s = time.monotonic() - began
        log = server.log.read_text()
        assert "Traceback" not in log, log
        assert "Cancel " not in log, log
        assert elapsed_s < 1 + 2 + 2.5


@pytest.mark.nightly
def test_a_second_signal_does_not_wait_for_readers(tmp_path: Path) -> None:
    with server_process(tmp_path / "log", is_narrow=True) as server, deaf_client(server.url):
        wait_until_stuck(server)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 4.5
        assert "Traceback" not in server.log.read_text()


def test_a_closed_terminal_lets_streams_end(tmp_path: Path) -> None:
    def heed() -> None:  # also where the tests run under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    with server_process(tmp_path / "log", preexec_fn=heed) as server:
        stream = Stream(server)
        server.process.send_signal(signal.SIGHUP)
        assert stream.read()[-1]["finish_reason"] == "length"
        assert server.process.wait(20) == 0
        assert "shutting down; running requests: 1" in server.log.read_text()


@pytest.mark.nightly
def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with server_process(tmp_path / "log", preexec_fn=ignore) as server:
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.process.poll() is None
